"""Model files seen with the native engine's eyes: can they be loaded, and how do they look in another layout?

It knows neither the model store, which calls it, nor the adapter, which serves what the store holds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from adapters.errors import EngineUnavailable, GoodgateError


class ModelStoreError(GoodgateError):
    """A model could not be pulled, imported, verified or exported; the message says what to do."""


def check_model(path: Path) -> None:
    """Read a model's header, tensor table and tokenizer; `ModelStoreError` where the engine could not load it."""
    try:
        from native_engine.errors import EngineError as NativeError
        from native_engine.tokenizer import open_tokenizer
        from native_engine.weights import open_checkpoint
    except ImportError as error:
        raise not_installed(error) from error
    try:
        open_checkpoint(path)
        open_tokenizer(path)
    except (NativeError, OSError, ValueError) as error:
        raise ModelStoreError(f"{path} is no model that can be loaded: {error}") from error


def export_hf(source: Path, target: Path) -> None:
    """Write a model in Hugging Face layout; `ModelStoreError` where that is not possible."""
    try:
        from native_engine.errors import EngineError as NativeError
        from native_engine.export import export_hf
    except ImportError as error:
        raise not_installed(error) from error
    try:
        export_hf(source, target)
    except NativeError as error:
        raise ModelStoreError(f"{source} cannot be written in Hugging Face layout: {error}") from error


def token_counter(path: Path) -> Callable[[str], int]:
    """Counts the tokens of a text as the model's own tokenizer cuts it, with no special token put around it.
    `ModelStoreError` where it cannot be read.
    """
    file = path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else _tokenizer_of(path)
    except GoodgateError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions for files that it cannot read
        raise ModelStoreError(f"The tokenizer of {path} cannot be read: {error}.") from error

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


def _tokenizer_of(path: Path) -> Tokenizer:
    """That in a GGUF file, which the engine knows how to build."""
    try:
        from native_engine.errors import EngineError as NativeError
        from native_engine.tokenizer import open_tokenizer
    except ImportError as error:
        raise not_installed(error) from error
    try:
        return open_tokenizer(path).backend
    except (NativeError, OSError, ValueError) as error:
        raise ModelStoreError(f"The tokenizer of {path} cannot be read: {error}") from error


def not_installed(error: ImportError) -> EngineUnavailable:
    return EngineUnavailable(
        f"The native engine needs {error.name or 'torch'}; install it with: pip install 'goodgate[native]'."
    )

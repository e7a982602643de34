"""Model files seen with the native engine's eyes: can they be loaded, and how do they look in another layout?

It knows neither the model store, which calls it, nor the adapter, which serves what the store holds.
"""

from __future__ import annotations

from pathlib import Path

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


def not_installed(error: ImportError) -> EngineUnavailable:
    return EngineUnavailable(
        f"The native engine needs {error.name or 'torch'}; install it with: pip install 'goodgate[native]'."
    )

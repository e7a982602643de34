"""Model files seen with the native engine's eyes: can they be loaded, and how do they look in another layout?

It knows neither the model store, which calls it, nor the adapter, which serves what the store holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from adapters.errors import EngineUnavailable, GoodgateError

if TYPE_CHECKING:
    from native_engine.capacity import Capacity, Device
    from native_engine.config import Dtype

HERE = "here"  # this machine, among the names of devices


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


def capacities(
    path: Path, devices: Sequence[str], *, num_tokens: int, memory_share: float, dtype: Dtype
) -> list[tuple[Device, str, Capacity]]:
    """What each device holds of a model and reads of it at best, by the form of the cache. `here` is this machine.
    `ModelStoreError` where a device or the model is not known."""
    try:
        from native_engine.capacity import DEVICES, capacity, variants
        from native_engine.errors import EngineError as NativeError
        from native_engine.this_machine import this_machine
        from native_engine.weights import open_checkpoint
    except ImportError as error:
        raise not_installed(error) from error
    if unknown := [name for name in devices if name not in (*DEVICES, HERE)]:
        raise ModelStoreError(f"No device {unknown[0]!r} is known; choose from {', '.join((HERE, *DEVICES))}.")
    try:
        config = open_checkpoint(path).config
    except (NativeError, OSError, ValueError) as error:
        raise ModelStoreError(f"{path} is no model that can be planned with: {error}") from error
    if num_tokens > config.max_model_len:
        raise ModelStoreError(f"The model's context is {config.max_model_len} tokens, shorter than {num_tokens}.")
    return [
        (
            device,
            words,
            capacity(
                form,
                device,
                num_tokens=num_tokens,
                kv_cache_dtype=kv_cache_dtype,
                dtype=dtype,
                memory_share=memory_share,
            ),
        )
        for device in (this_machine() if name == HERE else DEVICES[name] for name in devices)
        for words, form, kv_cache_dtype in variants(config)
    ]


def not_installed(error: ImportError) -> EngineUnavailable:
    return EngineUnavailable(
        f"The native engine needs {error.name or 'torch'}; install it with: pip install 'goodgate[native]'."
    )

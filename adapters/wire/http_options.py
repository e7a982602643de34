"""The configuration keys of engines that are reached over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from adapters.base import EngineOptions

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_HOST = r"([^\s/@]+@)?(\[[0-9A-Fa-f:.]+\]|[^\s/:@\[\]?#]+)"  # perhaps a user; a name or an address
URL = Annotated[
    str, Meta(pattern=rf"^(?i:https?)://{_HOST}(:[0-9]{{1,5}})?(/\S*)?\Z", examples=["http://10.0.0.5:8000"])
]


class HTTPOptions(EngineOptions):
    """Keys of every engine that is reached over HTTP."""

    url: URL
    model: str = ""  # the engine's own name for the model; empty: the only one that it serves
    api_key: str = ""
    api_key_env: str = ""  # the variable that holds the key, better than the key itself
    connect_timeout_s: Seconds = 2.0
    first_token_timeout_s: Seconds = 120.0
    token_timeout_s: Seconds = 60.0


def launched_options(kind: type[EngineOptions], url: str, launch_options: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter's options, of the given kind, for an engine that was launched from here.

    An option that launch and adapter both have, such as `embeddings`, says how the engine was started, and so how it
    answers.
    """
    shared = set(kind.__struct_fields__) - set(HTTPOptions.__struct_fields__)
    return {"url": url, **{name: value for name, value in launch_options.items() if name in shared}}

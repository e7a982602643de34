"""Deltas of tool calls as engines write them, put into the one form that OpenAI's clients join.

    calls = ToolDeltas(ids)                  # of one choice; `ids` are those of the whole answer
    calls.read(raw)                          # JSON of a list of deltas in, and out; None where it says nothing
    calls.finish()                           # the same for what was waiting

The form: the first delta of a call has its index, id, type and name, later ones only pieces of its arguments, because
clients join the strings of all of them. Indices run from 0 without gaps, an id names one call, arguments are text.

What engines do instead: TGI repeats the head in every delta, with null for the name and a counter for the id; Ollama
gives calls of one answer the same index and no end of ids; some leave the index or the id out, or give arguments as an
object; llama.cpp lets a name grow from delta to delta (`common_chat_msg_diff` in common/chat.cpp), so its heads wait.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from adapters.tools.formats import new_call_id
from adapters.tools.tool_calls import call_head, call_rest

_NOTHING = Raw(b"")


class _Function(Struct):
    name: str | None = None
    arguments: Raw = _NOTHING


class _Delta(Struct):
    index: int | None = None
    id: Any = None
    function: _Function | None = None


class _Call(Struct):
    number: int
    told_id: str = ""  # the engine's own
    name: str = ""
    waiting: str = ""  # arguments that came before the head could go out
    has_head: bool = False


_deltas = msgspec.json.Decoder(list[_Delta])


class ToolDeltas:
    def __init__(self, ids: set[str], *, names_grow: bool = False) -> None:
        self._ids = ids
        self._names_grow = names_grow
        self._calls: list[_Call] = []
        self._by_index: dict[int | None, _Call] = {}

    @property
    def has_called(self) -> bool:
        return bool(self._calls) and any(call.has_head for call in self._calls)

    def read(self, raw: Raw) -> Raw | None:
        """Raises `msgspec.DecodeError` for what are no deltas of tool calls."""
        told = [each for delta in _deltas.decode(raw) for each in self._read_one(delta)]
        return Raw(msgspec.json.encode(told)) if told else None

    def finish(self) -> Raw | None:
        """What was waiting. Raises `msgspec.ValidationError` for arguments of no function."""
        if not self._calls:
            return None
        if any(call.waiting and not call.name for call in self._calls):
            raise msgspec.ValidationError("A tool call has no name.")
        told = [self._head(call) for call in self._calls if call.name and not call.has_head]
        return Raw(msgspec.json.encode(told)) if told else None

    def _read_one(self, delta: _Delta) -> list[dict[str, Any]]:
        function = delta.function or _Function()
        call, earlier = self._call_of(delta, function.name or "")
        arguments = _as_text(function.arguments)
        if call.has_head:
            return [call_rest(call.number, arguments)] if arguments else []
        call.told_id = _as_id(delta.id) or call.told_id
        call.name = function.name or call.name
        call.waiting += arguments
        if not call.name or (self._names_grow and not call.waiting):
            return earlier
        return [*earlier, self._head(call)]

    def _call_of(self, delta: _Delta, name: str) -> tuple[_Call, list[dict[str, Any]]]:
        """The call that a delta belongs to, and what a new one ends the waiting of."""
        open_one = self._by_index.get(delta.index)
        if delta.index is None and self._calls:
            open_one = self._calls[-1]
        if open_one is not None and not _begins_another(open_one, delta, name):
            return open_one, []
        earlier = [self._head(call) for call in self._calls if call.name and not call.has_head]
        call = _Call(len(self._calls))
        self._calls.append(call)
        self._by_index[delta.index] = call
        return call, earlier

    def _head(self, call: _Call) -> dict[str, Any]:
        call.has_head = True
        call_id = call.told_id if call.told_id and call.told_id not in self._ids else new_call_id()
        self._ids.add(call_id)
        head = call_head(call.number, call_id, call.name)
        head["function"]["arguments"] = call.waiting
        return head


def _begins_another(call: _Call, delta: _Delta, name: str) -> bool:
    """A name for a call that has one begins another call, unless the id or, without ids, the index is the same."""
    if not name or not call.name:
        return False
    told_id = _as_id(delta.id)
    return told_id != call.told_id if told_id else delta.index is None


def _as_id(told: Any) -> str:
    """A counter, as TGI has it, is none: every answer begins with the same one."""
    return told if isinstance(told, str) and not told.isdecimal() else ""


def _as_text(arguments: Raw) -> str:
    if bytes(arguments) in (b"", b"null"):
        return ""
    if bytes(arguments).startswith(b'"'):
        return msgspec.json.decode(arguments, type=str)
    return bytes(arguments).decode()

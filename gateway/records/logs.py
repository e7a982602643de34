"""Log lines: one event a line on stderr, with fields. Prompts, answers, headers and keys never come here.

    log = logs.logger("dispatch")
    logs.info(log, "attempt failed", replica="vllm-0", code="engine_timeout")

Text from outside is escaped, so that nobody can forge a line or colour a terminal.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec

from gateway.config import LogsConfig

ROOT = "goodgate"


def logger(name: str) -> logging.Logger:
    return logging.getLogger(f"{ROOT}.{name}")


def configure(config: LogsConfig) -> None:
    """Send our events to stderr in the wanted format. Called once, by the process that serves."""
    handler = _ToStderr()
    kind = JSONLines if config.format == "json" else TextLines
    handler.setFormatter(kind(is_verbatim=config.verbatim))
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # nobody reads what they look up
    root = logging.getLogger(ROOT)
    root.handlers = [handler]
    root.setLevel(config.level.upper())
    root.propagate = False


class _ToStderr(logging.Handler):
    """Each line in one write, which leaves at once: Python buffers standard error by the line. `StreamHandler` would
    flush it again, and take its lock another time for that."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)


def set_level(config: LogsConfig) -> None:
    logging.getLogger(ROOT).setLevel(config.level.upper())


def info(log: logging.Logger, event: str, **fields: object) -> None:
    _say(log, logging.INFO, event, fields)


def warning(log: logging.Logger, event: str, **fields: object) -> None:
    _say(log, logging.WARNING, event, fields)


def error(log: logging.Logger, event: str, *, error: BaseException, **fields: object) -> None:
    """An event with the traceback of what caused it."""
    _say(log, logging.ERROR, event, fields, error)


def _say(
    log: logging.Logger, level: int, event: str, fields: dict[str, object], error: BaseException | None = None
) -> None:
    """What `log.log` does, but for a look at the stack: where a line comes from says its event."""
    if log.isEnabledFor(level):
        log.handle(_Record(log.name, level, event, fields, error))


_ANY = vars(logging.LogRecord("", logging.INFO, "", 0, "", (), None))


class _Record(logging.LogRecord):
    """Without looking up what nobody reads, which takes longer than all the rest: that is as in any other."""

    def __init__(
        self, name: str, level: int, event: str, fields: dict[str, object], error: BaseException | None
    ) -> None:
        now = time.time()
        self.__dict__.update(_ANY)
        self.name = name
        self.levelno, self.levelname = level, logging.getLevelName(level)
        self.msg = event
        self.created, self.msecs = now, int(now % 1 * 1000) + 0.0
        self.exc_info = None if error is None else (type(error), error, error.__traceback__)
        self.fields = fields


class _Lines(logging.Formatter):
    """Tracebacks say where and what kind; the fault's own message, which may hold any text, only if `is_verbatim`."""

    def __init__(self, *, is_verbatim: bool = False) -> None:
        super().__init__()
        self._is_verbatim = is_verbatim

    def traceback(self, record: logging.LogRecord) -> str:
        assert record.exc_info
        error = record.exc_info[1]
        if self._is_verbatim or error is None:
            return self.formatException(record.exc_info)
        return "\n".join(_without_messages(error))


def _without_messages(error: BaseException) -> Iterator[str]:
    """The fault behind the error, if there is one, then where the error came from, and its kind."""
    if (cause := error.__cause__ or error.__context__) is not None:
        yield from _without_messages(cause)
        yield "which led to:"
    yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
    yield f"{type(error).__module__}.{type(error).__qualname__} (`logs: {{verbatim: true}}` shows what it says)"


class JSONLines(_Lines):
    """`{"time": ..., "level": "info", "event": ..., ...}`"""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.traceback(record)
        return _all_printable(msgspec.json.encode(line, enc_hook=str).decode())


class TextLines(_Lines):
    """`2026-01-31T12:00:00.000Z INFO replica ready model=m replica=vllm-0`"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_timestamp(record)} {record.levelname} {_escape(record.getMessage())}{_told(_fields(record))}"
        return f"{line}\n{self.traceback(record)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return fields


def _timestamp(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=1)
def _second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def _told(fields: dict[str, object]) -> str:
    """` key=value` of each that says something. One look at all of them is enough for most lines: only what is not one
    word is put in quotes."""
    kept = {key: value for key, value in fields.items() if value is not None and value != ""}
    pieces = [f" {key}={value if type(value) is str else _as_text(value)}" for key, value in kept.items()]
    told = "".join(pieces)
    if told.isprintable() and '"' not in told and told.count(" ") == len(pieces):
        return told
    return "".join([f" {key}={_quoted(_as_text(value))}" for key, value in kept.items()])


def _as_text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _quoted(text: str) -> str:
    return text if text.isprintable() and " " not in text and '"' not in text else f'"{_escape(text)}"'


def _all_printable(encoded: str) -> str:
    """JSON lets through some signs that end lines for some readers, or that terminals obey; they stand in strings."""
    if encoded.isprintable():
        return encoded
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in encoded)


def _escape(text: str) -> str:
    if text.isprintable():
        return text.replace('"', '\\"')
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text).replace('"', '\\"')

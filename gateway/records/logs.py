"""Log lines: one event a line on stderr, with fields. Prompts, answers, headers and keys never come here.

    log = logs.logger("dispatch")
    logs.info(log, "attempt failed", replica="vllm-0", code="engine_timeout")

Text from outside is escaped, so that nobody can forge a line or colour a terminal.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import msgspec

from gateway.config import LogsConfig

ROOT = "goodgate"


def logger(name: str) -> logging.Logger:
    return logging.getLogger(f"{ROOT}.{name}")


def configure(config: LogsConfig) -> None:
    """Send our events to stderr in the wanted format. Called once, by the process that serves."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if config.format == "json" else TextLines())
    root = logging.getLogger(ROOT)
    root.handlers = [handler]
    root.setLevel(config.level.upper())
    root.propagate = False


def info(log: logging.Logger, event: str, **fields: object) -> None:
    log.info(event, extra={"fields": fields})


def warning(log: logging.Logger, event: str, **fields: object) -> None:
    log.warning(event, extra={"fields": fields})


def error(log: logging.Logger, event: str, *, error: BaseException, **fields: object) -> None:
    """An event with the traceback of what caused it."""
    log.error(event, extra={"fields": fields}, exc_info=error)


class JSONLines(logging.Formatter):
    """`{"time": ..., "level": "info", "event": ..., ...}`"""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO replica ready model=m replica=vllm-0`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(
            f" {key}={_printable(value)}" for key, value in _fields(record).items() if value not in ("", None)
        )
        line = f"{_timestamp(record)} {record.levelname} {_escape(record.getMessage())}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return fields


def _timestamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _printable(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text.isprintable() and " " not in text and '"' not in text else f'"{_escape(text)}"'


def _escape(text: str) -> str:
    if text.isprintable():
        return text.replace('"', '\\"')
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text).replace('"', '\\"')

"""What may go wrong between us and an engine. Silence is no error of its own: it raises `TimeoutError`.

HopError
|- OutOfFiles         this process may open no socket: nobody's fault but our own
|- Unreachable        no connection: the address, its name or its TLS is at fault; the text is a clause for a person
|  |- NotAccepting    nobody accepts connections there
|  '- ConnectTimeout  nor was one refused in time
|- Dropped            the connection ended before the head of an answer
|- CutOff             and in the middle of its body, or the body broke off in nonsense
'- BadHTTP            what came is not HTTP/1.1 as we know it
"""

from __future__ import annotations


class HopError(Exception):
    pass


class OutOfFiles(HopError):
    pass


class Unreachable(HopError):
    pass


class NotAccepting(Unreachable):
    pass


class ConnectTimeout(Unreachable):
    pass


class Dropped(HopError):
    """`is_unanswered`: not a byte had come, so a kept connection may simply have been closed before the request."""

    def __init__(self, *, is_unanswered: bool) -> None:
        super().__init__("the connection is closed without an answer")
        self.is_unanswered = is_unanswered


class CutOff(HopError):
    pass


class BadHTTP(HopError):
    pass

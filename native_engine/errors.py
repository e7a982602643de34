"""What the engine may raise.

    EngineError
    |-- PromptTooLong     the prompt fits neither the model's context nor the KV pool; refused at `add`, never later
    |-- InvalidParams     a field is out of range (also a ValueError); the message names the field and the range
    |-- GrammarFailed     a text that a grammar holds cannot go on; the request ends with this error
    |-- TooLate           the first token cannot be in time, and the targets say that such requests end
    |-- StepFailed        a step could not be computed: those who had a part in it fail, the engine goes on
    |-- EngineStopped     the engine was closed, or its thread died; nothing is generated any more
    `-- InvariantBroken   the engine's own book-keeping contradicts itself: a bug here, never the caller's fault

`OutOfBlocks` stands apart and never leaves the engine: it is how the block pool says that a request for blocks cannot
be met now.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of the tree."""


class PromptTooLong(EngineError):
    def __init__(self, num_prompt_tokens: int, max_prompt_tokens: int, because: str) -> None:
        super().__init__(
            f"The prompt has {num_prompt_tokens} tokens, but {because} leaves room for at most {max_prompt_tokens}."
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens


class InvalidParams(EngineError, ValueError):
    pass


class GrammarFailed(EngineError):
    pass


class TooLate(EngineError):
    def __init__(self, expected_s: float, target_s: float) -> None:
        super().__init__(
            f"The first token would come after about {expected_s:.1f} s; the target is {target_s:g} s. "
            "Try again later, or elsewhere."
        )
        self.retry_after_s = expected_s - target_s


class StepFailed(EngineError):
    """Its cause may tell of this machine, so it is for the log."""

    def __init__(self, request_ids: list[str]) -> None:
        super().__init__("The native engine failed in a step; its log says why.")
        self.request_ids = request_ids


class EngineStopped(EngineError):
    pass


class InvariantBroken(EngineError):
    pass


def require(holds: bool, message: str) -> None:
    """An `assert` that stays when Python runs optimised."""
    if not holds:
        raise InvariantBroken(message)


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for. Nothing was taken."""

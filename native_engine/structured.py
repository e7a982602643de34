"""Holds a request's text to a grammar: which tokens may come next, and when the text is complete.

    compiler = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
    matcher = compiler.matcher(Grammar("json", '{"type": "integer"}')).result()
    matcher.allowed                      # bool [vocab_size]: what may come next
    matcher.accept(token_id)             # the token that did; `allowed` is that of the one after it

The parsing is llguidance's: a lexer of regex derivatives under an Earley parser, walked over a trie of the vocabulary.
Nothing backtracks, so there is no pattern that takes for ever, and what may be spent on a grammar and on a step has
limits. Whatever breaks them ends in an error: nothing here lets a text go on without its grammar.

What is compiled is kept, the last used ones, and copied for each request. Copies share what their lexer has learnt,
and also its death: a grammar that failed once in the middle of a text is compiled anew for the next request.

An end-of-text token is allowed exactly where the text may end, and nothing else is where it must.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from native_engine.errors import EngineStopped, GrammarFailed, InvalidParams
from native_engine.sampling_params import Grammar

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from native_engine.tokenizer import TextTokenizer

    Mask: TypeAlias = NDArray[np.bool_]

MAX_GRAMMAR_CHARS = 64 << 10
MAX_KEPT = 128
# A grammar of the longest length that refers from each definition to the next is compiled by recursion, some thousand
# levels deep, which overflows the 8 MiB that threads usually have. It needs less than 64.
COMPILER_STACK_BYTES = 256 << 20
# A model that may write any white space between two tokens of JSON sometimes writes nothing else.
JSON_WHITESPACE = r"[ \t\n\r]{0,16}"

_Forget: TypeAlias = Callable[[], None]


class TokenMatcher:
    """Where one request's text stands in its grammar. Belongs to the engine thread once the request is there."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, forget: _Forget) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._forget = forget
        self.allowed = self._next_mask()

    def accept(self, token_id: int) -> None:
        """Go past `token_id`. Raises `GrammarFailed` where the text cannot go on within the limits."""
        self._matcher.consume_token(token_id)
        self.allowed = self._next_mask()

    def _next_mask(self) -> Mask:
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(packed, bitorder="little", count=self._vocab_size).view(np.bool_)
        if self._matcher.is_error() or not allowed.any():
            self._forget()
            raise GrammarFailed(f"The answer cannot follow its grammar any further: {_reason(self._matcher)}.")
        return allowed


class GrammarCompiler:
    """Grammars to matchers, in a thread of its own, one at a time: a flood of grammars takes one core at most."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        max_kept: int = MAX_KEPT,
        limits: LLParserLimits | None = None,
    ) -> None:
        """`limits`: what a grammar, and a step of it, may take; None for those of `default_limits`."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._max_kept = max_kept
        self._limits = limits or default_limits()
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # the thread's, but for `_forget`
        self._vocabulary: LLTokenizer | None = None  # takes a quarter of a second: for the first grammar
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="native-grammars")
        _start_with_stack(self._thread, COMPILER_STACK_BYTES)

    def matcher(self, grammar: Grammar) -> Future[TokenMatcher]:
        """A fresh matcher, at the beginning of the text. The future raises `InvalidParams` for what is no grammar."""
        try:
            return self._thread.submit(self._matcher, grammar)
        except RuntimeError as error:
            raise EngineStopped("The engine was closed.") from error

    def close(self) -> None:
        """End the thread; what waits for it fails with `EngineStopped`. Safe to call twice."""
        self._is_closed = True
        self._thread.shutdown()

    # --- in the thread

    def _matcher(self, grammar: Grammar) -> TokenMatcher:
        if self._is_closed:
            raise EngineStopped("The engine was closed.")
        compiled = self._kept.get(grammar)
        if compiled is None:
            compiled = self._kept[grammar] = self._compile(grammar)
        self._kept.move_to_end(grammar)
        if len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)
        try:
            return TokenMatcher(compiled.deep_copy(), self._vocab_size, lambda: self._forget(grammar, compiled))
        except GrammarFailed as error:  # before the first token: nothing fits it
            raise InvalidParams(f"grammar cannot be followed: {_reason(compiled)}.") from error

    def _forget(self, grammar: Grammar, compiled: LLMatcher) -> None:
        if self._kept.get(grammar) is compiled:
            self._kept.pop(grammar, None)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.source) > MAX_GRAMMAR_CHARS:
            raise InvalidParams(f"grammar must have at most {MAX_GRAMMAR_CHARS} characters, not {len(grammar.source)}.")
        if self._vocabulary is None:
            self._vocabulary = LLTokenizer(
                self._tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        try:
            source = _SOURCES[grammar.kind](grammar.source)
        except ValueError as error:
            raise InvalidParams(f"grammar is no JSON schema: {error}.") from error
        compiled = LLMatcher(self._vocabulary, source, log_level=0, limits=self._limits)
        if compiled.is_error():
            raise InvalidParams(f"grammar cannot be followed: {_reason(compiled)}.")
        return compiled


def _json_grammar(schema: str) -> str:
    """A keyword that is not known is an error, whatever the schema itself says about it."""
    options: Any = {"whitespace_pattern": JSON_WHITESPACE, "lenient": False}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


_SOURCES: dict[str, Callable[[str], str]] = {
    "json": _json_grammar,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}


def default_limits() -> LLParserLimits:
    """Those of llguidance for time, tens of milliseconds a grammar and a step; less memory, about 100 MB a grammar."""
    return LLParserLimits(max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False)


def _reason(matcher: LLMatcher) -> str:
    """Its first line says what is wrong, the others point into the grammar."""
    lines = matcher.get_error().strip().splitlines() or ["no token may come next"]
    cause = next((line for line in lines if line.startswith("error: ")), lines[0])
    return cause.removeprefix("error: ").rstrip(".:")[:300]


def _start_with_stack(pool: ThreadPoolExecutor, num_bytes: int) -> None:
    """The size is that of all threads that start now; it is memory only as far as it is used."""
    usual = threading.stack_size(num_bytes)
    try:
        pool.submit(int).result()
    finally:
        threading.stack_size(usual)

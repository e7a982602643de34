"""From one ended exchange to its row of the spool. Pure.

Stamps come in CLOCK_MONOTONIC and leave as nanoseconds from the cell's start.
"""

from __future__ import annotations

from arena.load.answer_reader import Answer
from arena.load.connection import Exchange
from arena.load.spool import RequestRow, Status

CANCELLED = "cell_ended"
CLIENT_TIMEOUTS = ("request_timeout", "connect_timeout")


def request_row(exchange: Exchange, answer: Answer, *, epoch_ns: int, worker: int) -> RequestRow:
    """The row; `answer` has stamps from the cell's start already."""

    def relative(t_ns: int | None) -> int | None:
        return None if t_ns is None else t_ns - epoch_ns

    status, err_class = _outcome(exchange, answer)
    request = exchange.request
    return RequestRow(
        seq=request.seq,
        measured=exchange.measured,
        worker=worker,
        prompt_id=request.prompt_id,
        max_tokens=request.max_tokens,
        scheduled_ns=request.scheduled_ns,
        sent_ns=relative(exchange.sent_ns),
        connected_ns=relative(exchange.connected_ns),
        wrote_ns=relative(exchange.wrote_ns),
        first_byte_ns=relative(exchange.response.first_byte_ns),
        role_ns=answer.role_ns,
        first_reason_ns=answer.first_reason_ns,
        first_text_ns=answer.first_text_ns,
        first_gen_ns=answer.first_gen_ns,
        last_gen_ns=answer.last_gen_ns,
        usage_ns=answer.usage_ns,
        done_ns=relative(exchange.done_ns),
        status=status,
        http=exchange.response.http,
        err_class=err_class,
        err_message=answer.err_message,
        finish_reason=answer.finish_reason,
        in_tok_usage=answer.in_tok_usage,
        out_tok_usage=answer.out_tok_usage,
        reason_tok_usage=answer.reason_tok_usage,
        cached_tok=answer.cached_tok,
        out_tok_counted=answer.out_tok_counted,
        tokens_known=answer.tokens_known,
        n_chunks=answer.n_chunks,
        n_recvs=answer.n_recvs,
        reused=exchange.reused,
        text=answer.text,
        token_ns=answer.token_ns,
        token_n=answer.token_n,
        token_kind=answer.token_kind,
    )


def _outcome(exchange: Exchange, answer: Answer) -> tuple[Status, str | None]:
    """What became of a request: the client's own reasons first, then the transport's, then the answer's."""
    fault = exchange.fault
    if exchange.sent_ns is None:
        return "unsent", fault
    if fault == CANCELLED:
        return "cancelled", None
    if fault in CLIENT_TIMEOUTS:
        return "timeout", fault
    if exchange.response.http is None and fault is not None:
        return "error", fault
    if answer.status == "truncated" and fault is not None:
        return "truncated", fault
    return answer.status, answer.err_class

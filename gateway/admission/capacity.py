"""May this request come in? Pure: counts go in, a refusal or None comes out.

A gateway that takes more than it can carry serves nobody in time, so beyond `max_in_flight` open generations it
refuses at once, with 503 and Retry-After. 503 always means our capacity; a caller's own quota would be 429.
"""

from __future__ import annotations

from adapters.errors import Overloaded

FULL_RETRY_AFTER_S = 1.0
DRAINING_RETRY_AFTER_S = 5.0


def refusal(num_wanted: int, *, in_flight: int, max_in_flight: int, is_draining: bool) -> Overloaded | None:
    """Why `num_wanted` more generations cannot start now; None when they can."""
    if is_draining:
        return Overloaded("The gateway is shutting down; send the request again.", retry_after_s=DRAINING_RETRY_AFTER_S)
    if in_flight + num_wanted > max_in_flight:
        return Overloaded(
            f"The gateway is full ({in_flight} of {max_in_flight} generations are open); try again shortly.",
            retry_after_s=FULL_RETRY_AFTER_S,
        )
    return None

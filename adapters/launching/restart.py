"""When an engine that has ended by itself is started again, and when not any more. Pure: no clock, no process.

    crashes = Crashes()
    crashes = crashes.and_one(uptime_s)        # None: it never became ready
    delay_s = crashes.delay_s()                # None: give up

The delays are 1, 2, 4 ... 30 s without chance in them: one engine on one machine has nobody to stay out of step with.
A crash after a good while is a first crash again. An engine that ends at once, time after time, does not get better
by being started; one that serves a little while between its crashes is started for ever.
"""

from __future__ import annotations

from msgspec import Struct


class Policy(Struct, frozen=True, kw_only=True):
    """How patient to be. An engine is up from its first good answer on its readiness path."""

    first_delay_s: float = 1.0
    last_delay_s: float = 30.0
    settled_after_s: float = 60.0  # up for so long, and the crashes before are forgotten
    quick_s: float = 10.0  # up for less than this, or never, and the crash is a quick one
    max_quick: int = 5  # so many quick crashes in a row are the last


DEFAULT = Policy()


class Crashes(Struct, frozen=True):
    """What the past of an engine says about its future."""

    in_a_row: int = 0  # since it was last up for a good while
    quick: int = 0  # of those the latest, without one between them that was not quick

    def and_one(self, uptime_s: float | None, policy: Policy = DEFAULT) -> Crashes:
        """The account after one more crash of an engine that had been up for so long."""
        has_settled = uptime_s is not None and uptime_s >= policy.settled_after_s
        is_quick = uptime_s is None or uptime_s < policy.quick_s
        return Crashes(1 if has_settled else self.in_a_row + 1, self.quick + 1 if is_quick else 0)

    def delay_s(self, policy: Policy = DEFAULT) -> float | None:
        """How long to wait before the next start; None to give up."""
        if self.quick >= policy.max_quick:
            return None
        doublings = min(self.in_a_row - 1, 64)  # 2 to the power of a year's crashes is no float
        return min(policy.first_delay_s * 2.0**doublings, policy.last_delay_s)

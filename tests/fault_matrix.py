"""What goes wrong between a gateway and its engines, clients and host; and the failure scenarios that are scored.

F.. are faults with what must hold while they last; S.. the scenarios of failoverbench (github.com/failoverbench), by
its numbers, and SCORES what tests/gateway/test_scorecard.py holds them to. tests/reliability.py makes its page of them,
with the tests that carry their numbers in a mark.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.replays import Fault

LOAD = "nothing replays it yet"

FAULT_MATRIX = {
    "F01": Fault("An engine refuses connections", "The request is answered by another; no client sees an error."),
    "F02": Fault("An engine's host swallows connections", "Given up at the connect deadline, then as F01."),
    "F03": Fault("An engine accepts and says nothing", "Given up at the first token's deadline, and closed."),
    "F04": Fault("A 200, and then silence", "As F03: nothing was committed."),
    "F05": Fault("An engine is killed before the first byte", "Nobody loses a request while another lives."),
    "F06": Fault("An engine is killed amid an answer", "A visible error, or the exact continuation."),
    "F07": Fault("A reset inside a chunk", "A visible error; no part of an event is sent as a whole one."),
    "F08": Fault("A stream ends without `[DONE]`", "It counts as truncated, never as success."),
    "F10": Fault("Two events in one piece, a character in two", "Events and text are those of the engine."),
    "F11": Fault("A line that is no SSE or no JSON", "An error in the stream; the gateway goes on."),
    "F13": Fault("A client reads a kilobyte a second, or nothing", "Others notice nothing; it is cut off in time."),
    "F14": Fault("A client vanishes, in any phase", "The engine stops, and nothing is held for it any more."),
    "F15": Fault("Bursts of 500, 502, 503, 429 and 529", "Retries keep to their budget, and to Retry-After."),
    "F17": Fault("All engines go down, and come back", "Fast 503s, few attempts, and use soon after."),
    "F18": Fault("One engine is ten times slower", "It loses its traffic; the others' share is served in time."),
    "F19": Fault("SIGTERM with open streams", "They finish within the limit, or are told; exit status 0."),
    "F20": Fault("The gateway is killed and starts again", "Records, keys and budgets are what they were."),
    "F21": Fault("A hundred reloads at load, some of bad files", "No request fails; a bad file changes nothing."),
    "F23": Fault("The disk of the ledger is full", "Answers go on; what was not recorded is counted."),
    "F24": Fault("The disk of the ledger fails", "As F23."),
    "F25": Fault("No file descriptor is left", "New requests are refused; open streams go on."),
    "F27": Fault("The event loop stands still for two seconds", "It is seen, load is shed, no timeout follows."),
    "F28": Fault("An engine's name does not resolve", "A clean 503, or another engine; the loop goes on."),
    "F29": Fault("An event of more than 10 MB", "An error in the stream; memory stays bounded."),
    "F30": Fault("The native engine fails in a step", "Those in the step fail, and the next is served."),
}

SCENARIOS = {
    "S01": Fault("429 with Retry-After: 2, then well", "Answered, and not asked again within the two seconds."),
    "S02": Fault("429 that lasts", "At most 4 attempts in 3 s and 6 in all; then an error that says so."),
    "S03": Fault("One 500, then well", "Answered."),
    "S04": Fault("503 that lasts", "The fallback answers."),
    "S05": Fault("A reset before the headers", "Answered."),
    "S07": Fault("The first token takes 20 s", "The fallback answers within 15 s."),
    "S08": Fault("Cut after 40 of 60 words", "Never shown as whole."),
    "S09": Fault("Silent for 30 s after 20 words", "An error in time, never shown as whole."),
    "S12": Fault("The prompt is too long for the model", "Not asked again; the model for long prompts answers."),
    "S13": Fault("A content filter ends the answer", "Passed on as it is, and not tried elsewhere."),
    "S15": Fault("Down for 60 s, then well", "Used again within 30 s."),
    "S16": Fault("The fallback has answered", "Answer, headers and accounts name the model that did."),
}


class Score(NamedTuple):
    """What a client sees: `passed`, where all is well in the end; `safe`, an error in time that it cannot overlook."""

    whole: str
    streamed: str


SCORES = {
    **dict.fromkeys(SCENARIOS, Score("passed", "passed")),
    "S08": Score("passed", "safe"),  # the client has seen the beginning, which nobody can take back
    "S09": Score("passed", "safe"),
}

"""What every engine's adapter keeps (adapters/base.py), checked on each of them through the same door.

The suite is adapters/conformance.py, which other packages run over theirs; the subjects are those of conftest.py.
"""

from __future__ import annotations

import pytest

from adapters.conformance import HISTORY, Conformance
from tests.contract.conftest import HTTPSubject, chat, collect


class TestContract(Conformance):
    """Over every engine of this repository."""


@pytest.mark.replay("W10", "W12")
async def test_history_with_every_form_of_content_is_sent_in_the_one_form_that_all_read(
    http_subject: HTTPSubject,
) -> None:
    await collect(http_subject.adapter, chat(messages=HISTORY, max_tokens=2))
    sent = http_subject.twin.bodies[-1]["messages"]
    beside_calls = None if http_subject.engine == "tgi" else ""  # TGI would read content alone, even an empty one
    contents = ["Be brief.", "Hi there", beside_calls, "4", beside_calls, "", "", ""]
    assert [message.get("content") for message in sent] == contents
    assert sent[0]["role"] == "system"

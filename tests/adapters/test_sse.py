"""Events come out whole and equal, wherever the reads cut the bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import EngineProtocolError
from adapters.wire.sse import Event, EventSplitter, encode


def feed_all(splitter: EventSplitter, reads: Iterable[bytes]) -> list[Event]:
    return [event for read in reads for event in splitter.feed(read)]


def split(*reads: bytes) -> list[Event]:
    splitter = EventSplitter()
    return feed_all(splitter, reads) + splitter.close()


def data(*reads: bytes) -> list[bytes]:
    return [event.data for event in split(*reads)]


ODD_STREAM = (
    b"\xef\xbb\xbfdata: bom\n\n"
    b": comment\n\n"
    b"data:no space\r\n\r\n"
    b"data: cr\r\r"
    b"data:  two spaces \n\n"
    b"event: named\r\nid: 7\r\ndata: first\r\ndata: second\r\n\r\n"
    b"event: only a name\n\nid: 9\nretry: 10\n\n"
    b"data\n\n"
    b"unknown: field\ndata: after unknown\n\n\n\n"
    b": ping\ndata: after comment\n\n" + "data: déjà 🌱\n\n".encode() + b"data: [DONE]\n"
)
ODD_EVENTS = [
    Event(b"bom"),
    Event(b"no space"),
    Event(b"cr"),
    Event(b" two spaces "),
    Event(b"first\nsecond", "named"),
    Event(b""),
    Event(b"after unknown"),
    Event(b"after comment"),
    Event("déjà 🌱".encode()),
    Event(b"[DONE]"),
]


def test_every_form_of_event_is_read() -> None:
    assert split(ODD_STREAM) == ODD_EVENTS


def test_a_cut_at_any_one_byte_changes_nothing() -> None:
    for cut in range(len(ODD_STREAM) + 1):
        assert split(ODD_STREAM[:cut], ODD_STREAM[cut:]) == ODD_EVENTS, cut


def test_byte_by_byte_changes_nothing() -> None:
    assert split(*(ODD_STREAM[i : i + 1] for i in range(len(ODD_STREAM)))) == ODD_EVENTS


def test_two_cuts_around_every_short_piece_change_nothing() -> None:
    for start in range(len(ODD_STREAM)):
        for end in (start + 1, start + 2, start + 3):
            assert split(ODD_STREAM[:start], ODD_STREAM[start:end], ODD_STREAM[end:]) == ODD_EVENTS, (start, end)


stream_bytes = st.lists(
    st.sampled_from([b"\r", b"\n", b"\r\n", b"data:", b"data: ", b"event: e", b"id: 1", b":", b" ", b"x", b"\xe2\x82"]),
    max_size=40,
).map(b"".join)


@given(stream_bytes, st.data())
def test_any_bytes_cut_anywhere_give_the_same_events(stream: bytes, draw: st.DataObject) -> None:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reads = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert split(*reads) == split(stream)


def reference(stream: bytes) -> list[Event]:
    """The standard's algorithm, one line at a time over the whole stream: slow and obvious."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    lines = text.split(b"\n")[:-1]  # a cut last line does not count
    events: list[Event] = []
    fields: list[bytes] = []
    name = b""
    for line in [*lines, b""]:
        if not line:
            if fields:
                events.append(Event(b"\n".join(fields), name.decode("utf-8", "replace")))
            fields, name = [], b""
        elif not line.startswith(b":"):
            field, _, value = line.partition(b":")
            value = value[1:] if value.startswith(b" ") else value
            fields += [value] if field == b"data" else []
            name = value if field == b"event" else name
    return events


@given(stream_bytes)
def test_the_fast_path_agrees_with_the_standard_line_by_line(stream: bytes) -> None:
    assert split(stream) == reference(stream)


@given(st.binary(max_size=200).filter(lambda value: b"\r" not in value), st.sampled_from(["", "ping"]))
def test_what_is_encoded_is_read_back(value: bytes, name: str) -> None:
    assert split(encode(value, name)) == [Event(value, name)]


def test_encoded_data_cannot_forge_an_event() -> None:
    assert data(encode(b"a\r\n\r\ndata: forged\rb")) == [b"a\n\ndata: forged\nb"]


def test_a_line_cut_by_the_end_of_the_stream_is_not_an_event() -> None:
    assert data(b"data: whole\n\ndata: half") == [b"whole"]


def test_an_event_of_300_kb_passes() -> None:
    long = b"x" * 300_000
    reads = [b"data: ", *(long[i : i + 65_536] for i in range(0, len(long), 65_536)), b"\n\n"]
    assert data(*reads) == [long]


@pytest.mark.parametrize("read_size", [1, 7, 1000, 10_000])
def test_an_event_is_refused_above_the_limit_and_only_there_whatever_the_reads(read_size: int) -> None:
    for size, fits in ((994, True), (995, False)):  # with "data: " exactly at the limit of 1000, and one above
        splitter = EventSplitter(max_event_bytes=1000)
        stream = b"data: " + b"x" * size + b"\n\n"
        reads = [stream[i : i + read_size] for i in range(0, len(stream), read_size)]
        if fits:
            assert feed_all(splitter, reads) == [Event(b"x" * size)]
        else:
            with pytest.raises(EngineProtocolError, match="larger than 1000 bytes"):
                feed_all(splitter, reads)


def test_the_default_limit_is_8_mib() -> None:
    splitter = EventSplitter()
    assert feed_all(splitter, [b"data: ", b"x" * ((8 << 20) - 6), b"\n\n"]) == [Event(b"x" * ((8 << 20) - 6))]
    with pytest.raises(EngineProtocolError, match="8388608"):
        feed_all(splitter, [b"data: ", b"x" * ((8 << 20) - 5)])


@pytest.mark.replay("R34")
def test_a_long_event_in_small_reads_takes_linear_time() -> None:
    """Four times the reads may take about four times as long; joining anew at each read would take sixteen times."""

    def seconds(num_reads: int) -> float:
        splitter = EventSplitter()
        started = time.perf_counter()
        for _ in range(num_reads):
            splitter.feed(b"x" * 64)
        assert splitter.feed(b"\n\n") == []
        return time.perf_counter() - started

    seconds(1000)
    assert seconds(80_000) < 10 * seconds(20_000) + 0.05

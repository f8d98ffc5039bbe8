"""Server-sent events at any chunk boundary."""

from __future__ import annotations

import time

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.errors import GarbledError
from bottega.openai_api.streams import DONE_EVENT, EventReader, to_event

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
NOISE = st.sampled_from([b": comment", b":", b"id: 7", b"event: x", b"retry: 10", b"nonsense"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[object], bytes]:
    values: list[object] = list(draw(st.lists(JSON, max_size=5)))
    text = b""
    for value in values:
        end = draw(ENDS)
        pretty = orjson.dumps(value, option=orjson.OPT_INDENT_2) if draw(st.booleans()) else None
        space = b" " * draw(st.integers(0, 1))
        rows = [b"data:" + space + row for row in (pretty or orjson.dumps(value)).split(b"\n")]
        rows.insert(draw(st.integers(0, len(rows))), draw(NOISE))
        text += end.join([*rows, b"", b""])
    return values, text


@given(streams(), st.data())
def test_events_do_not_depend_on_chunk_boundaries(
    stream: tuple[list[object], bytes], data: st.DataObject
) -> None:
    values, text = stream
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    reader, payloads = EventReader("x"), []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        payloads += reader.feed(text[start:stop])
    assert [orjson.loads(payload) for payload in payloads] == values
    assert all(b"\n" not in payload and b"\r" not in payload for payload in payloads)
    assert reader.end() == []


@given(st.binary())
def test_single_bytes_give_the_same_events(noise: bytes) -> None:
    whole, slow = EventReader("x"), EventReader("x")
    payloads = whole.feed(noise) + whole.end()
    assert [one for byte in noise for one in slow.feed(bytes([byte]))] + slow.end() == payloads


@settings(max_examples=30)
@given(st.lists(JSON, max_size=6))
def test_round_trip(values: list[object]) -> None:
    text = b"".join(to_event(orjson.dumps(value)) for value in values) + DONE_EVENT
    *payloads, last = EventReader("x").feed(text)
    assert [orjson.loads(payload) for payload in payloads] == values
    assert last == b"[DONE]"


def test_events_without_data_are_dropped() -> None:
    assert EventReader("x").feed(b"\xef\xbb\xbfdata: 1\n\ndata:\n\ndata\n\nid: x\n\n") == [b"1"]


def test_data_lines_are_joined_by_a_space() -> None:
    assert EventReader("x").feed(b"data: 1\r\ndata: 2\r\n\r\n") == [b"1 2"]


def test_last_event_may_lack_its_empty_line() -> None:
    reader = EventReader("x")
    assert reader.feed(b"data: 1\n\ndata: [DONE]") == [b"1"]
    assert reader.end() == [b"[DONE]"]


@pytest.mark.parametrize("flood", [b"x" * 1000, b"data: x\n", b"data:\n"])
def test_endless_event_raises(flood: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.openai_api.streams.MAX_EVENT", 50_000)
    reader = EventReader("x")
    with pytest.raises(GarbledError, match="an event of more than"):
        for _ in range(1000):
            reader.feed(flood)


def test_long_line_in_small_pieces_is_joined_once() -> None:
    reader, start = EventReader("x"), time.process_time()
    reader.feed(b"data: ")
    for _ in range(40_000):
        assert reader.feed(b"x" * 100) == []
    (payloads,) = reader.feed(b"\n\n")
    assert len(payloads) == 4_000_000
    assert time.process_time() - start < 1

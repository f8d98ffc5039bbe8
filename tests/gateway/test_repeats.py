from __future__ import annotations

import asyncio
import copy
import io
from typing import Any, Literal

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from bottega.gateway.repeats.memory import (
    Asked,
    Bodies,
    Flights,
    Remembered,
    Repeats,
    exact_key,
    image_digest,
    may_be_repeated,
)
from bottega.image import Image
from bottega.types import Completion

SCOPE = ("shop", "bottega")
CAT, DOG = "data:image/png;base64,AAAA", "data:image/png;base64,BBBB"
IMAGES = {CAT: "bytes:1", DOG: "bytes:2"}


def part(url: object = CAT, **more: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(content: str) -> dict[str, object]:
    return {"type": "text", "text": content}


BODY: dict[str, Any] = {
    "model": "bottega",
    "messages": [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": [text("What is it?"), part(detail="low")]},
    ],
    "max_tokens": 16,
    "top_p": 0.9,
    "seed": 7,
    "stop": ["\n", "END"],
    "response_format": {"type": "json_schema", "json_schema": {"a": 1, "b": [2]}},
    "repetition_penalty": 1.1,
    "guided": {"choice": ["a"]},
}


def key(body: dict[str, Any] = BODY, scope: tuple[str, ...] = SCOPE, **more: bool) -> str | None:
    return exact_key(body, IMAGES, scope=scope, **more)


def user(*content: object, **more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": list(content)}], **more}


@pytest.mark.parametrize(
    "change",
    [
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": False},
        {"user": "ada", "metadata": {"a": "b"}, "safety_identifier": "x"},
        {"prompt_cache_key": "k"},
        {"n": 1},
        {"n": None, "presence_penalty": 0.0, "frequency_penalty": 0, "modalities": ["text"]},
        {"logprobs": False, "top_logprobs": None, "tools": [], "store": False, "audio": None},
        {"temperature": None, "logit_bias": None},
        {"max_tokens": None, "max_completion_tokens": 16},
        {"seed": 7.0},
    ],
)
def test_equal_by_meaning(change: dict[str, object]) -> None:
    assert key(BODY | change) == key() is not None


def test_equal_by_shape() -> None:
    same = [
        user(text("a"), part()),
        user(text("a"), part(detail="auto")),
        user(text("a"), part(detail=None)),
        user(text("a"), {"image_url": CAT, "type": "image_url"}),
    ]
    assert len({key(body) for body in same}) == 1
    plain = {"messages": [{"content": "a", "role": "user", "name": None}], "model": "m"}
    assert key(plain) == key(user(text("a")))
    assert key(user(text("a"), stop="x")) == key(user(text("a"), stop=["x"]))


def test_unequal_by_meaning() -> None:
    different = [
        BODY,
        BODY | {"model": "bottega/master"},
        BODY | {"temperature": 0},
        BODY | {"top_p": None},
        BODY | {"seed": 8},
        BODY | {"max_tokens": 17},
        BODY | {"max_completion_tokens": 16},
        BODY | {"stop": ["END", "\n"]},
        BODY | {"response_format": {"type": "text"}},
        # The order of a schema's properties is the order of the answer's.
        BODY | {"response_format": {"type": "json_schema", "json_schema": {"b": [2], "a": 1}}},
        BODY | {"repetition_penalty": None},
        BODY | {"presence_penalty": False},
        BODY | {"unheard_of": 1},
        BODY | {"unheard_of": "1"},
        BODY | {"unheard_of": None},
        BODY | {"unheard_of": True},
        user(text("a"), text("b")),
        user(text("ab")),
        user(text("a b")),
        user(text("a"), part()),
        user(part(), text("a")),
        user(text("a"), part(DOG)),
        user(text("a"), part(), part(DOG)),
        user(text("a"), part(DOG), part()),
        user(text("a"), part(detail="high")),
        user(text("a"), part(max_pixels=3)),
        user(text("a"), text(CAT)),
        user(text("a"), text("bytes:1")),
        user({"type": "refusal", "refusal": "a"}),
        user(),
        {"model": "m", "messages": [{"role": "developer", "content": "a"}]},
        {"model": "m", "messages": [{"role": "system", "content": "a"}]},
        {"model": "m", "messages": [{"role": "user", "name": "b", "content": "a"}]},
        {"model": "m", "messages": [{"role": "assistant", "content": ""}]},
        {"model": "m", "messages": [{"role": "assistant", "content": None}]},
        {"model": "m", "messages": []},
    ]
    assert None not in (keys := [key(body) for body in different])
    assert len(set(keys)) == len(different)


@pytest.mark.parametrize(
    "change",
    [
        {"n": 2},
        {"logprobs": True},
        {"top_logprobs": 3},
        {"tools": [{"type": "function"}]},
        {"functions": [{"name": "f"}]},
        {"audio": {}},
        {"modalities": ["text", "audio"]},
        {"web_search_options": {}},
        {"store": True},
        {"temperature": 0.01},
        {"temperature": "0"},
        {"messages": [{"role": "user", "content": [part("https://a.example/x.png")]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "1"}}]}]},
        {"messages": [{"role": "assistant", "audio": {"id": "1"}}]},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": []}]}]},
    ],
)
def test_what_is_never_repeated(change: dict[str, object]) -> None:
    assert key(BODY | change) is None


def test_sampled_answers_are_repeated_as_configured() -> None:
    warm = BODY | {"temperature": 0.7}
    assert key(warm) is None
    assert key(warm, sampled=True) not in (None, key(BODY, sampled=True))
    assert key(warm | {"n": 2}, sampled=True) is None


def test_deep_nesting_is_no_failure() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    assert key(BODY | {"unknown": deep}) is None


def test_scopes_never_meet() -> None:
    scopes = [
        (),
        ("a",),
        ("b",),
        ("a", "b"),
        ("ab",),
        ("a", ""),
        ("", "a"),
        ('a","b',),
        ("a b",),
        ("a,b",),
    ]
    assert len({key(scope=scope) for scope in scopes}) == len(scopes)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)
AFFECTING = [*sorted(set(BODY) - {"messages"}), "temperature", "top_k", "verbosity", "x"]


def meaning(name: str, value: object) -> str:
    """JSON text, in which 1 and 1.0 are one and true is another."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if name == "stop":
        value = [value] if isinstance(value, str) else None if value == [] else value
    if name == "response_format" and value == {"type": "text"}:
        value = None
    return orjson.dumps(value).decode()


@given(st.sampled_from(AFFECTING), JSON, JSON)
def test_a_different_value_is_a_different_key(name: str, one: object, other: object) -> None:
    first, second = key(BODY | {name: one}, sampled=True), key(BODY | {name: other}, sampled=True)
    assert (first == second) == (meaning(name, one) == meaning(name, other))


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.text(max_size=2)
            | st.lists(
                st.builds(text, st.text(max_size=2))
                | st.builds(
                    part, st.sampled_from([CAT, DOG]), detail=st.sampled_from(["low", "high"])
                ),
                max_size=3,
            ),
        },
        optional={"name": st.text(max_size=1)},
    ),
    max_size=3,
)


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    whole = copy.deepcopy(messages)
    for message in whole:
        if isinstance(message["content"], str):
            message["content"] = [text(message["content"])]
    return whole


@given(MESSAGES, MESSAGES)
def test_different_messages_are_different_keys(one: Any, other: Any) -> None:
    keys = [key({"model": "m", "messages": messages}) for messages in (one, other)]
    assert (keys[0] == keys[1]) == (as_parts(one) == as_parts(other))


@given(st.text(), st.binary(min_size=1), st.binary(min_size=1))
def test_the_same_text_with_another_image_is_another_request(
    words: str, one: bytes, other: bytes
) -> None:
    def asked(data: bytes) -> str | None:
        size = (len(data), 1)
        image = Image.from_pillow(Pillow.frombytes("L", size, data))
        images = {image.data_url: image_digest(image, "pixels")}
        return exact_key(user(text(words), part(image.data_url)), images, scope=SCOPE)

    assert (asked(one) == asked(other)) == (one == other)


def encoded(picture: Pillow.Image, format: str = "PNG", **options: Any) -> Image:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return Image.from_bytes(file.getvalue())


@pytest.fixture
def noise() -> Pillow.Image:
    return Pillow.fromarray(np.random.default_rng(0).integers(0, 255, (24, 16, 3), np.uint8))


def test_pixels_encoded_anew_are_the_same_if_so_configured(noise: Pillow.Image) -> None:
    images = [
        encoded(noise, compress_level=0),
        encoded(noise, compress_level=9),
        encoded(noise, "BMP"),
        encoded(noise, "WEBP", lossless=True),
    ]
    assert len({image_digest(image, "bytes") for image in images}) == 4
    assert len({image_digest(image, "pixels") for image in images}) == 1
    changed = noise.copy()
    changed.putpixel((3, 3), (1, 2, 3))
    others = [encoded(changed), encoded(noise.transpose(Pillow.Transpose.TRANSPOSE))]
    assert len({image_digest(image, "pixels") for image in [*others, images[0]]}) == 3


def test_the_shape_of_equal_pixels_counts() -> None:
    digests = {image_digest(encoded(Pillow.new("L", size)), "pixels") for size in [(2, 8), (4, 4)]}
    assert len(digests) == 2


def layered(alpha: int) -> Image:
    return encoded(Pillow.new("RGBA", (4, 4), (255, 255, 255, alpha)))


def white(**options: Any) -> Image:
    return encoded(Pillow.new("L", (4, 4), 255).convert("P"), **options)


def animated(last: str) -> Image:
    frames = [Pillow.new("RGB", (4, 4), colour) for colour in ("red", last)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def deep(value: int) -> Image:
    return encoded(Pillow.fromarray(np.full((4, 4), value, np.uint16)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (layered(255), layered(3)),
        (white(), white(transparency=255)),
        (animated("blue"), animated("green")),
        (deep(257), deep(258)),
        (
            encoded(Pillow.new("CMYK", (4, 4), (0, 0, 0, 255)), "TIFF"),
            encoded(Pillow.new("CMYK", (4, 4), (9, 0, 0, 255)), "TIFF"),
        ),
    ],
)
def test_what_decoding_loses_still_counts(one: Image, other: Image) -> None:
    assert image_digest(one, "pixels") != image_digest(other, "pixels")


def test_a_rotation_is_not_taken_for_granted(noise: Pillow.Image) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    turned = noise.transpose(Pillow.Transpose.ROTATE_270)
    by_exif = encoded(noise, exif=exif)
    assert by_exif.decode().tobytes() == encoded(turned).decode().tobytes()
    assert image_digest(by_exif, "pixels") != image_digest(encoded(turned), "pixels")


@pytest.mark.parametrize(
    ("finish", "said", "kept"),
    [
        ("stop", "a cat", True),
        ("stop", " \n", False),
        ("length", "a ca", False),
        ("content_filter", "a cat", False),
        ("tool_calls", "a cat", False),
        ("refusal", "I cannot", False),
        ("", "a cat", False),
    ],
)
def test_only_whole_answers_may_be_repeated(finish: str, said: str, kept: bool) -> None:
    assert may_be_repeated((Completion(said, finish),)) is kept
    assert not may_be_repeated(())
    assert not may_be_repeated((Completion(said, finish),) * 2)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_replies_are_kept_for_their_time() -> None:
    clock = Clock()
    repeats = Repeats(10_000, 60, clock=clock)
    reply = Remembered(b"{}", "master")
    repeats.put("a", reply)
    clock.now += 59.9
    assert repeats.get("a") is reply
    clock.now += 0.1  # being read does not prolong it
    assert repeats.get("a") is None and len(repeats) == 0 and repeats.held_bytes == 0
    forever = Repeats(10_000, None, clock=clock)
    forever.put("a", reply)
    clock.now += 1e9
    assert forever.get("a") is reply
    forever.clear()
    assert forever.get("a") is None and forever.held_bytes == 0


def test_the_least_recently_used_reply_is_dropped() -> None:
    big = Remembered(b"x" * 1000)
    repeats = Repeats(3 * big.size, None)
    for name in "abc":
        repeats.put(name, big)
    repeats.get("a")
    repeats.put("d", big)
    assert [name for name in "abcd" if repeats.get(name)] == ["a", "c", "d"]
    repeats.put("e", Remembered(b"x" * 100_000))
    assert len(repeats) == 3 and repeats.get("e") is None
    repeats.put("d", Remembered(b"newer"))
    assert repeats.get("d") == Remembered(b"newer")


Put = tuple[Literal["put", "get"], int, int]


@given(st.lists(st.tuples(st.sampled_from(["put", "get"]), st.integers(0, 9), st.integers(0, 900))))
def test_what_is_held_is_what_is_counted(steps: list[Put]) -> None:
    repeats, bodies = Repeats(4000, None), Bodies(4000)
    for step, number, size in steps:
        raw = bytes([number]) * (size + 1)
        if step == "put":
            repeats.put(str(number), Remembered(bytes(size)))
            bodies.put(raw, SCOPE, Asked(str(number)), [])
        else:
            repeats.get(str(number))
            bodies.get(raw, SCOPE)
        assert repeats.held_bytes <= 4000 and bodies.held_bytes <= 4000
        assert (repeats.held_bytes == 0) == (len(repeats) == 0)
        assert (bodies.held_bytes == 0) == (len(bodies) == 0)


def test_an_identical_body_is_known_without_parsing() -> None:
    bodies, asked = Bodies(1 << 20), Asked("k", stream=True, include_usage=True)
    raw = bytes(range(256)) * 400
    bodies.put(raw, SCOPE, asked, [CAT])
    assert bodies.get(bytes(bytearray(raw)), SCOPE) is asked
    assert bodies.get(raw, ("shop", "other")) is None
    assert bodies.get(raw[:-1], SCOPE) is None


def test_a_body_that_differs_in_one_byte_is_another() -> None:
    bodies = Bodies(1 << 24)
    raw = bytes(50_000)
    bodies.put(raw, SCOPE, Asked("k"), [])
    for place in range(0, len(raw), 61):
        other = bytearray(raw)
        other[place] = 1
        assert bodies.get(bytes(other), SCOPE) is None
    assert bodies.get(raw, SCOPE) == Asked("k")


def test_a_body_with_an_image_to_be_fetched_is_read_anew() -> None:
    bodies = Bodies(1 << 20)
    bodies.put(b"{}", SCOPE, Asked("k"), [CAT, "https://a.example/cat.png"])
    assert bodies.get(b"{}", SCOPE) is None


REPLY = Remembered(b"{}")


async def test_those_who_ask_the_same_wait_for_the_first() -> None:
    flights, calls = Flights(), 0

    async def ask() -> Remembered:
        nonlocal calls
        if reply := await flights.wait("k"):
            return reply
        with flights.lead("k") as land:
            calls += 1
            await asyncio.sleep(0.01)
            land(REPLY)
        return REPLY

    assert await asyncio.gather(*(ask() for _ in range(20))) == [REPLY] * 20
    assert calls == 1 and len(flights) == 0
    assert await flights.wait("k") is None


@pytest.mark.parametrize("how", ["fails", "is cancelled", "has nothing to repeat"])
async def test_whatever_befalls_the_first_one_the_others_go_on(how: str) -> None:
    flights, leads = Flights(), asyncio.Event()

    async def first() -> None:
        with flights.lead("k"):
            leads.set()
            await asyncio.sleep(60 if how == "is cancelled" else 0.01)
            if how == "fails":
                raise OSError("no model")

    leader = asyncio.create_task(first())
    await leads.wait()
    others = [asyncio.create_task(flights.wait("k")) for _ in range(5)]
    await asyncio.sleep(0)
    if how == "is cancelled":
        leader.cancel()
    assert await asyncio.wait_for(asyncio.gather(*others), 5) == [None] * 5
    await asyncio.gather(leader, return_exceptions=True)
    assert len(flights) == 0


async def test_one_who_stops_waiting_takes_nobody_along() -> None:
    flights = Flights()
    with flights.lead("k") as land:
        waiting = [asyncio.create_task(flights.wait("k")) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        land(REPLY)
        assert await asyncio.gather(*waiting[1:]) == [REPLY] * 2
    assert waiting[0].cancelled()


async def test_a_second_leader_lands_beside_the_first() -> None:
    flights = Flights()
    with flights.lead("k") as land:
        waiting = asyncio.create_task(flights.wait("k"))
        await asyncio.sleep(0)
        with flights.lead("k") as beside:
            beside(Remembered(b"beside"))
        assert not waiting.done()
        land(REPLY)
    assert await waiting is REPLY

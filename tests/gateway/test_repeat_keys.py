"""Cache keys of repeated requests."""

from __future__ import annotations

import copy
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from bottega.gateway.state.response_cache import exact_key, image_digest
from bottega.image import Image
from bottega.openai_api.request import ChatRequest, parse_messages

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


def request_of(body: dict[str, Any]) -> ChatRequest:
    """Return a request whose fields are not checked."""
    return ChatRequest(body, parse_messages(body["messages"]))


def key(body: dict[str, Any] = BODY, scope: tuple[str, ...] = SCOPE, **more: bool) -> str | None:
    return exact_key(request_of(body), IMAGES, scope=scope, **more)


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
def test_equivalent_fields_have_equal_keys(change: dict[str, object]) -> None:
    assert key(BODY | change) == key() is not None


def test_equivalent_shapes_have_equal_keys() -> None:
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


def test_different_requests_have_different_keys() -> None:
    different = [
        BODY,
        BODY | {"model": "bottega/master"},
        BODY | {"temperature": 0},
        BODY | {"top_p": None},
        BODY | {"seed": 8},
        BODY | {"top_p": 0.5},
        BODY | {"seed": 2**53},
        BODY | {"seed": 2.0**53},  # may have been sent as 2**53 + 1
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
        {"model": "m", "messages": [{"role": "developer", "content": "a"}]},
        {"model": "m", "messages": [{"role": "system", "content": "a"}]},
        {"model": "m", "messages": [{"role": "user", "name": "b", "content": "a"}]},
        {"model": "m", "messages": [{"role": "assistant", "content": ""}]},
        {"model": "m", "messages": [{"role": "assistant", "content": None}]},
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
    ],
)
def test_requests_that_are_never_repeated_have_no_key(change: dict[str, object]) -> None:
    assert key(BODY | change) is None


def test_sampled_answers_are_repeated_if_configured() -> None:
    warm = BODY | {"temperature": 0.7}
    assert key(warm) is None
    assert key(warm, sampled=True) not in (None, key(BODY, sampled=True))
    assert key(warm | {"n": 2}, sampled=True) is None


def test_deep_nesting_gives_no_key() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    assert key(BODY | {"unknown": deep}) is None


def test_different_scopes_have_different_keys() -> None:
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
    """Return JSON text in which 1 equals 1.0 but not true."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if name == "stop":
        value = [value] if isinstance(value, str) else None if value == [] else value
    if name == "response_format" and value == {"type": "text"}:
        value = None
    return orjson.dumps(value).decode()


@given(st.sampled_from(AFFECTING), JSON, JSON)
def test_different_values_have_different_keys(name: str, one: object, other: object) -> None:
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
                min_size=1,
                max_size=3,
            ),
        },
        optional={"name": st.text(max_size=1)},
    ),
    min_size=1,
    max_size=3,
)


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    whole = copy.deepcopy(messages)
    for message in whole:
        if isinstance(message["content"], str):
            message["content"] = [text(message["content"])]
    return whole


@given(MESSAGES, MESSAGES)
def test_different_messages_have_different_keys(one: Any, other: Any) -> None:
    keys = [key({"model": "m", "messages": messages}) for messages in (one, other)]
    assert (keys[0] == keys[1]) == (as_parts(one) == as_parts(other))


@given(st.text(), st.binary(min_size=1), st.binary(min_size=1))
def test_same_text_with_another_image_has_another_key(words: str, one: bytes, other: bytes) -> None:
    def key_of_image(data: bytes) -> str | None:
        size = (len(data), 1)
        image = Image.from_pillow(Pillow.frombytes("L", size, data))
        images = {image.data_url: image_digest(image, "pixels")}
        return exact_key(request_of(user(text(words), part(image.data_url))), images, scope=SCOPE)

    assert (key_of_image(one) == key_of_image(other)) == (one == other)

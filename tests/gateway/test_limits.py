from __future__ import annotations

import base64
import copy
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from bottega.gateway.request.reading import Limits, read_images
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.openai_api.request import ImagePart, parse_request

PIXEL = Image.from_pillow(Pillow.new("RGB", (8, 6), "red"))
IMAGE = {"type": "image_url", "image_url": {"url": PIXEL.data_url, "detail": "low"}}
BODY: dict[str, Any] = {
    "model": "bottega",
    "messages": [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
        {"role": "user", "name": "Ada", "content": "And now?"},
    ],
    "temperature": 0.5,
    "top_p": 1,
    "n": 1,
    "max_tokens": 16,
    "seed": 7,
    "stop": ["\n"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    "logprobs": False,
    "user": "u",
    "unknown": {"of": ["a", "server"]},
}


def error_of(body: object, limits: Limits | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        (limits or Limits()).read(json.dumps(body).encode())
    assert caught.value.type == "invalid_request_error" and caught.value.hint
    return caught.value


def chat_body(*content: object, **more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": list(content)}], **more}


def test_body_within_the_limits_is_unchanged() -> None:
    assert Limits().read(orjson.dumps(BODY)).body == BODY


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"not json",
        b'{"model": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e400}',
        b'{"model": "\xff\xfe"}',
        '{"model": "è"}'.encode("latin-1"),
        '{"model": "m"}'.encode("utf-16"),
        b'{"model": "\\ud800"}',
        b"\xef\xbb\xbf{}",
        b"{}{}",
        b"[" * 100_000,
        b'{"a":' * 1025 + b"1" + b"}" * 1025,
    ],
)
def test_invalid_json_is_rejected(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        Limits().read(raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_last_of_duplicate_names_counts() -> None:
    raw = b'{"model":"a","messages":[],"messages":[{"role":"user","content":"b"}],"model":"c"}'
    assert Limits().read(raw).model == "c"
    with pytest.raises(ApiError, match="empty array"):
        Limits().read(b'{"model":"a","messages":[{"role":"user","content":"b"}],"messages":[]}')


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"model": None}, "model", "missing_required_parameter"),
        ({"model": 3}, "model", "invalid_type"),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": {}}, "messages", "invalid_type"),
        ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
        ({"messages": [{}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": []}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "root"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"n": True}, "n", "invalid_type"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 10**9}, "n", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": 10**30}, "max_tokens", "invalid_type"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": 1e300}, "temperature", "invalid_value"),
        ({"top_p": False}, "top_p", "invalid_type"),
        ({"stop": [1]}, "stop", "invalid_type"),
        ({"tools": ["look"]}, "tools", "invalid_type"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": True}, "stream_options", "invalid_type"),
        ({"seed": "x"}, "seed", "invalid_type"),
    ],
)
def test_error_names_its_field(change: dict[str, object], param: str, code: str) -> None:
    found = error_of(BODY | change)
    assert (found.status, found.param, found.code) == (400, param, code)
    assert param in str(found)


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ("hi", ""),
        ({}, ".type"),
        ({"type": 3}, ".type"),
        ({"type": "text"}, ".text"),
        ({"type": "text", "text": ["a"]}, ".text"),
        ({"type": "image_url"}, ".image_url"),
        ({"type": "image_url", "image_url": 3}, ".image_url"),
        ({"type": "image_url", "image_url": {}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": {}}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, ".image_url.url"),
        ({"type": "image_url", "image_url": "gopher://a/"}, ".image_url"),
        ({"type": "image_url", "image_url": {"url": "data:,", "detail": 1}}, ".image_url.detail"),
    ],
)
def test_error_names_its_part(part: object, param: str) -> None:
    body = copy.deepcopy(BODY)
    body["messages"][1]["content"].append(part)
    assert error_of(body).param == f"messages[1].content[2]{param}"


@pytest.mark.parametrize(
    "field", ["unknown", "tools", "metadata", "response_format", "stream_options"]
)
@pytest.mark.parametrize("opening", [{"a": None}, [None]])
def test_deep_nesting_is_rejected(field: str, opening: Any) -> None:
    def nested(depth: int) -> Any:
        inner: object = 1
        for _ in range(depth):
            inner = {"a": inner} if isinstance(opening, dict) else [inner]
        return [{"a": inner}] if field == "tools" else {"a": inner}

    parse_request(BODY | {field: nested(60)}, Limits())
    assert error_of(BODY | {field: nested(200)}).code == "limit_exceeded"


@pytest.mark.parametrize("depth", [1, 64])
def test_nesting_limit_is_exact(depth: int) -> None:
    value: object = []
    for _ in range(depth - 1):
        value = [value]
    limits = Limits(depth=depth)
    parse_request(chat_body({"type": "text", "text": "a"}, unknown=value), limits)
    with pytest.raises(ApiError, match=f"nested deeper than {depth}"):
        parse_request(chat_body({"type": "text", "text": "a"}, unknown=[value]), limits)


@pytest.mark.parametrize("kind", ["text", "image_url", "other"])
@pytest.mark.parametrize("name", ["text", "image_url", "more"])
def test_nesting_limit_applies_everywhere(kind: str, name: str) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    part = {"type": kind, "text": "a", "image_url": PIXEL.data_url, name: deep}
    assert error_of(chat_body(part)).status == 400


def test_deep_nesting_in_an_image_reference_is_rejected() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    part = {"type": "image_url", "image_url": {"url": PIXEL.data_url, "more": deep}}
    assert error_of(chat_body(part)).code == "limit_exceeded"


@pytest.mark.parametrize(
    ("reference", "expected"), [(3, "an object or a string"), ({"url": 3}, "a string")]
)
def test_error_names_the_expected_type_of_an_image_url(reference: object, expected: str) -> None:
    error = error_of(chat_body({"type": "image_url", "image_url": reference}))
    assert f"expected {expected}," in str(error)


def test_each_limit_applies() -> None:
    text = {"type": "text", "text": "abc"}
    parse_request(chat_body(text, text), Limits(text_characters=6))
    assert error_of(chat_body(text, text, text), Limits(text_characters=6)).param == (
        "messages[0].content[2].text"
    )
    parse_request(chat_body(IMAGE, IMAGE), Limits(images=2))
    assert error_of(chat_body(IMAGE, IMAGE, IMAGE), Limits(images=2)).param == (
        "messages[0].content[2].image_url.url"
    )
    two = {"model": "m", "messages": [{"role": "user", "content": "a"}] * 2}
    parse_request(two, Limits(messages=2))
    assert error_of(two, Limits(messages=1)).code == "array_above_max_length"
    heavy = {"type": "image_url", "image_url": "data:image/png;base64," + "A" * 800_000}
    parse_request(chat_body(heavy), Limits(image_mb=1))
    assert error_of(chat_body(heavy, heavy), Limits(image_mb=1)).param == (
        "messages[0].content[1].image_url"
    )


def test_too_large_body_is_not_parsed() -> None:
    with pytest.raises(ApiError) as caught:
        Limits(body_mb=1).read(b"[" * ((1 << 20) + 1))
    assert caught.value.status == 413


def test_headers_are_limited() -> None:
    Limits().check_headers([(b"host", b"x")] * 20)
    for headers in ([(b"a", b"b")] * 101, [(b"authorization", b"x" * 40_000)]):
        with pytest.raises(ApiError) as caught:
            Limits().check_headers(headers)
        assert caught.value.status == 431


def test_limits_are_exact() -> None:
    def passes(check: Callable[[], object]) -> bool:
        try:
            check()
        except ApiError:
            return False
        return True

    def text(*lengths: int) -> dict[str, object]:
        return chat_body(*({"type": "text", "text": "x" * length} for length in lengths))

    header = (b"name", b"value!")
    image = {"type": "image_url", "image_url": PIXEL.data_url}
    mebibyte = 4 * (1 << 20) // 3  # in base64

    def body_of_length(length: int) -> dict[str, object]:
        url = "data:image/png;base64,"
        return chat_body({"type": "image_url", "image_url": url + "A" * (length - len(url))})

    def fetched(more: int) -> Image:
        return dataclasses.replace(PIXEL, data=b"x" * ((1 << 19) + more))

    wide = Image.from_pillow(Pillow.new("RGB", (10, 10)))
    checks: list[list[Callable[[], object]]] = [
        [partial(Limits(body_mb=1).check_size, (1 << 20) + n) for n in (0, 1)],
        [partial(Limits(headers=2).check_headers, [header] * n) for n in (2, 3)],
        [partial(Limits(header_bytes=20).check_headers, [header] * n) for n in (2, 3)],
        [partial(parse_request, text(3, n), Limits(text_characters=5)) for n in (2, 3)],
        [partial(parse_request, chat_body(*[image] * n), Limits(images=2)) for n in (2, 3)],
        [partial(parse_request, body_of_length(mebibyte + n), Limits(image_mb=1)) for n in (0, 4)],
        [partial(Limits(image_pixels=n).check_image, wide, "p") for n in (100, 99)],
        [partial(Limits(image_mb=1).check_fetched, [fetched(n)] * 2, "p") for n in (0, 1)],
        [partial(Limits(request_pixels=500).check_fetched, [wide] * n, "p") for n in (5, 6)],
    ]
    assert [tuple(map(passes, pair)) for pair in checks] == [(True, False)] * len(checks)


def test_image_pixels_are_limited() -> None:
    assert Limits().read_image(PIXEL.data_url, "p") == PIXEL
    assert Limits().read_image("DATA" + PIXEL.data_url[4:], "p") == PIXEL
    with pytest.raises(ApiError, match="8 x 6") as caught:
        Limits(image_pixels=47).read_image(PIXEL.data_url, "messages[0]")
    assert caught.value.param == "messages[0]"
    with pytest.raises(ApiError, match="together"):
        Limits(image_mb=0).check_fetched([PIXEL], "messages")


async def test_images_of_a_request_are_limited_together_after_their_fetch() -> None:
    async def fetch(url: str) -> Image:
        return PIXEL

    parts = [ImagePart(f"https://x.example/{n}.png", None, f"p{n}", {}) for n in range(2)]
    assert len(await read_images(parts, fetch, Limits(request_pixels=2 * 48))) == 2
    with pytest.raises(ApiError, match="together"):
        await read_images(parts, fetch, Limits(request_pixels=2 * 48 - 1))


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:image/png;base64,",
        "data:image/png;base64,%%%",
        "data:image/png,abc",
        "data:text/html;base64," + base64.b64encode(b"<b>").decode(),
        PIXEL.data_url[:60],
    ],
)
def test_invalid_images_are_rejected(url: str) -> None:
    with pytest.raises(ApiError) as caught:
        Limits().read_image(url, "here")
    assert (caught.value.status, caught.value.code) == (400, "invalid_image")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    inner = [(*here, key) for key, _ in items]
    containers = [path for path in inner if isinstance(value[path[-1]], dict | list)]
    return inner + [deep for path in containers for deep in paths(value[path[-1]], path)]


@given(st.sampled_from(paths(BODY)), JSON)
def test_any_value_is_accepted_or_rejected(path: tuple[Any, ...], value: object) -> None:
    body = copy.deepcopy(BODY)
    place: Any = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    try:
        Limits().read(orjson.dumps(body))
    except ApiError as error:
        assert error.status == 400 and error.param and error.param.startswith(str(path[0]))


@given(JSON | st.binary())
def test_any_other_body_is_rejected(value: object) -> None:
    with pytest.raises(ApiError) as caught:
        Limits().read(value if isinstance(value, bytes) else orjson.dumps(value))
    assert caught.value.status == 400

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.generation import OpenAIGenerator
from bottega.generation.lru import Recent
from bottega.image import Image
from bottega.types import Message, Prompt, Sampling
from tests.builders import picture
from tests.server import Server


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=40))
def test_never_more_than_its_limit_and_always_the_latest(puts: list[tuple[str, int]]) -> None:
    recent: Recent[str] = Recent(10, size=len)
    for key, size in puts:
        recent.put(key, "x" * size)
        assert (recent.get(key) is not None) or size > 10
        held = [value for key in "abcdef" if (value := recent._values.get(key)) is not None]
        assert sum(map(len, held)) == recent._held <= 10


def test_what_was_looked_at_stays() -> None:
    recent: Recent[str] = Recent(2, size=len)
    for key in "ab":
        recent.put(key, key)
    recent.get("a")
    recent.put("c", "c")
    assert [recent.get(key) for key in "abc"] == ["a", None, "c"]


def test_threads_share_it() -> None:
    recent: Recent[str] = Recent(50, size=len)

    def use(seed: int) -> None:
        for i in range(2000):
            key = str((seed * 7 + i) % 90)
            if recent.get(key) is None:
                recent.put(key, "x")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert recent._held == len(recent._values) == 50


async def test_an_image_is_encoded_once_and_off_the_event_loop(
    endpoint: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def data_url(image: Image) -> str:
        threads.append(threading.current_thread())
        return "data:image/png;base64,AAAA"

    monkeypatch.setattr(Image, "data_url", property(data_url))
    generator = OpenAIGenerator("m", base_url=endpoint.url)
    for _ in range(3):
        fresh = Prompt((Message("user", (Image.from_bytes(picture(1).data), "what?")),))
        await generator.generate(fresh, Sampling())
    await generator.aclose()
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
    sent = [body["messages"][0]["content"][0]["image_url"]["url"] for body in endpoint.bodies]
    assert sent == ["data:image/png;base64,AAAA"] * 3

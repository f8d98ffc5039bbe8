from __future__ import annotations

import threading

import pytest

from bottega.generation import OpenAIGenerator
from bottega.image import Image
from bottega.types import Message, Prompt, Sampling
from tests.builders import solid_image
from tests.server import Server


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
        fresh = Prompt((Message("user", (Image.from_bytes(solid_image(1).data), "what?")),))
        await generator.generate(fresh, Sampling())
    await generator.aclose()
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
    sent = [body["messages"][0]["content"][0]["image_url"]["url"] for body in endpoint.bodies]
    assert sent == ["data:image/png;base64,AAAA"] * 3

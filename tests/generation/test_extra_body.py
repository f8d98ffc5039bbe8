from __future__ import annotations

from bottega.generation import OpenAIGenerator
from bottega.types import Sampling
from tests.generation.prompts import ask
from tests.server import Server


async def test_extra_fields_share_the_endpoint(endpoint: Server) -> None:
    plain = OpenAIGenerator("m", base_url=endpoint.url, extra_body={"top_k": 5})
    surer = plain.with_extra_body({"logprobs": True})

    await surer.generate(ask(), Sampling())
    await plain.generate(ask(), Sampling())
    await surer.aclose()

    sent = [{name: one.get(name) for name in ("top_k", "logprobs")} for one in endpoint.bodies]
    assert sent == [{"top_k": 5, "logprobs": True}, {"top_k": 5, "logprobs": None}]


def test_the_fingerprint_covers_the_extra_body() -> None:
    plain, extra = OpenAIGenerator("m"), OpenAIGenerator("m", extra_body={"effort": "low"})
    assert (plain.fingerprint, extra.name) == ("m", "m")
    assert extra.fingerprint != plain.fingerprint

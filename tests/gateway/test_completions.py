"""Legacy completions with the real openai client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion

from tests import server as doubles
from tests.gateway.harness import Harness, client, harness
from tests.gateway.test_responses_upstream import reply_with
from tests.gateway.upstreams import CHUNKS, chunk, events, lines, upstream


@pytest.fixture
def server() -> Iterator[doubles.Server]:
    with doubles.running() as endpoint:
        yield endpoint


@pytest.fixture
def gateway(server: doubles.Server, tmp_path: Path) -> Iterator[Harness]:
    with harness(tmp_path, master=upstream(server), replays=False) as endpoint:
        yield endpoint


def complete(gateway: Harness, prompt: Any, **more: Any) -> Completion:
    with client(gateway.url) as real:
        raw = real.completions.with_raw_response.create(
            model="bottega/master", prompt=prompt, **more
        )
    return Completion.model_validate_json(raw.text)


@pytest.mark.parametrize("prompt", ["Once", ["Once"]])
def test_prompt_is_sent_as_a_message(
    gateway: Harness, server: doubles.Server, prompt: object
) -> None:
    server.answers = [reply_with("length", content=" upon")]
    said = complete(gateway, prompt, max_tokens=5, temperature=0.5, stop=["."], seed=1, best_of=1)
    assert server.bodies[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "Once"}],
        "max_tokens": 5,
        "temperature": 0.5,
        "stop": ["."],
        "seed": 1,
    }
    [choice] = said.choices
    assert (choice.text, choice.finish_reason, choice.index) == (" upon", "length", 0)
    assert said.object == "text_completion" and said.id.startswith("cmpl-")
    assert said.usage is not None and said.usage.completion_tokens == 5


def test_stream(gateway: Harness, server: doubles.Server) -> None:
    server.answers = [events(lines(*CHUNKS))]
    with client(gateway.url) as real:
        chunks = list(
            real.completions.create(
                model="bottega/master",
                prompt="Once",
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert "".join(choice.text for one in chunks for choice in one.choices) == "ab"
    assert [choice.finish_reason for one in chunks for choice in one.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2


def test_several_choices(gateway: Harness, server: doubles.Server) -> None:
    pieces = [chunk("a", index=0), chunk("b", index=1), chunk("c", "stop", 0), chunk("", "stop", 1)]
    server.answers = [events(lines(*pieces))]
    with client(gateway.url) as real:
        stream = real.completions.create(model="bottega/master", prompt="x", n=2, stream=True)
        texts = {0: "", 1: ""}
        for one in stream:
            for choice in one.choices:
                texts[choice.index] += choice.text
    assert texts == {0: "ac", 1: "b"}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_invalid_requests_name_the_field(gateway: Harness, changed: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        complete(gateway, **{"prompt": "x", **changed})
    assert raised.value.param == field


def test_stream_that_fails_raises(gateway: Harness, server: doubles.Server) -> None:
    failure = {"error": {"message": "out of memory", "code": 500}}
    server.answers = [events(lines(*CHUNKS[:2], failure))]
    with client(gateway.url) as real, pytest.raises(openai.APIError):
        list(real.completions.create(model="bottega/master", prompt="x", stream=True))

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from pydantic import TypeAdapter

from bottega.errors import GarbledError, RejectedError, SettingError
from bottega.generation import OpenAICompletionsGenerator, RetryPolicy
from bottega.generation.openai_compatible import render_turns
from bottega.parsing import LabelParser
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Tier
from bottega.types import Message, Prompt, Query, Role, Sampling, Usage
from tests.builders import solid_image
from tests.generation.prompts import ask
from tests.server import Answer, Server, refuse, reply

REQUEST: TypeAdapter[Any] = TypeAdapter(completion_create_params.CompletionCreateParamsNonStreaming)
RATIONALE = "Two and\n\nthree.\nAnswer: 5"


def text(*texts: str, logprobs: object = None, finish: str = "stop") -> Answer:
    choices = [
        {"index": i, "text": one, "logprobs": logprobs, "finish_reason": finish}
        for i, one in enumerate(texts)
    ]
    usage = {"prompt_tokens": 9, "completion_tokens": 2 * len(texts), "total_tokens": 11}
    return reply({"id": "c", "object": "text_completion", "choices": choices, "usage": usage})


def model(endpoint: Server, **settings: Any) -> OpenAICompletionsGenerator:
    given: dict[str, Any] = {"base_url": endpoint.url, "retries": RetryPolicy(attempts=1)}
    return OpenAICompletionsGenerator("m", **given | settings)


def turn(role: Role, *parts: str) -> Message:
    return Message(role, parts)


DEMONSTRATIONS = (
    turn("system", "Name the topic."),
    turn("user", "Rome won the cup."),
    turn("assistant", "Sports"),
    turn("user", "Oil prices\n\nfell."),
)


async def test_turns_become_questions_and_answers(endpoint: Server) -> None:
    endpoint.answers = [text(" Business\n")]
    generator = model(endpoint, extra_body={"top_k": 5, "seed": None})
    sampling = Sampling(temperature=0.5, max_tokens=7, seed=3, stop=("\n",))
    answered = await generator.generate(Prompt(DEMONSTRATIONS), sampling)
    await generator.aclose()

    body = endpoint.bodies[0]
    REQUEST.validate_python({name: value for name, value in body.items() if name != "top_k"})
    assert endpoint.paths == ["/v1/completions"]
    assert body == {
        "model": "m",
        "prompt": "Name the topic.\n\nQuestion: Rome won the cup.\nAnswer: Sports\n\n"
        "Question: Oil prices\nfell.\nAnswer:",
        "temperature": 0.5,
        "max_tokens": 7,
        "stop": ["\n", "\nQuestion:"],
        "top_k": 5,
    }
    assert (answered.model, answered.usage) == ("completions:m", Usage(9, 2))
    [completion] = answered.completions
    assert (completion.text, completion.finish_reason, completion.logprob) == (
        "Business",
        "stop",
        None,
    )


def test_passages_are_paragraphs_and_rationales_keep_one_answer() -> None:
    shown = (turn("user", "A passage."), turn("user", "2 + 3?"), turn("assistant", RATIONALE))
    assert render_turns((*shown, turn("user", "2 + 4?"))) == (
        "A passage.\n\nQuestion: 2 + 3?\nAnswer: Two and\nthree.\nAnswer: 5\n\n"
        "Question: 2 + 4?\nAnswer:"
    )


async def test_logprobs_are_requested_by_number_and_summed(endpoint: Server) -> None:
    endpoint.answers = [text("dog", logprobs={"token_logprobs": [None, -0.5, -0.25]})]
    generator = model(endpoint).with_extra_body({"logprobs": True})
    assert isinstance(generator, OpenAICompletionsGenerator)
    answered = await generator.generate(ask(), Sampling())
    await generator.aclose()
    assert endpoint.bodies[0]["logprobs"] == 1
    assert answered.completions[0].logprob == -0.75


async def test_missing_samples_are_requested_with_other_seeds(endpoint: Server) -> None:
    endpoint.answers = [text("dog")]
    generator = model(endpoint)
    answered = await generator.generate(ask(), Sampling(n=3, seed=5, temperature=1))
    await generator.aclose()
    assert [one.text for one in answered.completions] == ["dog"] * 3
    assert sorted(body["seed"] for body in endpoint.bodies) == [5, 6, 7]
    assert answered.usage == Usage(27, 6)


async def test_several_choices_are_one_request(endpoint: Server) -> None:
    endpoint.answers = [text("dog", "cat", finish="length")]
    generator = model(endpoint)
    answered = await generator.generate(ask(), Sampling(n=2, temperature=1))
    await generator.aclose()
    assert endpoint.bodies[0]["n"] == 2
    assert len(endpoint.bodies) == 1
    assert [(one.text, one.finish_reason) for one in answered.completions] == [
        ("dog", "length"),
        ("cat", "length"),
    ]


@pytest.mark.parametrize("count", [3, 4])
async def test_at_most_four_stop_texts_are_sent(endpoint: Server, count: int) -> None:
    endpoint.answers = [text("dog")]
    stop = ("a", "b", "c", "d")[:count]
    generator = model(endpoint)
    await generator.generate(ask(), Sampling(stop=stop))
    await generator.aclose()
    assert endpoint.bodies[0]["stop"] == [*stop, "\nQuestion:"][:4]


async def test_an_image_is_an_error_before_any_request(endpoint: Server) -> None:
    generator = model(endpoint)
    prompt = Prompt((Message("user", (solid_image(1), "What is it?")),))
    with pytest.raises(SettingError, match="text completion reads no images") as caught:
        await generator.generate(prompt, Sampling())
    await generator.aclose()
    assert "openai:NAME" in caught.value.hint
    assert endpoint.bodies == []


@pytest.mark.parametrize("body", [{}, {"choices": []}, {"choices": [{"index": 0}]}])
async def test_replies_without_text_are_garbled(endpoint: Server, body: dict[str, Any]) -> None:
    endpoint.answers = [reply(body)]
    generator = model(endpoint)
    with pytest.raises(GarbledError):
        await generator.generate(ask(), Sampling())
    await generator.aclose()


async def test_errors_of_the_server_are_reported(endpoint: Server) -> None:
    endpoint.answers = [refuse(404, "no such model")]
    generator = model(endpoint)
    with pytest.raises(RejectedError, match="no such model"):
        await generator.generate(ask(), Sampling())
    await generator.aclose()


async def test_the_path_may_be_part_of_the_base_url(endpoint: Server) -> None:
    endpoint.answers = [text("dog")]
    generator = model(endpoint, base_url=f"{endpoint.url}/completions")
    pipeline = Pipeline(
        route=FixedRouter(Tier("base", generator)),
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
    )
    answer = await pipeline.answer(Query("Which pet?", choices=("cat", "dog")))
    await generator.aclose()
    assert endpoint.paths == ["/v1/completions"]
    assert answer.text == "dog"

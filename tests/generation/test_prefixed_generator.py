"""Generation with KV prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from bottega.errors import SettingError
from bottega.generation import TransformersGenerator, bundled
from bottega.generation.loaded import LoadedModel
from bottega.protocols import PrefixGenerator
from bottega.tasks.glyphs import FactTask
from bottega.types import Example, Message, Prefix, Prompt, Query, Sampling

TASK = FactTask(queries=20, episodes=1).generate(3)
PASSAGES = {str(one.id): one for one in TASK.knowledge}
GREEDY = Sampling(max_tokens=12)
OPENING = ("<bos>", "<answer>", "unknown", "<end>")  # of the bundled model's prompts


def to_prompt(query: Query, *passages: str) -> Prompt:
    passages_turns = [Message("user", (passage,)) for passage in passages]
    return Prompt((*passages_turns, Message("user", (*query.images, query.text))))


def right(item: Example) -> str:
    return PASSAGES[item.tags["passage"]].query.text


async def read(model: TransformersGenerator, text: str, opening: str = "") -> Prefix:
    return await model.run(lambda loaded: _prefix(loaded, text, opening))


def _prefix(loaded: LoadedModel, text: str, opening: str) -> Prefix:
    """Return a prefix of one passage; `opening` counts the prompt tokens that it contains."""
    ids = loaded.processor.tokenizer(f"{opening}<passage>{text}<end>", return_tensors="pt")
    with torch.inference_mode():
        cache = loaded.model(**ids, use_cache=True).past_key_values
    return Prefix(tuple((one.keys[0].numpy(), one.values[0].numpy()) for one in cache.layers))


@pytest.fixture(scope="module")
def model() -> TransformersGenerator:
    return bundled()


async def answers(model: TransformersGenerator, items: Sequence[Example]) -> list[str]:
    prefixes = [await read(model, right(item)) for item in items]
    replies = await asyncio.gather(
        *(
            model.with_prefix(prefix).generate(to_prompt(item.query), GREEDY)
            for item, prefix in zip(items, prefixes, strict=True)
        )
    )
    return [reply.completions[0].text for reply in replies]


async def test_the_prefix_answers_the_prompt(model: TransformersGenerator) -> None:
    """Prefixes and prompts of different lengths in one batch."""
    said = await answers(model, TASK.items)

    hits = sum(one == item.answer for one, item in zip(said, TASK.items, strict=True))
    assert hits >= 19  # the bundled model itself reads 97 of 100 such passages
    alone = await model.generate(to_prompt(TASK.items[0].query), GREEDY)
    assert alone.completions[0].text == "unknown"


async def test_batched_requests_keep_their_own_prefixes(
    model: TransformersGenerator,
) -> None:
    one, other = TASK.items[:2]
    first, second = await read(model, right(one)), await read(model, right(other))

    replies = await asyncio.gather(
        model.with_prefix(first).generate(to_prompt(one.query), GREEDY),
        model.generate(to_prompt(one.query), GREEDY),
        model.with_prefix(second).generate(to_prompt(other.query), GREEDY),
    )

    said = [reply.completions[0].text for reply in replies]
    assert said == [one.answer, "unknown", other.answer]


async def test_prompt_tokens_in_the_prefix_are_skipped(
    model: TransformersGenerator,
) -> None:
    """Prompts of different lengths in one batch, whose padding comes before their openings. They
    show one passage, and the prefix holds another in its place."""
    items = TASK.items[:4]
    prompts = [to_prompt(item.query, right(item)) for item in items]

    def openings(loaded: LoadedModel) -> list[int]:
        bare = [to_prompt(item.query) for item in items]
        whole, question = (
            [loaded.encode([one])["input_ids"].shape[1] for one in some] for some in (prompts, bare)
        )
        return [len(OPENING) + more - less for more, less in zip(whole, question, strict=True)]

    held, other = await model.run(openings), "The food of nobody is trebral"
    prefix = await read(model, other, "".join(OPENING))
    said = await asyncio.gather(
        *(
            model.with_prefix(replace(prefix, opening=opening)).generate(prompt, GREEDY)
            for prompt, opening in zip(prompts, held, strict=True)
        )
    )

    assert len(set(held)) > 1
    for reply, item in zip(said, items, strict=True):
        expected = await model.generate(to_prompt(item.query, other), GREEDY)
        assert reply.completions[0].text == expected.completions[0].text != item.answer
        assert reply.completions[0].logprob == pytest.approx(
            expected.completions[0].logprob, abs=1e-3
        )


async def test_samples_share_their_prefix(model: TransformersGenerator) -> None:
    item = TASK.items[0]
    prefix = await read(model, right(item))
    sampling = Sampling(temperature=0.3, n=3, seed=1, max_tokens=12)

    reply = await model.with_prefix(prefix).generate(to_prompt(item.query), sampling)

    assert [one.text for one in reply.completions] == [item.answer] * 3
    greedy = await model.with_prefix(prefix).generate(to_prompt(item.query), GREEDY)
    assert greedy.usage.prompt_tokens == reply.usage.prompt_tokens


async def test_a_prefix_of_another_model_is_refused(model: TransformersGenerator) -> None:
    small = np.zeros((2, 4, 8), np.float32)

    with pytest.raises(SettingError, match="a prefix for this model must have"):
        await model.with_prefix(Prefix(((small, small),))).generate(to_prompt(Query("?")), GREEDY)


async def test_closing_a_prefixed_generator_keeps_the_model(
    model: TransformersGenerator,
) -> None:
    item = TASK.items[0]
    prefixed = model.with_prefix(await read(model, right(item)))
    assert (prefixed.name, prefixed.turns_only) == (model.name, True)

    await prefixed.aclose()

    assert (await prefixed.generate(to_prompt(item.query), GREEDY)).completions[
        0
    ].text == item.answer


def test_only_in_process_models_accept_prefixes(model: TransformersGenerator) -> None:
    from bottega.generation import OpenAIGenerator

    assert isinstance(model, PrefixGenerator)
    assert not hasattr(OpenAIGenerator, "with_prefix")


async def test_an_unloaded_model_raises() -> None:
    with pytest.raises(SettingError, match="not loaded"):
        _ = bundled().loaded

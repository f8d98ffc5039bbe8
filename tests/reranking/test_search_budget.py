from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import GenerationError, SettingError
from bottega.generation import ScriptedGenerator
from bottega.reranking.search_budget import (
    BudgetedGenerator,
    BudgetSpentError,
    ReservedCost,
    gather_affordable,
    gather_all,
    most_prompt_tokens,
)
from bottega.types import Message, Prompt, Reply, Sampling, Usage
from tests.builders import solid_image


def says(*parts: str) -> Prompt:
    return Prompt((Message("user", parts),))


def text(prompt: Prompt) -> object:
    return prompt.messages[0].parts[0]


ONCE = Sampling(max_tokens=4)
WARM = Sampling(temperature=0.8, max_tokens=4, n=3)


async def test_identical_concurrent_requests_are_sent_once() -> None:
    model = ScriptedGenerator(lambda prompt: "yes", latency=0.001)
    budgeted = BudgetedGenerator(model)
    replies = await gather_all(budgeted.generate(says("a"), ONCE) for _ in range(3))
    assert replies == [await budgeted.generate(says("a"), ONCE)] * 3
    await budgeted.generate(says("a"), WARM)
    await budgeted.generate(says("b"), ONCE)
    assert [text(call.prompt) for call in model.calls] == ["a", "a", "b"]
    assert (budgeted.requests, budgeted.calls) == (3, 5)
    assert budgeted.usage == Usage(prompt_tokens=3, completion_tokens=5)


async def test_seeds_depend_on_request_content_only() -> None:
    async def seeds(seed: int, *prompts: Prompt) -> dict[Prompt, int | None]:
        model = ScriptedGenerator(lambda prompt: "yes")
        budgeted = BudgetedGenerator(model, seed=seed)
        for prompt in prompts:
            await budgeted.generate(prompt, WARM)
            await budgeted.generate(prompt, ONCE)
        assert all(call.sampling.seed is None for call in model.calls if not call.sampling.n > 1)
        return {call.prompt: call.sampling.seed for call in model.calls if call.sampling.n > 1}

    one, other = says("a"), Prompt((Message("user", (solid_image(1), "a")),))
    first = await seeds(0, one, other)
    assert await seeds(0, other, one) == first
    assert len({*first.values(), *(await seeds(1, one, other)).values()}) == 4
    assert all(seed is not None and 0 <= seed < 2**31 for seed in first.values())


async def test_seeds_have_31_bits() -> None:
    model = ScriptedGenerator(lambda prompt: "yes")
    budgeted = BudgetedGenerator(model)
    for number in range(30):
        await budgeted.generate(says(str(number)), WARM)
    seeds = [call.sampling.seed or 0 for call in model.calls]
    assert 2**30 <= max(seeds) < 2**31 and min(seeds) < 2**30


async def test_only_sampling_gets_a_seed() -> None:
    model = ScriptedGenerator(lambda prompt: "yes")
    for temperature in (0.0, 0.1, 1.0):
        await BudgetedGenerator(model).generate(says("a"), Sampling(temperature=temperature))
    assert [call.sampling.seed is None for call in model.calls] == [True, False, False]


async def test_a_seed_that_was_given_stays() -> None:
    model = ScriptedGenerator(lambda prompt: "yes")
    await BudgetedGenerator(model).generate(says("a"), Sampling(temperature=1, seed=7))
    assert model.calls[0].sampling.seed == 7


async def test_request_above_budget_is_not_sent() -> None:
    model = ScriptedGenerator(lambda prompt: "yes")
    budgeted = BudgetedGenerator(model, max_calls=4)
    await budgeted.generate(says("a"), WARM)
    with pytest.raises(BudgetSpentError):
        await budgeted.generate(says("b"), WARM)
    await budgeted.generate(says("b"), ONCE)
    await budgeted.generate(says("a"), WARM)
    assert budgeted.calls == 4
    assert len(model.calls) == 2


async def test_settle_frees_unused_reserved_tokens() -> None:
    # "a" may take 1 + 32 + 4 tokens and takes 2: there is room for a second one, not for both.
    model = ScriptedGenerator(lambda prompt: "yes", latency=0.001)
    budgeted = BudgetedGenerator(model, max_tokens=39)
    at_once = await gather_affordable(budgeted.generate(says(letter), ONCE) for letter in "ab")
    assert [reply is not None for reply in at_once] == [True, False]
    with pytest.raises(BudgetSpentError):
        await budgeted.generate(says("c"), ONCE)
    for _ in range(2):
        budgeted.settle()
        assert budgeted.room(ReservedCost(tokens=1)) == 37
    assert await budgeted.generate(says("c"), ONCE)
    budgeted.settle()
    assert budgeted.room(ReservedCost(tokens=1)) == 35
    with pytest.raises(BudgetSpentError):
        await budgeted.generate(says("d"), ONCE)


async def test_prompt_tokens_are_reserved_per_sample() -> None:
    model = ScriptedGenerator(lambda prompt: "yes")
    with pytest.raises(BudgetSpentError):
        await BudgetedGenerator(model, max_tokens=3 * (33 + 4) - 1).generate(says("a"), WARM)
    assert await BudgetedGenerator(model, max_tokens=3 * (33 + 4)).generate(says("a"), WARM)


class NoUsageGenerator(ScriptedGenerator):
    """An endpoint that does not say how many tokens there were."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        reply = await super().generate(prompt, sampling)
        return Reply(reply.model, reply.completions)


async def test_unreported_tokens_stay_reserved() -> None:
    budgeted = BudgetedGenerator(NoUsageGenerator(lambda prompt: "yes"), max_tokens=40)
    await budgeted.generate(says("a"), ONCE)
    with pytest.raises(BudgetSpentError):
        await budgeted.generate(says("b"), ONCE)


def test_prompt_bound_counts_bytes_and_images() -> None:
    shown = Prompt((Message("system", ("è",)), Message("user", (solid_image(1), "ab"))))
    assert most_prompt_tokens(shown) == 2 + 4096 + 2 + 2 * 32


async def test_an_error_ends_the_others_at_once_and_is_raised_alone() -> None:
    failed = GenerationError("no")
    model = ScriptedGenerator(["yes", failed], latency=60)

    async def late(budgeted: BudgetedGenerator) -> Reply:
        await asyncio.sleep(0)
        return await budgeted.generate(says("b"), ONCE)

    budgeted = BudgetedGenerator(model)
    with pytest.raises(GenerationError) as raised:
        await gather_all([budgeted.generate(says("a"), ONCE), late(budgeted)])
    assert raised.value is failed
    assert (budgeted.requests, budgeted.calls) == (2, 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelled_waiter_does_not_cancel_others() -> None:
    budgeted = BudgetedGenerator(ScriptedGenerator(lambda prompt: "yes", latency=0.01))
    one, other = (asyncio.create_task(budgeted.generate(says("a"), ONCE)) for _ in range(2))
    await asyncio.sleep(0.001)
    one.cancel()
    assert (await other).completions[0].text == "yes"
    assert budgeted.requests == 1


async def test_spent_budget_lets_pending_requests_finish() -> None:
    budgeted = BudgetedGenerator(
        ScriptedGenerator(lambda prompt: "yes", latency=0.001), max_calls=1
    )
    with pytest.raises(BudgetSpentError):
        await gather_all(budgeted.generate(says(letter), ONCE) for letter in "ab")
    assert (budgeted.requests, budgeted.calls) == (1, 1)


@pytest.mark.parametrize("setting", ["max_calls", "max_tokens"])
def test_zero_budget_is_an_error(setting: str) -> None:
    with pytest.raises(SettingError) as raised:
        BudgetedGenerator(ScriptedGenerator([]), **{setting: 0})  # type: ignore[arg-type]
    assert raised.value.hint


REQUESTS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 5)), max_size=12)


@given(
    waves=st.lists(REQUESTS, max_size=4),
    max_calls=st.none() | st.integers(1, 30),
    max_tokens=st.none() | st.integers(1, 600),
)
async def test_no_budget_is_ever_exceeded(
    waves: Sequence[Sequence[tuple[str, int]]], max_calls: int | None, max_tokens: int | None
) -> None:
    model = ScriptedGenerator(lambda prompt: "one two three")
    budgeted = BudgetedGenerator(model, max_calls=max_calls, max_tokens=max_tokens)
    for wave in waves:
        await gather_affordable(
            budgeted.generate(says(letter), Sampling(temperature=1, n=n, max_tokens=4))
            for letter, n in wave
        )
        budgeted.settle()
    requested = [call.sampling.n for call in model.calls]
    assert (budgeted.requests, budgeted.calls) == (len(requested), sum(requested))
    assert budgeted.calls <= (max_calls or budgeted.calls)
    spent = budgeted.usage.prompt_tokens + budgeted.usage.completion_tokens
    assert spent == sum(1 + 3 * n for n in requested)
    assert spent <= (max_tokens or spent)


@pytest.mark.parametrize("setting", ["max_calls", "max_tokens"])
def test_a_budget_is_a_positive_integer(setting: str) -> None:
    assert BudgetedGenerator(ScriptedGenerator([]), **{setting: 1}).is_limited  # type: ignore[arg-type]
    assert not BudgetedGenerator(ScriptedGenerator([]), **{setting: None}).is_limited  # type: ignore[arg-type]
    for wrong in (-1, 1.5):
        with pytest.raises(SettingError, match=f"{setting} must be at least 1, got {wrong}"):
            BudgetedGenerator(ScriptedGenerator([]), **{setting: wrong})  # type: ignore[arg-type]

from __future__ import annotations

from dataclasses import replace

import pytest

from bottega.errors import GenerationError, SettingError
from bottega.generation import ScriptedGenerator
from bottega.parsing import LabelParser
from bottega.prompting import InterleavedPrompter
from bottega.reranking import BudgetedGenerator, EnsembleReward, RewardValue
from bottega.types import Answer, Candidate, Prompt, Query
from tests.builders import candidates

QUERY = Query("q", choices=("cat", "dog"))
CAT, DOG = Answer("cat", labels=("cat",)), Answer("dog", labels=("dog",))
CANDIDATES = candidates("cat", "dog", "cat", "cat", "dog")


def answers_of(prompt: Prompt) -> list[str]:
    return [str(one.parts[-1]) for one in prompt.messages if one.role == "assistant"]


def last_shown(prompt: Prompt) -> str:
    return answers_of(prompt)[-1]


def ensemble(**settings: object) -> EnsembleReward:
    return EnsembleReward(InterleavedPrompter(), LabelParser(), shots=2, **settings)  # type: ignore[arg-type]


async def test_ensemble_reward_is_the_share_of_agreeing_samples() -> None:
    model = ScriptedGenerator(["cat", "dog", "nonsense", "Cat"])
    result = await ensemble(n=4)(QUERY, CAT, CANDIDATES[:2], BudgetedGenerator(model))
    assert result.parts == {"ensemble": result.value}
    answer = len(model.calls)
    assert answer in (1, 2)  # two candidates have two orders, each requested once
    assert all(len(answers_of(call.prompt)) == 2 for call in model.calls)


async def test_all_answers_share_samples_requested_once() -> None:
    model, reward = ScriptedGenerator(last_shown), ensemble(n=12)
    ask = BudgetedGenerator(model)
    cat, dog = [await reward(QUERY, answer, CANDIDATES, ask) for answer in (CAT, DOG)]
    assert cat.value + dog.value == pytest.approx(1)
    assert 0 < dog.value < cat.value < 1
    assert len(model.calls) <= 12
    shown = [answers_of(call.prompt) for call in model.calls]
    assert all(len(one) == 2 for one in shown)
    again = await ensemble(n=12)(
        QUERY, CAT, CANDIDATES, BudgetedGenerator(ScriptedGenerator(last_shown))
    )
    other = await ensemble(n=12, seed=5)(
        QUERY, CAT, CANDIDATES, BudgetedGenerator(ScriptedGenerator(last_shown))
    )
    assert again == cat != other


async def test_distant_candidates_are_rarely_sampled() -> None:
    near = [Candidate(one.example, 1.0) for one in candidates("cat", "cat")]
    far = [Candidate(one.example, 0.0) for one in candidates(*["dog"] * 8)]
    result = await ensemble(n=40)(
        QUERY, CAT, [*near, *far], BudgetedGenerator(ScriptedGenerator(last_shown))
    )
    assert result.value > 0.9


async def test_no_candidates_means_no_request() -> None:
    ask = BudgetedGenerator(ScriptedGenerator([]))
    assert await ensemble()(QUERY, replace(CAT, valid=False), CANDIDATES, ask) == RewardValue(
        0.0, {"ensemble": 0.0}
    )
    assert await ensemble()(QUERY, CAT, [], ask) == RewardValue(available=False)
    with pytest.raises(SettingError, match="n must be at least 1, got 0"):
        ensemble(n=0)


async def test_a_failure_is_no_reward() -> None:
    def fails(prompt: Prompt) -> str:
        raise GenerationError("down", hint="wait")

    with pytest.raises(GenerationError):
        await ensemble()(QUERY, CAT, CANDIDATES, BudgetedGenerator(ScriptedGenerator(fails)))

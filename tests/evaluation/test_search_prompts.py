"""Tests of the prompts and scores that the search of a benchmark with published prompts has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.searchers import MethodContext, tree_search
from bottega.evaluation.metrics.open_answers import vqa_accuracy
from bottega.generation import ScriptedGenerator
from bottega.prompting import MMMU, MMMU_REASONED, PromptTemplate
from bottega.recipes import Classifier
from bottega.reranking import MutualReward, TreeSearch, WeightedReward

METRIC = vqa_accuracy({})
DATA = Benchmark("d", (), (), prompt=MMMU, rationale_prompt=MMMU_REASONED, reward_metric=METRIC)


def search_for(prompt: PromptTemplate, config: RunConfig) -> TreeSearch:
    model = ScriptedGenerator([], name="m")
    plain = Classifier(model, (), prompt=prompt).pipeline(None, 2)
    search = tree_search(plain, MethodContext(DATA, model, config, shots=2)).search
    assert isinstance(search, TreeSearch)
    return search


@pytest.mark.parametrize(("prompt", "expected"), [(MMMU_REASONED, MMMU), (MMMU, None)])
def test_the_zero_shot_answer_has_the_zero_shot_prompt(
    prompt: PromptTemplate, expected: PromptTemplate | None
) -> None:
    assert search_for(prompt, RunConfig()).zero_shot_prompt is expected


def test_examples_are_scored_by_annotators_unless_their_answers_are_replaced() -> None:
    for config, expected in (
        (RunConfig(), METRIC.score),
        (replace(RunConfig(), label_noise=0.2), None),
    ):
        reward = search_for(MMMU, config).reward
        assert isinstance(reward, WeightedReward) and isinstance(reward.mutual, MutualReward)
        assert reward.mutual.score == expected

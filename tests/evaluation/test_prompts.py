"""Tests of prompt selection and of rationales in demonstrations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.controls import corrupt, label_confusion
from bottega.evaluation.methods.prompts import (
    asks_for_reasons,
    describe_methods,
    method_settings,
    methods_with_rationales,
    prompt_for,
    rationale_source,
    with_rationales,
)
from bottega.evaluation.methods.specifications import METHODS as ALL_METHODS
from bottega.evaluation.metrics.open_answers import vqa_accuracy
from bottega.evaluation.search_config import SearchConfig
from bottega.generation import ScriptedGenerator
from bottega.prompting import (
    MMMU,
    MMMU_REASONED,
    VIZ_WIZ,
    AppendixAPrompter,
    InterleavedPrompter,
    LetteredPrompter,
    ReasoningPrompter,
)
from bottega.protocols import Prompter
from bottega.recipes import Classifier
from bottega.types import Candidate, Example, Query
from tests.builders import solid_image

SEARCH = {
    "rollouts": "10",
    "candidates": "20",
    "reward": "both (alpha 0.2)",
    "variant": "paper",
}
TREE = {**SEARCH, "children": "3", "exploration": "0.5", "early_stop": "yes"}
MODEL = ScriptedGenerator([])
DEFAULTS = Classifier(MODEL, ())
RATIONALE = "Because I said so."
METHODS = ("zero-shot", "vote", "random", "top-k", "rcts", "rcts-random", "majority", "best-of-n")
EXAMPLE = Example(Query("Which?", (solid_image(1),), ("a", "b")), "a", rationale=RATIONALE)
DATA = Benchmark("d", (EXAMPLE,), (), prompt=MMMU, rationale_prompt=MMMU_REASONED)
PLAIN = replace(DATA, knowledge=(replace(EXAMPLE, rationale=None),))


class TurnsOnlyGenerator(ScriptedGenerator):
    turns_only = True


def shows_rationale(prompt: Prompter) -> bool:
    prompted = prompt(EXAMPLE.query, [Candidate(EXAMPLE, 1.0)])
    return any(RATIONALE in str(part) for message in prompted.messages for part in message.parts)


def test_search_methods_and_their_controls_show_rationales_by_default() -> None:
    used = {name: prompt_for(name, DATA, DEFAULTS) for name in METHODS}
    reasoned = {name for name, prompt in used.items() if prompt is MMMU_REASONED}
    assert reasoned == {"rcts", "rcts-random", "majority", "best-of-n"}
    assert all(used[name] is MMMU for name in METHODS if name not in reasoned)
    assert set(methods_with_rationales(METHODS, DATA, DEFAULTS, None)) == reasoned


def test_rationales_can_be_forced_on_or_off() -> None:
    every = {name for name in METHODS if prompt_for(name, DATA, DEFAULTS, True) is MMMU_REASONED}
    assert every == set(METHODS) - {"zero-shot", "vote"}
    assert methods_with_rationales(METHODS, DATA, DEFAULTS, True) == [
        name for name in METHODS if name in every
    ]
    every_method = [name for name, spec in ALL_METHODS.items() if spec.shows_demonstrations]
    assert methods_with_rationales(every_method, DATA, DEFAULTS, True) == every_method
    own = replace(DATA, prompt=None, rationale_prompt=None)  # appendix A would show none
    assert methods_with_rationales(every_method, own, DEFAULTS, True) == every_method
    assert all(prompt_for(name, DATA, DEFAULTS, False) is MMMU for name in METHODS)
    assert methods_with_rationales(METHODS, DATA, DEFAULTS, False) == []


def test_no_rationales_means_no_rationale_prompt() -> None:
    assert all(prompt_for(name, PLAIN, DEFAULTS) is MMMU for name in METHODS)
    assert methods_with_rationales(METHODS, PLAIN, DEFAULTS, None) == []
    with pytest.raises(SettingError) as raised:
        methods_with_rationales(METHODS, PLAIN, DEFAULTS, True)
    assert "--rationales-from" in raised.value.hint


@pytest.mark.parametrize(
    ("settings", "data"),
    [
        (Classifier(TurnsOnlyGenerator([]), ()), DATA),
        (Classifier(MODEL, (), prompt=InterleavedPrompter()), DATA),
        (DEFAULTS, replace(DATA, prompt=InterleavedPrompter(), rationale_prompt=None)),
    ],
    ids=["turns-only model", "chosen prompt", "benchmark of one prompt"],
)
def test_other_prompts_show_rationales_unless_disabled(
    settings: Classifier, data: Benchmark
) -> None:
    for name in METHODS:
        assert shows_rationale(prompt_for(name, data, settings))
        assert not shows_rationale(prompt_for(name, data, settings, False))
    assert methods_with_rationales(["top-k"], data, settings, None) == ["top-k"]


def test_prompt_without_rationale_support_is_named() -> None:
    for settings, data in (
        (Classifier(MODEL, (), prompt=AppendixAPrompter()), DATA),
        (DEFAULTS, replace(DATA, prompt=VIZ_WIZ, rationale_prompt=None)),
    ):
        assert methods_with_rationales(["rcts"], data, settings, None) == []
        with pytest.raises(SettingError) as raised:
            methods_with_rationales(["rcts"], data, settings, True)
        assert "interleaved" in raised.value.hint
        assert methods_with_rationales(["zero-shot"], data, settings, True) == []


def test_rationales_come_from_matching_examples() -> None:
    others = [
        replace(EXAMPLE, rationale="Seen.", id="other", tags={"rationale_accuracy": "1"}),
        replace(EXAMPLE, answer="b", rationale="Of a wrong answer."),
        replace(
            EXAMPLE, query=replace(EXAMPLE.query, images=(solid_image(2),)), rationale="Elsewhere."
        ),
    ]
    data, count = with_rationales(PLAIN, others)
    assert (data.knowledge[0].rationale, count) == ("Seen.", 1)
    kept, _ = with_rationales(replace(DATA, knowledge=(EXAMPLE, *PLAIN.knowledge)), others[:1])
    assert [one.rationale for one in kept.knowledge] == ["Seen.", "Seen."]
    wrong = replace(
        DATA, knowledge=tuple(corrupt([EXAMPLE], 1.0, label_confusion([EXAMPLE]), seed=0))
    )
    for data, sources in ((wrong, others[:1]), (PLAIN, []), (PLAIN, [PLAIN.knowledge[0]])):
        with pytest.raises(SettingError):
            with_rationales(data, sources)


def test_methods_with_a_reward_ask_for_reasons_unless_a_prompt_is_published() -> None:
    reward = {"rcts", "rcts-random", "majority", "best-of-n"}
    for prompt in (None, LetteredPrompter()):
        own = replace(DATA, prompt=prompt, rationale_prompt=None)
        asking = {name for name in METHODS if asks_for_reasons(name, own, DEFAULTS)}
        assert asking == reward
        used = {name: prompt_for(name, own, DEFAULTS) for name in METHODS}
        assert {name for name in used if isinstance(used[name], ReasoningPrompter)} == reward
        for settings in (
            Classifier(TurnsOnlyGenerator([]), ()),
            Classifier(MODEL, (), prompt=AppendixAPrompter()),
        ):
            assert not any(asks_for_reasons(name, own, settings) for name in METHODS)
    assert not any(asks_for_reasons(name, DATA, DEFAULTS) for name in METHODS)


def test_reasons_have_a_token_limit_of_their_own() -> None:
    own = replace(DATA, prompt=None, rationale_prompt=None)
    config = RunConfig(methods=("top-k", "rcts", "zero-shot"), reasoning_tokens=300)
    limits = [
        method_settings(name, own, DEFAULTS, config).sampling.max_tokens for name in config.methods
    ]
    assert limits == [64, 300, 64]
    assert describe_methods(own, DEFAULTS, config, "given") == {
        "top-k": {"rationales": "none"},  # appendix A shows none
        "rcts": {"rationales": "given", "prompt": "reasoned", "max_tokens": "300", **TREE},
    }


def test_rationales_are_given_or_generated() -> None:
    generated = replace(EXAMPLE, tags={"rationale_accuracy": "1"})
    sources = [
        rationale_source(replace(DATA, knowledge=examples))
        for examples in ((EXAMPLE,), (generated,), (generated, EXAMPLE), PLAIN.knowledge)
    ]
    assert sources == ["given", "generated", "generated and given", "none"]


def test_search_settings_that_no_option_sets_are_described() -> None:
    metric = vqa_accuracy({"e": ["a"] * 10})
    data, config = replace(DATA, reward_metric=metric), RunConfig(methods=("rcts", "top-k"))
    rated = {"mutual_reward": "vqa_accuracy_original"}
    described = describe_methods(data, DEFAULTS, config, "given")
    assert described["rcts"] == {
        "rationales": "given",
        "zero_shot_prompt": "without reasons",
        **rated,
        **TREE,
    }
    assert described["top-k"] == {"rationales": "none"}
    # Annotators would reveal the answers that are hidden.
    hidden = describe_methods(data, DEFAULTS, replace(config, label_noise=0.5), "given")
    assert "mutual_reward" not in hidden["rcts"]
    best = RunConfig(methods=("rcts-best-of-n",), order="nearest-first")
    assert describe_methods(PLAIN, DEFAULTS, best, "none") == {
        "rcts-best-of-n": {"rationales": "none", "order": "nearest-first", **SEARCH}
    }
    own = replace(config, search=SearchConfig(reward="mutual", children=20, early_stop=False))
    changed = {"reward": "mutual", "children": "20", "early_stop": "no"}
    assert changed.items() <= describe_methods(data, DEFAULTS, own, "given")["rcts"].items()


def test_the_rule_for_left_out_passages_is_described() -> None:
    """Unless the items name their passages: then no rule is needed."""
    config = RunConfig(methods=("racc", "racc-swapped"))
    item = Example(Query("Which?", id="q"), "a")
    data = replace(PLAIN, items=(item,), relevance="stems")
    without = {"rationales": "none"}
    assert describe_methods(data, DEFAULTS, config, "none") == {
        "racc": without,
        "racc-swapped": {**without, "relevance": "stems"},
    }
    named = replace(data, items=(replace(item, tags={"passage": "p"}),))
    assert describe_methods(named, DEFAULTS, config, "none")["racc-swapped"] == without

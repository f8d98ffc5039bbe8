"""Which prompt a method asks with, and whether it shows why known answers are right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.controls import corrupt, label_confusion
from bottega.evaluation.prompts import methods_with_rationales, prompt_for, with_rationales
from bottega.generation import ScriptedGenerator
from bottega.prompting import MMMU, MMMU_REASONED, VIZ_WIZ, AppendixAPrompter, InterleavedPrompter
from bottega.protocols import Prompter
from bottega.recipes import Classifier
from bottega.types import Candidate, Example, Query
from tests.builders import solid_image

MODEL = ScriptedGenerator([])
AS_SUITS = Classifier(MODEL, ())
WHY = "Because I said so."
ALL = ("zero-shot", "vote", "random", "top-k", "rcts", "rcts-random", "majority", "best-of-n")
KNOWN = Example(Query("Which?", (solid_image(1),), ("a", "b")), "a", rationale=WHY)
DATA = Benchmark("d", (KNOWN,), (), prompt=MMMU, rationale_prompt=MMMU_REASONED)
BARE = replace(DATA, knowledge=(replace(KNOWN, rationale=None),))


class Brief(ScriptedGenerator):
    turns_only = True


def shows(prompt: Prompter) -> bool:
    prompted = prompt(KNOWN.query, [Candidate(KNOWN, 1.0)])
    return any(WHY in str(part) for message in prompted.messages for part in message.parts)


def test_search_methods_and_their_controls_show_rationales_by_default() -> None:
    used = {name: prompt_for(name, DATA, AS_SUITS) for name in ALL}
    reasoned = {name for name, prompt in used.items() if prompt is MMMU_REASONED}
    assert reasoned == {"rcts", "rcts-random", "majority", "best-of-n"}
    assert all(used[name] is MMMU for name in ALL if name not in reasoned)
    assert set(methods_with_rationales(ALL, DATA, AS_SUITS, None)) == reasoned


def test_rationales_can_be_forced_on_or_off() -> None:
    every = {name for name in ALL if prompt_for(name, DATA, AS_SUITS, True) is MMMU_REASONED}
    assert every == set(ALL) - {"zero-shot", "vote"}
    assert methods_with_rationales(ALL, DATA, AS_SUITS, True) == [
        name for name in ALL if name in every
    ]
    assert all(prompt_for(name, DATA, AS_SUITS, False) is MMMU for name in ALL)
    assert methods_with_rationales(ALL, DATA, AS_SUITS, False) == []


def test_no_rationales_means_no_rationale_prompt() -> None:
    assert all(prompt_for(name, BARE, AS_SUITS) is MMMU for name in ALL)
    assert methods_with_rationales(ALL, BARE, AS_SUITS, None) == []
    with pytest.raises(SettingError) as raised:
        methods_with_rationales(ALL, BARE, AS_SUITS, True)
    assert "--rationales-from" in raised.value.hint


@pytest.mark.parametrize(
    ("settings", "data"),
    [
        (Classifier(Brief([]), ()), DATA),
        (Classifier(MODEL, (), prompt=InterleavedPrompter()), DATA),
        (AS_SUITS, replace(DATA, prompt=InterleavedPrompter(), rationale_prompt=None)),
    ],
    ids=["brief model", "chosen prompt", "benchmark of one prompt"],
)
def test_other_prompts_show_rationales_unless_disabled(
    settings: Classifier, data: Benchmark
) -> None:
    for name in ALL:
        assert shows(prompt_for(name, data, settings))
        assert not shows(prompt_for(name, data, settings, False))
    assert methods_with_rationales(["top-k"], data, settings, None) == ["top-k"]


def test_prompt_without_rationale_support_is_named() -> None:
    for settings, data in (
        (Classifier(MODEL, (), prompt=AppendixAPrompter()), DATA),
        (AS_SUITS, replace(DATA, prompt=VIZ_WIZ, rationale_prompt=None)),
    ):
        assert methods_with_rationales(["rcts"], data, settings, None) == []
        with pytest.raises(SettingError) as raised:
            methods_with_rationales(["rcts"], data, settings, True)
        assert "--prompt interleaved" in raised.value.hint
        assert methods_with_rationales(["zero-shot"], data, settings, True) == []


def test_rationales_come_from_matching_examples() -> None:
    others = [
        replace(KNOWN, rationale="Seen.", id="other", tags={"rationale_accuracy": "1"}),
        replace(KNOWN, answer="b", rationale="Of a wrong answer."),
        replace(
            KNOWN, query=replace(KNOWN.query, images=(solid_image(2),)), rationale="Elsewhere."
        ),
    ]
    data, found = with_rationales(BARE, others)
    assert (data.knowledge[0].rationale, found) == ("Seen.", 1)
    kept, _ = with_rationales(replace(DATA, knowledge=(KNOWN, *BARE.knowledge)), others[:1])
    assert [one.rationale for one in kept.knowledge] == ["Seen.", "Seen."]
    wrong = replace(DATA, knowledge=tuple(corrupt([KNOWN], 1.0, label_confusion([KNOWN]), seed=0)))
    for data, written in ((wrong, others[:1]), (BARE, []), (BARE, [BARE.knowledge[0]])):
        with pytest.raises(SettingError):
            with_rationales(data, written)

"""Prompts of the methods, with or without rationales."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bottega._util.identity import image_hashes
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.methods import METHODS
from bottega.protocols import Prompter, turns_only
from bottega.recipes import Classifier, default_prompter
from bottega.types import Candidate, Example, Prompt, Query

PROBE = "why it is so"


def prompt_for(
    name: str, data: Benchmark, settings: Classifier, rationales: bool | None = None
) -> Prompter:
    """Return the prompt of a method: the configured one, the benchmark's, or the model's default.

    Models that know turns alone always get their default. A benchmark's prompt with rationales
    is used for RCTS and the methods of equal cost, if the examples have rationales (RCTS, Table 2:
    the search shows rationales, its baselines do not). `rationales` overrides this for all methods
    with demonstrations.
    """
    own = None if settings.prompt or turns_only(settings.generator) else data.prompt
    if own is not None and data.rationale_prompt is not None:
        wanted = METHODS[name].match_search_cost if rationales is None else rationales
        shows = wanted and METHODS[name].shows_demonstrations and _has_rationales(data)
        return data.rationale_prompt if shows else own
    prompt = settings.prompt or own or default_prompter(settings.generator)
    return RationaleRemover(prompt) if rationales is False else prompt


def methods_with_rationales(
    names: Sequence[str], data: Benchmark, settings: Classifier, rationales: bool | None
) -> list[str]:
    """Return the methods whose demonstrations show rationales.

    Raises `SettingError` if `rationales` is true and no method can show them.
    """
    if rationales and not _has_rationales(data):
        raise SettingError(
            f"no example of {data.name} has a rationale",
            hint="write them with bottega rationales, or load them with --rationales-from",
        )
    demonstrating = [name for name in dict.fromkeys(names) if METHODS[name].shows_demonstrations]
    found = [
        name
        for name in demonstrating
        if _has_rationales(data) and _shows_rationales(prompt_for(name, data, settings, rationales))
    ]
    if rationales and demonstrating and not found:
        raise SettingError(
            f"the prompt of {data.name} shows no rationales", hint="set --prompt interleaved"
        )
    return found


def with_rationales(data: Benchmark, explained: Iterable[Example]) -> tuple[Benchmark, int]:
    """Copy the rationales of equal examples; return the benchmark and their number.

    Raises `SettingError` if there are none.
    """
    rationales = {_identity(one): one.rationale for one in explained if one.rationale}
    found = [rationales.get(_identity(example)) for example in data.knowledge]
    if not any(found):
        raise SettingError(
            f"the file has no rationale for the {len(found)} labelled examples of {data.name}",
            hint="store them with bottega add KB BENCHMARK, then run bottega rationales KB",
        )
    pairs = zip(data.knowledge, found, strict=True)
    knowledge = tuple(replace(one, rationale=why) if why else one for one, why in pairs)
    return replace(data, knowledge=knowledge), sum(why is not None for why in found)


class RationaleRemover:
    """Prompter that hides the rationales of demonstrations."""

    def __init__(self, prompt: Prompter) -> None:
        self._prompt = prompt

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        bare = [
            replace(one, example=replace(one.example, rationale=None)) for one in demonstrations
        ]
        return self._prompt(query, bare)


def _identity(example: Example) -> tuple[object, ...]:
    query = example.query
    return query.text, image_hashes(query), query.choices, example.answer


def _has_rationales(data: Benchmark) -> bool:
    return any(example.rationale for example in data.knowledge)


def _shows_rationales(prompt: Prompter) -> bool:
    query = Query("Is it?", choices=("yes", "no"))
    shown = prompt(query, [Candidate(Example(query, "yes", rationale=PROBE), 1.0)])
    return any(PROBE in str(part) for message in shown.messages for part in message.parts)

"""What the methods of a run ask with, and whether their demonstrations show rationales."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bottega._util.identity import image_hashes
from bottega.errors import SettingError
from bottega.evaluation.baselines import VOTES
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.paired import AS_DEAR
from bottega.evaluation.search_methods import TREE
from bottega.protocols import Prompter, turns_only
from bottega.recipes import Classifier, default_prompter
from bottega.types import Candidate, Example, Prompt, Query

# As in RCTS's Table 2: its search shows rationales, what it is compared with does not. Whatever may
# spend as much as the search has to see what the search sees.
REASONED = (TREE, *AS_DEAR)
WITHOUT_DEMONSTRATIONS = ("zero-shot", *VOTES)
MARK = "why it is so"


def prompt_for(
    name: str, data: Benchmark, settings: Classifier, rationales: bool | None = None
) -> Prompter:
    """The prompt of a method: the one that was chosen, or the benchmark's own, or what suits the
    model, which is all that a model of brief turns is asked with.

    A benchmark's prompt that shows rationales is for the methods of `REASONED`, where there are
    rationales; `rationales` says so of all methods with demonstrations, or of none.
    """
    own = None if settings.prompt or turns_only(settings.generator) else data.prompt
    if own is not None and data.reasoned is not None:
        wanted = name in REASONED if rationales is None else rationales
        shows = wanted and name not in WITHOUT_DEMONSTRATIONS and _has_rationales(data)
        return data.reasoned if shows else own
    prompt = settings.prompt or own or default_prompter(settings.generator)
    return RationaleRemover(prompt) if rationales is False else prompt


def explained(
    names: Sequence[str], data: Benchmark, settings: Classifier, rationales: bool | None
) -> list[str]:
    """Those of the methods whose demonstrations show rationales. Raises `SettingError` if they
    were asked to and cannot."""
    if rationales and not _has_rationales(data):
        raise SettingError(
            f"no known example of {data.name} has a rationale",
            hint="bottega rationales writes them; --rationales-from takes them from its file",
        )
    found = [
        name
        for name in dict.fromkeys(names)
        if name not in WITHOUT_DEMONSTRATIONS
        and _has_rationales(data)
        and _shows_rationales(prompt_for(name, data, settings, rationales))
    ]
    if rationales and not found and not set(names) <= set(WITHOUT_DEMONSTRATIONS):
        raise SettingError(
            f"the prompt of {data.name} shows no rationales", hint="--prompt interleaved shows them"
        )
    return found


def with_rationales(data: Benchmark, written: Iterable[Example]) -> tuple[Benchmark, int]:
    """With the rationales of those examples of `written` that ask and answer the same as a known
    one, and how many these are. Raises `SettingError` if there are none."""
    reasons = {_asked(example): example.rationale for example in written if example.rationale}
    found = [reasons.get(_asked(example)) for example in data.knowledge]
    if not any(found):
        raise SettingError(
            f"there is no rationale for any of {data.name}'s {len(found)} known examples",
            hint="bottega add KB BENCHMARK stores them, bottega rationales KB explains them",
        )
    pairs = zip(data.knowledge, found, strict=True)
    knowledge = tuple(replace(one, rationale=why) if why else one for one, why in pairs)
    return replace(data, knowledge=knowledge), sum(why is not None for why in found)


class RationaleRemover:
    """Another prompt, whose demonstrations keep their reasons to themselves."""

    def __init__(self, prompt: Prompter) -> None:
        self._prompt = prompt

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        bare = [
            replace(one, example=replace(one.example, rationale=None)) for one in demonstrations
        ]
        return self._prompt(query, bare)


def _asked(example: Example) -> tuple[object, ...]:
    query = example.query
    return query.text, image_hashes(query), query.choices, example.answer


def _has_rationales(data: Benchmark) -> bool:
    return any(example.rationale for example in data.knowledge)


def _shows_rationales(prompt: Prompter) -> bool:
    query = Query("Is it?", choices=("yes", "no"))
    shown = prompt(query, [Candidate(Example(query, "yes", rationale=MARK), 1.0)])
    return any(MARK in str(part) for message in shown.messages for part in message.parts)

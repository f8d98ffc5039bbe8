"""Prompts of the methods, with or without rationales, and what their demonstrations show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast, get_args

from bottega import naming
from bottega._util.identity import image_hashes
from bottega._util.progress import plural
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, names_passages
from bottega.evaluation.config import SAMPLES, RunConfig
from bottega.evaluation.methods.searchers import reward_metric
from bottega.evaluation.methods.specifications import METHODS, SAMPLING_METHODS, SEARCH_METHODS
from bottega.prompting import (
    AppendixAPrompter,
    InterleavedPrompter,
    LetteredPrompter,
    ReasoningPrompter,
)
from bottega.protocols import Generator, Prompter, turns_only
from bottega.rationales import ACCURACY
from bottega.recipes import Classifier, default_prompter
from bottega.reranking import DemonstrationOrder
from bottega.types import Candidate, Example, Query

if TYPE_CHECKING:
    from bottega.generation.loaded import LoadedModel


NEAREST_LAST: DemonstrationOrder = "nearest-last"

REASONED, REASONING_TOKENS = "reasoned", 512  # a value of --prompt, and its --max-tokens

PROBE = "why it is so"
RATIONALES, NONE = "rationales", "none"
PROMPT = "prompt"  # key of a description, only of methods that ask for reasons by default
Description = dict[str, str]

HINT = "use passages without images, or a model that takes several images"


def method_settings(
    name: str, data: Benchmark, settings: Classifier, config: RunConfig
) -> Classifier:
    """Return the settings with the prompt of a method, and with its limit of tokens."""
    prompt, sampling = prompt_for(name, data, settings, config.rationales), settings.sampling
    asks = asks_for_reasons(name, data, settings, config.rationales)
    if config.reasoning_tokens is not None and asks:
        sampling = replace(sampling, max_tokens=config.reasoning_tokens)
    return replace(settings, prompt=prompt, sampling=sampling)


def asks_for_reasons(
    name: str, data: Benchmark, settings: Classifier, rationales: bool | None = None
) -> bool:
    """Return whether the default prompt of a method is `ReasoningPrompter`.

    The reward of RCTS and the methods of equal cost need a rationale. With `rationales`, so do all
    methods whose prompt would otherwise be appendix A, which shows none. Benchmarks with a
    published prompt keep it, and models that know turns alone cannot reason.
    """
    published = data.prompt is not None and not isinstance(data.prompt, LetteredPrompter)
    if settings.prompt or published or turns_only(settings.generator):
        return False
    hidden = bool(rationales) and data.prompt is None
    return METHODS[name].match_search_cost or (hidden and METHODS[name].shows_demonstrations)


def prompt_for(
    name: str, data: Benchmark, settings: Classifier, rationales: bool | None = None
) -> Prompter:
    """Return the prompt of a method: the configured one, the benchmark's, or the model's default.

    Models that know turns alone always get their default. RCTS and the methods of equal cost ask
    for reasons where no prompt is published (`asks_for_reasons`). A benchmark's prompt with
    rationales is used for the same methods, if the examples have rationales (RCTS, Table 2: the
    search shows rationales, its baselines do not). `rationales` overrides this for all methods with
    demonstrations.
    """
    own = None if settings.prompt or turns_only(settings.generator) else data.prompt
    if own is not None and data.rationale_prompt is not None:
        wanted = METHODS[name].match_search_cost if rationales is None else rationales
        shows = wanted and METHODS[name].shows_demonstrations and _has_rationales(data)
        return data.rationale_prompt if shows else own
    prompt = settings.prompt or own or default_prompter(settings.generator)
    if asks_for_reasons(name, data, settings, rationales):
        prompt = ReasoningPrompter()
    return _without_rationales(prompt) if rationales is False else prompt


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
            f"the prompt of {data.name} shows no rationales",
            hint="set --prompt reasoned or interleaved",
        )
    return found


def describe_methods(
    data: Benchmark, settings: Classifier, config: RunConfig, source: str
) -> dict[str, Description]:
    """Return the settings of each method with demonstrations: the source of its rationales, its
    prompt if the method selects it, and the settings of its search.

    `source` is the result of `rationale_source`. Raises `SettingError` as
    `methods_with_rationales`.
    """
    explained = methods_with_rationales(config.methods, data, settings, config.rationales)
    found: dict[str, Description] = {}
    for name in dict.fromkeys(config.methods):
        if METHODS[name].shows_demonstrations:
            found[name] = {RATIONALES: source if name in explained else NONE}
            found[name] |= _differences(name, data, settings, config)
    return found


def _differences(
    name: str, data: Benchmark, settings: Classifier, config: RunConfig
) -> Description:
    """Return the differences from the recorded settings of the run, all settings of a search, the
    number of samples, and the rule for the passages that `racc-swapped` excludes."""
    asking = method_settings(name, data, settings, config)
    found: Description = {}
    if asks_for_reasons(name, data, settings, config.rationales):
        found |= {PROMPT: "reasoned", "max_tokens": str(asking.sampling.max_tokens)}
    if name == "rcts" and data.rationale_prompt and asking.prompt is data.rationale_prompt:
        found["zero_shot_prompt"] = "without reasons"
    metric = reward_metric(data, config)
    mutual = config.search.reward_for(settings.generator) in ("mutual", "both")
    if metric and mutual and name in SEARCH_METHODS:
        found["mutual_reward"] = metric.name
    if name in SEARCH_METHODS:
        found |= config.search.description(name, settings.generator)
    if name in SAMPLING_METHODS:
        found["samples"] = str(sample_count(config, settings.generator))
    if name == "rcts-best-of-n" and config.order not in (None, "nearest-last"):
        found["order"] = str(config.order)
    if name == "racc-swapped" and not names_passages(data.items):
        found["relevance"] = data.relevance
    return found


def sample_count(config: RunConfig, generator: Generator) -> int:
    """Return how many samples `majority` and `best-of-n` choose from."""
    if config.samples is not None:
        return config.samples
    if set(SEARCH_METHODS).isdisjoint(config.methods):
        return SAMPLES
    return config.search.max_calls(generator)


def description_text(shown: Mapping[str, Mapping[str, str]]) -> str:
    """Return the descriptions, each with its methods: "top-k (rationales none)"."""
    methods: defaultdict[str, list[str]] = defaultdict(list)
    for name, what in shown.items():
        words = (f"{key.replace('_', ' ')} {value}" for key, value in what.items())
        methods[", ".join(words)].append(name)
    return "; ".join(f"{', '.join(names)} ({what})" for what, names in methods.items())


def rationale_source(data: Benchmark) -> str:
    """Return the source of the examples' rationales: given by the data, generated by `bottega
    rationales`, both, or none."""
    explained = [example for example in data.knowledge if example.rationale]
    sources = ["generated" if ACCURACY in example.tags else "given" for example in explained]
    return " and ".join(sorted(set(sources))) or NONE


def with_rationales(data: Benchmark, explained: Iterable[Example]) -> tuple[Benchmark, int]:
    """Copy the rationales of equal examples; return the benchmark and their number.

    Raises `SettingError` if there are none.
    """
    rationales = {_identity(one): one.rationale for one in explained if one.rationale}
    found = [rationales.get(_identity(example)) for example in data.knowledge]
    if not any(found):
        raise SettingError(
            f"the file has no rationale for the {plural(len(found), 'labelled example')} of"
            f" {data.name}",
            hint="store them with bottega add KB BENCHMARK, then run bottega rationales KB",
        )
    pairs = zip(data.knowledge, found, strict=True)
    knowledge = tuple(replace(one, rationale=why) if why else one for one, why in pairs)
    return replace(data, knowledge=knowledge), sum(why is not None for why in found)


def _without_rationales(prompt: Prompter) -> Prompter:
    """Return a prompter that hides the rationales of demonstrations."""
    return lambda query, demonstrations: prompt(
        query,
        [replace(one, example=replace(one.example, rationale=None)) for one in demonstrations],
    )


def _identity(example: Example) -> tuple[object, ...]:
    query = example.query
    return query.text, image_hashes(query), query.choices, example.answer


def _has_rationales(data: Benchmark) -> bool:
    return any(example.rationale for example in data.knowledge)


def _shows_rationales(prompt: Prompter) -> bool:
    query = Query("Is it?", choices=("yes", "no"))
    shown = prompt(query, [Candidate(Example(query, "yes", rationale=PROBE), 1.0)])
    return any(PROBE in str(part) for part in shown.parts)


def images_per_prompt(names: Sequence[str], shots: Sequence[int], data: Benchmark) -> int:
    """Return the largest number of images in a prompt of these methods. A compressor reads passages
    one by one."""
    query, shown = most_images(data.items), _counts(data.knowledge)
    largest = 0
    for name in names:
        spec = METHODS[name]
        if not spec.uses_model:
            continue
        if spec.compresses:
            largest = max(largest, query, *shown[:1])
        elif spec.retrieval == "none":
            largest = max(largest, query)
        else:
            count = 1 if name == "candidates" else max(shots)
            several = shown if spec.retrieval == "everything" else shown[:count]
            largest = max(largest, query + sum(several))
    return largest


def check_prompt_images(count: int, model: LoadedModel, name: str) -> None:
    """Raise `SettingError` for more images in a prompt than the model takes."""
    if model.max_images is not None and count > model.max_images:
        raise SettingError(
            f"{name} reads at most {model.image_limit} per prompt, got up to {count}",
            hint=f"{HINT}; racc gives passages to the compressor one by one",
        )


def most_images(examples: Iterable[Example]) -> int:
    return max((len(one.query.images) for one in examples), default=0)


def _counts(examples: Iterable[Example]) -> list[int]:
    """Return the numbers of images, the largest first."""
    return sorted((len(one.query.images) for one in examples), reverse=True)


def open_prompt(name: str) -> Prompter | None:
    """Return the prompter; None for `auto`, where the recipe selects it by model."""
    prompts: dict[str, Prompter | None] = {
        "auto": None,
        "paper": AppendixAPrompter(),
        "interleaved": InterleavedPrompter(),
        REASONED: ReasoningPrompter(),
    }
    if name not in prompts:
        hint = f"{naming.suggestion(name, prompts)}use auto, paper, interleaved or reasoned"
        raise SettingError(f"prompt is unknown, got {name!r}", hint=hint)
    return prompts[name]


def check_prompt(name: str, generator: Generator) -> None:
    """Raise `SettingError` for a prompt that the model was not trained to read."""
    if name in ("paper", REASONED) and turns_only(generator):
        raise SettingError(
            f"{generator.name} reads brief turns only, got --prompt {name}",
            hint="remove --prompt",
        )


def parse_order(text: str) -> DemonstrationOrder:
    orders = get_args(DemonstrationOrder)
    if text not in orders:
        raise SettingError(
            f"--order must be {', '.join(orders[:-1])} or {orders[-1]}, got {text!r}",
            hint=f"set e.g. --order {orders[0]}",
        )
    return cast(DemonstrationOrder, text)

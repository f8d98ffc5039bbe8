"""The command `bottega stream`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from typer import Option

from bottega._util.locations import StoreLocation
from bottega._util.progress import plural
from bottega.cli.components import check_retrieval_options, open_prices, with_synonyms
from bottega.cli.evaluation_run import check_output
from bottega.cli.method_actor import check_images
from bottega.cli.options import (
    MODELS_HELP,
    BenchmarkSpec,
    BudgetOption,
    DryRun,
    ItemLimit,
    JsonFile,
    Seed,
    Stop,
    Synonyms,
    Yes,
    knowledge_option,
    parse_stop,
)
from bottega.cli.output import note, waiting, warn
from bottega.cli.stream_run import StreamRun
from bottega.errors import SettingError
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.methods.master_answers import labelled_questions
from bottega.evaluation.outcomes import Budget
from bottega.evaluation.streams.stream_plan import (
    CONTROLS,
    ROUTERS,
    STARTS,
    UNLIMITED,
    Control,
    StreamConfig,
)
from bottega.knowledge.embedders.names import BUNDLED
from bottega.knowledge.eviction import EVICTIONS
from bottega.naming import (
    check_embedder,
    check_model,
    default_embedder,
    model_for,
    suggestion,
)
from bottega.recipes.cache_retrieval import RETRIEVE

ANSWER_TOKENS = 512
# Size of MMMU's development set, the paper's cold start, relative to its validation set.
COLD_SHARE = 0.17
NONE = "none"
Name = TypeVar("Name", bound=str)


def stream(
    benchmark: BenchmarkSpec,
    master: Annotated[
        str | None, Option(metavar="NAME", help=f"The large model: {MODELS_HELP}")
    ] = None,
    apprentice: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="The small model; accepts the same names.",
            show_default="bundled:photos with the embedder photos, else bundled",
        ),
    ] = None,
    tiers: Annotated[
        str | None,
        Option(
            metavar="LIST",
            help="Two or more models, comma-separated, the cheapest first and the master last, "
            "instead of --master and --apprentice.",
        ),
    ] = None,
    router: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Router: coin (random), coverage (the items least similar to the cache go to the "
            "master) or half-first (half of the master's share first, then random).",
        ),
    ] = "coin",
    master_rate: Annotated[
        str,
        Option(metavar="LIST", help="Shares of the items that go to the master, comma-separated."),
    ] = "0.1,0.3,0.5,0.7,0.9",
    start: Annotated[
        str,
        Option(
            metavar="LIST",
            help="Contents of the cache at the start, comma-separated: none (empty), cold (some of "
            "the master's answers to the labelled questions), warm (all of them).",
        ),
    ] = "none",
    retrieve: Annotated[
        str,
        Option(metavar="LIST", help=f"Retrieval methods, comma-separated: {', '.join(RETRIEVE)}."),
    ] = "image",
    controls: Annotated[
        str,
        Option(
            metavar="LIST",
            help="Controls, comma-separated: no-cache (no demonstrations, also for the apprentice "
            "alone and the master alone), random (random examples of the cache), vote (a vote of "
            "the demonstrations instead of the apprentice); or none.",
        ),
    ] = "no-cache,random,vote",
    shots: Annotated[int, Option(min=1, help="Number of demonstrations.")] = 1,
    orders: Annotated[int, Option(min=1, help="Number of orders of the items.")] = 5,
    phases: Annotated[
        int,
        Option(
            min=1,
            help="Number of drift phases; each has the items of other gold answers.",
        ),
    ] = 1,
    capacity: Annotated[
        int | None, Option(min=1, help="Maximum number of cached examples.")
    ] = None,
    evict: Annotated[
        str | None,
        Option(
            metavar="LIST",
            help="Eviction policies with --capacity, comma-separated: lru, lfu, least-saving, "
            "fifo, random, or none (no limit).",
            show_default="lru with --capacity",
        ),
    ] = None,
    groups: Annotated[
        int | None,
        Option(
            min=1, help="Number of groups of hashtag methods.", show_default="adapted to the cache"
        ),
    ] = None,
    cold: Annotated[
        int | None,
        Option(
            min=1,
            help="Number of answers in a cold start.",
            show_default="17 % of the items, as in the paper",
        ),
    ] = None,
    answers: Annotated[
        StoreLocation | None,
        knowledge_option(
            "Take the master's answers to the labelled questions from this file of `bottega"
            " answer` instead of asking the master.",
        ),
    ] = None,
    limit: ItemLimit = None,
    embed: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Image embedder, as for eval.",
            show_default="photos for photographs if its extra is installed, else bundled",
        ),
    ] = None,
    embed_text: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Text embedder: words, minilm or FOLDER:text.",
            show_default="words",
        ),
    ] = None,
    metric: Annotated[
        Literal["cosine", "l2"],
        Option(
            metavar="cosine|l2",
            help="Distance between vectors; l2 changes the results of raw-average only.",
        ),
    ] = "cosine",
    max_tokens: Annotated[int, Option(min=1, help="Maximum tokens of a reply.")] = ANSWER_TOKENS,
    stop: Stop = None,
    apprentice_url: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Base URL of the apprentice's endpoint; its key is APPRENTICE_API_KEY.",
            show_default="the master's endpoint: OPENAI_BASE_URL, OPENAI_API_KEY",
        ),
    ] = None,
    seed: Seed = 0,
    concurrency: Annotated[int, Option(min=1, help="Maximum concurrent streams.")] = 32,
    budget: BudgetOption = None,
    master_price: Annotated[
        str | None,
        Option(
            metavar="IN,OUT",
            help="USD per million tokens of the master, IN,OUT (default: published prices).",
        ),
    ] = None,
    apprentice_price: Annotated[
        str | None,
        Option(metavar="IN,OUT", help="USD per million tokens of all other models, IN,OUT."),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Store every reply and answer in this folder. The same command resumes the run; "
            "`bottega report` reads it.",
        ),
    ] = None,
    json: JsonFile = None,
    synonyms: Synonyms = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Answer a stream of questions with an apprentice and a master whose answers fill a cache.

    This is the evaluation of Cache-of-Thought (section 6.2): items arrive one by one, a router
    sends each to the master or to the apprentice, and the master's answers become demonstrations.
    No model, cache or router sees a gold answer. Equal requests of several streams are sent once;
    the cost of a stream counts all of its requests."""
    evictions = _names(
        evict or ("lru" if capacity else UNLIMITED), (UNLIMITED, *EVICTIONS), "--evict"
    )
    if capacity is None and set(evictions) != {UNLIMITED}:
        raise SettingError(
            f"--evict {evict} needs a capacity, got none", hint="add e.g. --capacity 100"
        )
    config = StreamConfig(
        benchmark=benchmark,
        tiers=_models(tiers, master, apprentice),
        router=_name(router, ROUTERS, "--router"),
        rates=_rates(master_rate),
        starts=_names(start, STARTS, "--start"),
        retrieve=_names(retrieve, RETRIEVE, "--retrieve"),
        controls=_controls(controls),
        shots=shots,
        orders=orders,
        embed=embed or "",
        embed_text=embed_text or "words",
        metric=metric,
        evict=evictions,
        groups=groups,
        capacity=capacity,
        cold=cold,
        answers=answers,
        limit=limit,
        max_tokens=max_tokens,
        stop=parse_stop(stop),
        synonyms=synonyms,
        phases=phases,
        seed=seed,
    )
    check_output(json)
    Budget(budget)  # fail before anything is loaded
    _check_unused(config, cold)
    check_retrieval_options(config.retrieve, embed_text=embed_text, metric=metric, groups=groups)
    if embed is not None:
        check_embedder(embed)
    prices = {"master": master_price, "apprentice": apprentice_price}
    tables = {name: open_prices(price, f"--{name}-price") for name, price in prices.items()}
    with waiting("reading the benchmark"):
        data = load_benchmark(benchmark, seed=seed, limit=limit, on_error=warn)
    data = with_synonyms(data, synonyms)
    embed = embed or default_embedder(i for e in data.knowledge for i in e.query.images)
    config = replace(
        config,
        embed=embed,
        tiers=_models(tiers, master, apprentice, embed),
        cold=cold or round(COLD_SHARE * len(data.items)),
    )
    most = config.max_cached(len(data.items), len(labelled_questions(data)))
    if shots > most:
        note(f"{shots} shots requested; a cache holds at most {plural(most, 'answer')}")
    for name in config.retrieve:
        check_images(data, name)
    if len(set(config.tiers)) < len(config.tiers) and master_price != apprentice_price:
        raise SettingError(
            f"master and apprentice have one name but two prices, got {config.tiers[-1]}",
            hint="serve one of them under another name, or set equal prices",
        )
    run = StreamRun(config, data, tables, out, budget, concurrency, apprentice_url, asks=not yes)
    if dry_run:
        run.print_plan()
    else:
        run.execute(json)


def _check_unused(config: StreamConfig, cold: int | None) -> None:
    """Raise `SettingError` for an option that has no effect."""
    starts = set(config.starts)
    unused = (
        ("--answers", config.answers is not None and starts == {"none"}, "--start warm"),
        ("--cold", cold is not None and "cold" not in starts, "--start cold"),
        (
            "--capacity",
            config.capacity is not None and set(config.evict) == {UNLIMITED},
            "--evict lru",
        ),
    )
    for option, is_unused, other in unused:
        if is_unused:
            raise SettingError(f"{option} has no effect", hint=f"remove it, or add {other}")


def _models(
    tiers: str | None, master: str | None, apprentice: str | None, embed: str = BUNDLED
) -> tuple[str, ...]:
    """Return the models, the master last. Raises `SettingError`."""
    if tiers is not None and (master or apprentice):
        raise SettingError(
            "--tiers replaces --master and --apprentice, got both", hint="remove one of them"
        )
    names = (
        tiers.split(",") if tiers is not None else [apprentice or model_for(embed), master or ""]
    )
    if not names[-1]:
        raise SettingError("a stream needs a master, got none", hint="add --master openai:NAME")
    if len(names) < 2:
        raise SettingError(
            f"--tiers must name two models or more, got {tiers}",
            hint="add another model; the master is the last one",
        )
    for name in names:
        check_model(name.strip())
    return tuple(name.strip() for name in names)


def _name(given: str, allowed: Collection[Name], option: str) -> Name:
    for name in allowed:
        if name == given:
            return name
    raise SettingError(
        f"{option} must be one of {', '.join(allowed)}, got {given!r}",
        hint=f"{suggestion(given, allowed)}set e.g. {option} {next(iter(allowed))}",
    )


def _names(given: str, allowed: Collection[Name], option: str) -> tuple[Name, ...]:
    return tuple(dict.fromkeys(_name(one.strip(), allowed, option) for one in given.split(",")))


def _controls(given: str) -> tuple[Control, ...]:
    if given == NONE:
        return ()
    if NONE in given.split(","):
        raise SettingError(f"--controls none excludes the others, got {given}", hint="remove none")
    return _names(given, CONTROLS, "--controls")


def _rates(given: str) -> tuple[float, ...]:
    try:
        rates = tuple(dict.fromkeys(float(part) for part in given.split(",")))
    except ValueError:
        rates = (-1.0,)
    if not all(0 <= rate <= 1 for rate in rates):
        raise SettingError(
            f"--master-rate must be shares between 0 and 1, got {given!r}",
            hint="set e.g. --master-rate 0.1,0.2,0.3",
        )
    return rates

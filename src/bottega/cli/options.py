"""Options and arguments that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from datetime import datetime
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from string import Template
from typing import Annotated, Any, get_origin, get_type_hints

from typer import Argument, Option

from bottega._util.locations import StoreLocation
from bottega._util.postgres import is_postgres_url
from bottega.errors import SettingError
from bottega.evaluation.benchmarks.built_in import SYNTHETIC
from bottega.evaluation.benchmarks.loading import PUBLISHED
from bottega.evaluation.config import MODELS_HELP, ORDER_HELP, RunConfig

Command = Callable[..., None]


def field_option(kind: type, name: str) -> Any:
    """Return the option that the metadata of a field describes (`search_config.option`)."""
    (one,) = (one for one in fields(kind) if one.name == name)
    settings = dict(one.metadata)
    return Option(*settings.pop("flags", ()), **settings)


def options_from_fields(**texts: str) -> Callable[[Command], Command]:
    """Return a decorator for commands: each parameter whose type is a dataclass becomes the options
    of its fields.

    Fields are described by their metadata (`search_config.option`) or by an annotated type, as
    parameters of commands are; others have no option. A `Sequence` is parsed from one text, and the
    option of a `tuple` may be repeated. `texts` replace `$NAME` in help texts.
    """

    def decorate(function: Command) -> Command:
        hints = get_type_hints(function, include_extras=True)
        kinds = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
        parts = {name: _parameters(kind, texts) for name, kind in kinds.items()}
        parameters: list[Parameter] = []
        for one in signature(function).parameters.values():
            own = one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[one.name])
            parameters += parts.get(one.name, [own])

        @wraps(function)
        def command(**given: Any) -> None:
            built = {name: _built(kind, parts[name], given) for name, kind in kinds.items()}
            function(**given, **built)

        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _parameters(kind: Any, texts: Mapping[str, str]) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        _parameter(one, hints[one.name], texts)
        for one in fields(kind)
        if "help" in one.metadata or get_origin(hints[one.name]) is Annotated
    ]


def _parameter(one: Field[Any], hint: Any, texts: Mapping[str, str]) -> Parameter:
    default = one.default
    if get_origin(hint) is not Annotated:
        settings = dict(one.metadata)
        for name in {"help", "show_default"} & settings.keys():
            settings[name] = Template(settings[name]).safe_substitute(texts)
        if get_origin(hint) is tuple:
            hint = list[str] | None
        elif "parser" in settings:
            hint = str | None
        if isinstance(default, tuple):
            default = ",".join(map(str, default)) or None
        hint = Annotated[hint, Option(*settings.pop("flags", ()), **settings)]
    return Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _built(kind: Any, parameters: Sequence[Parameter], given: dict[str, Any]) -> Any:
    """Return an instance with the options that are set; remove all of them from `given`."""
    values = {one.name: given.pop(one.name) for one in parameters}
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if value is not None
        }
    )


BenchmarkSpec = Annotated[
    str,
    Argument(
        metavar="BENCHMARK",
        help="digits (or digits:half=second); image-folder:DIR or FILE.zip, table:FILE, "
        "manyicl:DIR or jsonl:DIR; a "
        "knowledge base K.db or postgresql://... (classifies each labelled image by the others); a "
        "synthetic task with options, e.g. glyphs:ways=5,shots=5 (tasks: "
        f"{', '.join(SYNTHETIC)}); or a published benchmark with a folder or a Hugging Face id and "
        f"options, e.g. mmmu:DIR,split=validation ({', '.join(PUBLISHED)}). See "
        "docs/evaluation.md.",
    ),
]
Yes = Annotated[bool, Option("--yes", "-y", help="Skip the cost confirmation.")]
ItemLimit = Annotated[int | None, field_option(RunConfig, "limit")]
CompressorFolder = Annotated[Path | None, field_option(RunConfig, "compressor")]
CONFIG = Path("bottega.toml")  # the gateway configuration of the current folder
KnowledgeFile = Annotated[
    StoreLocation,
    Argument(
        metavar="K.db",
        parser=StoreLocation.from_argument,
        help="The knowledge base: a file, or postgresql://USER@HOST/DATABASE.",
    ),
]


def knowledge_option(help: str) -> Any:
    """Return an option whose value is a knowledge base."""
    return Option(metavar="K.db", parser=StoreLocation.from_argument, help=help)


Namespace = Annotated[str, Option(metavar="NAME", help="Namespace (default: the unnamed one).")]
By = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="View to search, as listed by stats (default: the only one, or 'default').",
    ),
]


DataFolder = Annotated[
    Path | None,
    Option(
        metavar="FOLDER",
        help="Data folder of the gateway.",
        show_default="BOTTEGA_DATA, else gateway.data of ./bottega.toml, else bottega-data",
    ),
]
SharedDatabase = Annotated[
    str | None,
    Option(
        metavar="URL",
        help="PostgreSQL database that the gateways share, instead of a data folder.",
        show_default="BOTTEGA_DATABASE, else state.database_env of ./bottega.toml, else none",
    ),
]


def gateway_store(data: Path | None, database: str | None) -> Path | str:
    """Return the location of accounts and ledger: a file, or the URL of a database. Options
    override environment variables, which override ./bottega.toml. Raises `SettingError`."""
    from bottega.gateway.accounting.ledger_schema import FILE
    from bottega.gateway.config.config_file import load_config

    if data is not None and database is not None:
        raise SettingError("--data and --database exclude each other", hint="remove one of them")
    if data is not None:
        return data / FILE
    if database is not None:
        _check_database("--database", database)
        StoreLocation.from_argument(database)  # rejects a password
        return database
    if database := os.environ.get("BOTTEGA_DATABASE"):
        _check_database("BOTTEGA_DATABASE", database)
        return database
    if folder := os.environ.get("BOTTEGA_DATA"):
        return Path(folder) / FILE
    if not CONFIG.exists():
        return Path("bottega-data") / FILE
    config = load_config(CONFIG)
    return config.state.database_url(os.environ) or config.gateway.data / FILE


def _check_database(name: str, url: str) -> None:
    if not is_postgres_url(url):
        raise SettingError(
            f"{name} must be the URL of a PostgreSQL database",
            hint=f"set {name} to e.g. postgresql://bottega@db.example:5432/bottega",
        )


def parse_time(text: str) -> float:
    """Return an ISO 8601 time, local by default, in unix seconds. A time before 1970-01-02 becomes
    1970-01-02, because not all systems can convert it. Raises `SettingError`."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise SettingError(
            f"--since must be a date or time such as 2026-01-31 or 2026-01-31T09:30, got {text!r}",
            hint="set e.g. --since 2026-01-31",
        ) from error
    local = time if time.tzinfo is None else time.astimezone().replace(tzinfo=None)
    return max(local, datetime(1970, 1, 2)).timestamp()


def since_option(rows: str) -> Any:
    """Return the option `--since` of a command that shows `rows`."""
    help = f"Only {rows} at or after this local time."
    return Option(metavar="TIME", parser=parse_time, help=help)


OnlyNamespace = Annotated[
    str | None, Option(metavar="NAME", help="Only this namespace (default: all of them).")
]


def _file_name(path: Path | None) -> Path | None:
    """Return the value of --json. Raises `SettingError` for the next option."""
    if path is not None and str(path).startswith("-"):
        raise SettingError(
            f"--json needs a file name, got {str(path)!r}", hint="set e.g. --json results.json"
        )
    return path


JsonFile = Annotated[
    Path | None,
    Option(metavar="FILE", callback=_file_name, help="Write the results to this JSON file."),
]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
Model = Annotated[str, Option(metavar="NAME", help=f"Model: {MODELS_HELP}")]
TrustRemoteCode = Annotated[bool, field_option(RunConfig, "trust_remote_code")]
DefaultModel = Annotated[str | None, field_option(RunConfig, "model")]
Embed = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Embedder: photos, photos-lite2, photos-both, bundled, pixels, photos+pixels:WEIGHT "
        "(both, with this weight of the pixels, default 0.3), words or minilm (of the question), "
        "dual (bundled and words), or a sentence-transformers id or folder[:image|text|average] "
        "(default: the embedder of the file, else photos-both for photographs if its extra is "
        "installed, else bundled).",
    ),
]
PromptStyle = Annotated[str, field_option(RunConfig, "prompt")]
DefaultOrder = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help=ORDER_HELP,
        show_default="that of bottega tune, else nearest-last",
    ),
]
Stop = Annotated[list[str] | None, field_option(RunConfig, "stop")]
Seed = Annotated[int, field_option(RunConfig, "seed")]
Synonyms = Annotated[Path | None, field_option(RunConfig, "synonyms")]
DryRun = Annotated[
    bool,
    Option(
        "--dry-run",
        help="Read the data, check the options, print the number of requests, and send none.",
    ),
]
On = Annotated[
    str,
    Option(
        metavar="WHERE",
        help="Compute in this process (local), in worker processes of this machine (ray), or on a "
        "Ray cluster (ray://HOST:PORT). See docs/batch.md.",
    ),
]
WorkerCount = Annotated[
    int | None,
    Option(
        min=1,
        help="Number of worker processes of --on ray.",
        show_default="one per CPU",
    ),
]
TraceFile = Annotated[
    StoreLocation | None,
    Option(
        metavar="FILE",
        parser=StoreLocation.from_argument,
        help="Trace database: a file, postgresql://USER@HOST/DATABASE, or none (default: "
        "BOTTEGA_TRACES, else the app folder).",
    ),
]
RecordedTraces = Annotated[
    StoreLocation | None,
    Option(
        metavar="FILE",
        parser=StoreLocation.from_argument,
        help="Trace database: a file, postgresql://USER@HOST/DATABASE, or the --out folder of "
        "bottega eval or stream (default: BOTTEGA_TRACES, else the app folder).",
    ),
]
BudgetOption = Annotated[
    float | None, Option(metavar="USD", help="Stop before the cost exceeds this many US dollars.")
]
PriceOption = Annotated[
    str | None,
    Option(
        metavar="IN,OUT",
        help="USD per million tokens, IN,OUT (default: published prices).",
    ),
]

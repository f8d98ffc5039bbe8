"""Options and arguments that several commands share."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from bottega._util.locations import StoreLocation
from bottega._util.postgres import is_postgres_url
from bottega.errors import SettingError
from bottega.evaluation.benchmarks.loading import PUBLISHED
from bottega.evaluation.benchmarks.synthetic import SYNTHETIC

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
ItemLimit = Annotated[int | None, Option(min=1, help="Maximum number of evaluated items.")]
CompressorFolder = Annotated[
    Path | None,
    Option(
        metavar="FOLDER",
        help="Compressor of racc: a folder written by `bottega compress train`. The bundled "
        "apprentice has its own.",
    ),
]
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


def parse_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of --shots. Raises `SettingError`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SettingError(
            f"--shots must be a list of numbers, got {text!r}", hint="set e.g. --shots 5,10,20"
        ) from error


def parse_stop(texts: list[str] | None) -> tuple[str, ...]:
    """Return the texts of --stop with line breaks and tabs in place of \\n and \\t."""
    return tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in texts or ())


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
MODELS_HELP = (
    "bundled (same as bundled:apprentice), bundled:photos, bundled:master or another of "
    "`bottega models`, openai:NAME or openai-completions:NAME (plain text prompts; endpoint: "
    "OPENAI_BASE_URL), or a Hugging Face id or folder."
)
Model = Annotated[str, Option(metavar="NAME", help=f"Model: {MODELS_HELP}")]
TrustRemoteCode = Annotated[
    bool,
    Option(
        "--trust-remote-code",
        help="Run the Python code that a model's folder or repository contains.",
    ),
]
DefaultModel = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help=f"Model: {MODELS_HELP}",
        show_default="bundled:photos or photos-lite2 with that embedder, simulated:codes for "
        "codes, else bundled",
    ),
]
Embed = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Embedder: photos, photos-lite2, bundled, pixels, photos+pixels:WEIGHT (both, with "
        "this weight of the pixels, default 0.3), words or minilm (of the question), dual (bundled "
        "and words), or a sentence-transformers id or folder[:image|text|average] (default: the "
        "embedder of the file, else photos for photographs if its extra is installed, else "
        "bundled).",
    ),
]
PromptStyle = Annotated[
    str,
    Option(
        metavar="NAME",
        help="paper (Visual RAG, appendix A), interleaved (turns), reasoned (turns that ask for "
        "reasons before the answer), or auto (by model; reasoned for rcts).",
    ),
]
ORDER_HELP = "Demonstration order: nearest-last, nearest-first or shuffled."
DefaultOrder = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help=ORDER_HELP,
        show_default="that of bottega tune, else nearest-last",
    ),
]
Stop = Annotated[
    list[str] | None,
    Option(
        metavar="TEXT",
        help="End a reply before this text; may be repeated. \\n is a line break.",
    ),
]
Seed = Annotated[int, Option(min=0, help="Seed of every random choice.")]
Synonyms = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help='Accept other names of labels in replies: a JSON file such as {"cat": ["tabby"]}.',
    ),
]
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

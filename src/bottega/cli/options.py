"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CONFIG = Path("bottega.toml")  # settings of a gateway that is started in this folder
KnowledgeFile = Annotated[Path, typer.Argument(metavar="K.db", help="The knowledge base file.")]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", help="Which namespace of the file (default: the one without a name)."
    ),
]
By = Annotated[
    str | None,
    typer.Option(
        "--by",
        help="The view to search by, one that stats lists (default: the only one, or 'default').",
    ),
]


def data_folder() -> Path:
    """Return the data folder that ./bottega.toml configures, or the default if there is no file.
    Raises `SettingError` for an invalid file."""
    from bottega.gateway.config.loading import load_config

    return load_config(CONFIG).gateway.data if CONFIG.exists() else Path("bottega-data")


DataFolder = Annotated[
    Path,
    typer.Option(
        "--data",
        envvar="BOTTEGA_DATA",
        help="The gateway's folder.",
        default_factory=data_folder,
        show_default="gateway.data of ./bottega.toml, else bottega-data",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Model = Annotated[
    str,
    typer.Option(
        help="bundled (which is bundled:apprentice), bundled:master, openai:NAME (endpoint: "
        "OPENAI_BASE_URL), or a Hugging Face id or folder."
    ),
]
Embed = Annotated[
    str | None,
    typer.Option(
        help="bundled, pixels, words (of the question), dual (bundled and words), or a "
        "sentence-transformers id or folder[:image|text|average]. "
        "Default: the one that built the file, else bundled."
    ),
]
PromptStyle = Annotated[
    str,
    typer.Option(
        "--prompt",
        help="paper (Visual RAG, appendix A), interleaved (turns), or auto: what suits the model.",
    ),
]
DemonstrationOrder = Annotated[
    str, typer.Option("--order", help="nearest-last, nearest-first or shuffled.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random choice.")]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--traces", help="Trace database, or none (default: BOTTEGA_TRACES, else the app folder)."
    ),
]
PriceOption = Annotated[
    str | None,
    typer.Option("--price", help="USD per million tokens, IN,OUT (default: published prices)."),
]

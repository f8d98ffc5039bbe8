"""The options of `bottega eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bottega.evaluation.benchmarks.loading import PUBLISHED
from bottega.evaluation.benchmarks.synthetic import SYNTHETIC
from bottega.evaluation.methods import LABEL_METHODS, METHODS, SAMPLES
from bottega.types import IMAGE_QUESTION

UNREAD = "none"
LABEL_TOKENS, ANSWER_TOKENS = 64, 512

BenchmarkSpec = Annotated[
    str,
    typer.Argument(
        help="digits (or digits:half=second); image-folder:DIR, manyicl:DIR or jsonl:DIR; a "
        "synthetic task with options, e.g. glyphs:ways=5,shots=5 (tasks: "
        f"{', '.join(SYNTHETIC)}); or a published benchmark with a folder or a Hugging Face id and "
        f"options, e.g. mmmu:DIR,asked=validation ({', '.join(PUBLISHED)}). See "
        "docs/evaluation.md.",
    ),
]
ImageQuestion = Annotated[
    str | None,
    typer.Option(
        help="Set the question about each image of image-folder:DIR or manyicl:DIR.",
        show_default=IMAGE_QUESTION,
    ),
]
MethodNames = Annotated[
    str | None,
    typer.Option(
        help=f"Comma-separated, of {', '.join(METHODS)}.",
        show_default=f"{','.join(LABEL_METHODS)}; for facts zero-shot,random,oracle",
    ),
]
ShotCounts = Annotated[str, typer.Option(help="Numbers of demonstrations, comma-separated.")]
PerClass = Annotated[int | None, typer.Option(min=1, help="Keep this many examples a label.")]
ItemLimit = Annotated[int | None, typer.Option(min=1, help="Ask this many items.")]
ImageEmbed = Annotated[
    str,
    typer.Option(
        help="bundled, pixels, or a sentence-transformers id or folder; with --retrieve hybrid "
        "bundled, or flmr: and a PreFLMR id or folder."
    ),
]
Compared = Annotated[
    str,
    typer.Option(
        help="What is compared: image (by --embed), text, dual (both), hybrid (late interaction "
        "of image and words, by the bundled model or by --embed flmr:FOLDER), keywords (dual, the "
        "question cut to them), bm25 (words), or hashtag (dual, in groups of questions)."
    ),
]
LabelNoise = Annotated[
    float, typer.Option(min=0, max=1, help="Share of the known answers to make wrong.")
]
AtOnce = Annotated[int, typer.Option(min=1, help="Questions at once.")]
Overlap = Annotated[
    bool, typer.Option("--allow-overlap", help="Allow test images in the knowledge base.")
]
ResultFile = Annotated[Path | None, typer.Option(help="Write the results to this file.")]
Passages = Annotated[
    str | None,
    typer.Option(
        help="Passages to read beside the known examples: the Google Search corpus of OK-VQA, or "
        "WIT, as a file, a folder or a Hugging Face id."
    ),
]
Unparsable = Annotated[
    str,
    typer.Option(
        help="Score unparsable multiple-choice replies of mmmu as none (wrong) or random (a "
        "choice drawn by the seed, as in MMMU's own code)."
    ),
]
Explained = Annotated[
    bool | None,
    typer.Option(
        "--rationales/--no-rationales",
        help="Whether demonstrations show why their answers are right, where that is known.",
        show_default="as in RCTS: only with rcts and what may spend as much, where the benchmark "
        "has a prompt of its own for it; elsewhere yes",
    ),
]
ExplainedBy = Annotated[
    Path | None,
    typer.Option(
        help="Take rationales from this knowledge base, where `bottega rationales` wrote them, for "
        "the known examples that it holds."
    ),
]
CompressorFolder = Annotated[
    Path | None,
    typer.Option(
        "--compressor",
        help="What racc compresses with: a folder that `bottega compress train` wrote. The bundled "
        "apprentice has its own.",
    ),
]
HyperModel = Annotated[
    str | None,
    typer.Option(
        "--hyper",
        help="The model that the compressor was trained to compress with, if it is not --model: "
        "bundled:master, a folder, or a Hugging Face id.",
    ),
]
StoreFolder = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help="Passages that `bottega compress build` compressed with --compressor. Without it they "
        "are compressed when they are asked for.",
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(
        help="Keep every answer in this folder as it comes. The same command goes on where it was "
        "stopped, asks again what failed, and `bottega report` reads it."
    ),
]
Money = Annotated[
    float | None, typer.Option(help="Stop before more US dollars than this are spent.")
]
Samples = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Samples that majority and best-of-n choose from.",
        show_default=f"{SAMPLES}; with rcts as many as its search may ask for",
    ),
]
Rollouts = Annotated[int, typer.Option(min=1, help="Branches that rcts tries for a question.")]
Tokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest reply.",
        show_default=f"{LABEL_TOKENS} for labels, else {ANSWER_TOKENS}",
    ),
]
RoundSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Ask in the items' order, so many at once, each round after the one before: for what "
        "learns from its answers.",
    ),
]

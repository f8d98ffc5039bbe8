"""Settings of an evaluation run, with the options of the command line that set them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bottega._util.locations import StoreLocation
from bottega.errors import LoadError, SettingError
from bottega.evaluation.search_config import SearchConfig, option
from bottega.naming import source_digest
from bottega.recipes.racc import COMPRESSOR, STORE
from bottega.recipes.visual_rag import LABEL_TOKENS

CUSTOM = "custom"  # the method of the user's own function

# How a passage contains an answer: see `contains_answer`.
Relevance = Literal["contains", "stems", "words"]

Rerank = Literal["none", "cover", "mmr"]
EvaluatedMetric = Literal["cosine", "l2", "fitted"]

SHOTS, SEARCH_SHOTS = "5,10,20", "3"
SAMPLES = 5
ANSWER_TOKENS = 512
MODELS_HELP = (
    "bundled (same as bundled:apprentice), bundled:photos, bundled:master or another of "
    "`bottega models`, openai:NAME or openai-completions:NAME (plain text prompts; endpoint: "
    "OPENAI_BASE_URL), or a Hugging Face id or folder."
)
ORDER_HELP = "Demonstration order: nearest-last, nearest-first or shuffled."
# Options that runs and streams share.
LIMIT: Mapping[str, Any] = {"min": 1, "help": "Maximum number of evaluated items."}
SEED: Mapping[str, Any] = {"min": 0, "help": "Seed of every random choice."}
STOP: Mapping[str, Any] = {
    "metavar": "TEXT",
    "parser": lambda text: text.replace("\\n", "\n").replace("\\t", "\t"),
    "help": "End a reply before this text; may be repeated. \\n is a line break.",
}
SYNONYMS: Mapping[str, Any] = {
    "metavar": "FILE",
    "help": 'Accept other names of labels in replies: a JSON file such as {"cat": ["tabby"]}.',
}
KNOWLEDGE_BASE: Mapping[str, Any] = {"metavar": "K.db", "parser": StoreLocation.from_argument}


def parse_names(text: str) -> tuple[str, ...]:
    """Return comma-separated names."""
    return tuple(name.strip() for name in text.split(","))


def parse_shots(text: str) -> tuple[int, ...]:
    """Return the numbers of --shots. Raises `SettingError`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SettingError(
            f"--shots must be a list of numbers, got {text!r}", hint="set e.g. --shots 5,10,20"
        ) from error


@dataclass(frozen=True)
class RunConfig:
    """Settings of an evaluation run, for the command line, the runner and the run store.

    Most fields are options of `bottega eval` (`search_config.option`); in their help texts,
    `$METHODS` and `$LABEL_METHODS` stand for lists of methods.

    `MethodComparison` chooses those settings that are None or empty, unless stated otherwise.
    `samples` None: as many as a search among the methods may request, else 5. `rationales` None:
    as `prompts.prompt_for` decides. `relevance` None: the benchmark's. `reasoning_tokens` replaces
    `max_tokens` for methods that ask for reasons by default (`prompts.asks_for_reasons`). `hyper`
    names the model that compresses if `model` does not. `pipeline` is the import path of the
    function of `custom`. `concurrency` limits concurrent queries;
    `round_size` splits the items, in their order, into rounds, between which a method may learn.
    """

    benchmark: str = ""
    methods: Sequence[str] = option(
        "Methods, comma-separated: $METHODS.",
        (),
        metavar="LIST",
        parser=parse_names,
        show_default="$LABEL_METHODS; for facts zero-shot, random, oracle",
    )
    shots: Sequence[int] = option(
        "Numbers of demonstrations, comma-separated.",
        (),
        metavar="LIST",
        parser=parse_shots,
        show_default=f"{SHOTS}, or {SEARCH_SHOTS} with rcts or its controls; for a knowledge"
        " base, that of bottega tune",
    )
    passages: str | None = option(
        "Add passages to the knowledge base: the Google Search corpus of OK-VQA, or "
        "WIT, as a file, a folder or a Hugging Face id.",
        metavar="NAME",
    )
    relevance: Relevance | None = option(
        "Rule for the relevant passages that racc-swapped excludes: contains (an answer"
        " anywhere in the text), stems (the same, with more letters after each word of the"
        " answer) or words (whole words).",
        metavar="NAME",
        show_default="stems for okvqa, else contains",
    )
    limit: int | None = field(default=None, metadata=LIMIT)
    kb_per_class: int | None = option("Maximum examples per label in the knowledge base.", min=1)
    kb_share: float = option(
        "Keep this random share of the knowledge base's examples.", 1.0, min=0.001, max=1
    )
    rerank: Rerank = option(
        "Choice among four times as many retrieved examples: cover (as many labels as "
        "possible, for images with several labels) or mmr (similar to the item and different "
        "from each other).",
        "none",
        metavar="none|cover|mmr",
    )
    label_noise: float = option("Fraction of knowledge-base answers to corrupt.", 0.0, min=0, max=1)
    allow_overlap: bool = option(
        "Allow test images in the knowledge base.", False, flags=("--allow-overlap",)
    )
    model: str | None = option(
        f"Model: {MODELS_HELP}",
        metavar="NAME",
        show_default="bundled:photos or photos-lite2 with an embedder of photographs,"
        " simulated:codes for codes, else bundled",
    )
    trust_remote_code: bool = option(
        "Run the Python code that a model's folder or repository contains.",
        False,
        flags=("--trust-remote-code",),
    )
    embed: str | None = option(
        "Embedder: photos, photos-both, bundled, pixels, photos+pixels:WEIGHT, or a "
        "sentence-transformers id or folder; with --retrieve text: words, minilm, or "
        "FOLDER:text; with --retrieve hybrid: bundled, or flmr: and a PreFLMR id or folder, "
        "with the options query_tokens=, choices= and instruction=.",
        metavar="NAME",
        show_default="photos-both for photographs if its extra is installed, else bundled",
    )
    retrieve: str = option(
        "Retrieval method: image (by --embed), text (by --embed-text), dual (by both), "
        "crossed (compares images with image and keywords of the model's draft), probe "
        "(compares images and keywords of responses with the same), keywords (dual, with the "
        "keywords of the question), hashtag (dual, within groups of questions), "
        "keyword-hashtag (probe, within groups of responses), bm25 (words), or hybrid (late "
        "interaction of image and words, with the bundled model or --embed flmr:FOLDER).",
        "image",
        metavar="NAME",
    )
    embed_text: str | None = option(
        "Text embedder of dual and similar methods: words, minilm or FOLDER:text.",
        metavar="NAME",
        show_default="words; the text part of --embed if that is FOLDER:average",
    )
    metric: EvaluatedMetric | None = option(
        "How vectors are compared: cosine, l2 (changes the results of raw-average), or"
        " fitted to the labels of the examples.",
        metavar="cosine|l2|fitted",
        show_default="fitted for labelled photographs, else cosine",
    )
    groups: int | None = option(
        "Number of groups of hashtag methods.", min=1, show_default="adapted to the examples"
    )
    prompt: str = option(
        "paper (Visual RAG, appendix A), interleaved (turns), reasoned (turns that ask"
        " for reasons before the answer), or auto (by model; reasoned for rcts).",
        "auto",
        metavar="NAME",
    )
    order: str | None = option(
        ORDER_HELP,
        metavar="NAME",
        show_default="that of bottega tune; nearest-first for the benchmarks of RCTS, unless"
        " --answers-from is given; else nearest-last",
    )
    seed: int = field(default=0, metadata=SEED)
    samples: int | None = option(
        "Samples that majority and best-of-n choose from.",
        min=2,
        show_default=f"{SAMPLES}; with rcts the maximum calls of its search",
    )
    search: SearchConfig = field(default_factory=SearchConfig)
    rationales: bool | None = option(
        "Show rationales in demonstrations, where examples have them.",
        flags=("--rationales/--no-rationales",),
        show_default="as in RCTS: only with rcts and methods of equal cost if the benchmark"
        " has a prompt with rationales, otherwise with all methods",
    )
    rationales_from: StoreLocation | None = option(
        "Show the rationales that `bottega rationales` wrote into this knowledge base.",
        **KNOWLEDGE_BASE,
    )
    answers_from: StoreLocation | None = option(
        "Show a master's answers from this file of `bottega answer` in demonstrations, "
        "instead of the gold answers.",
        **KNOWLEDGE_BASE,
    )
    synonyms: Path | None = field(default=None, metadata=SYNONYMS)
    compressor: Path | None = option(
        "Compressor of racc: a folder written by `bottega compress train`. The bundled "
        "apprentice has its own.",
        metavar="FOLDER",
    )
    hyper: str | None = option(
        "Hyper model, which compresses the passages, if it is not --model: "
        "bundled:master, a folder, or a Hugging Face id.",
        metavar="NAME",
    )
    store: Path | None = option(
        "Read compressed passages from this store, which `bottega compress build` wrote"
        " with --compressor. Default: compress on demand.",
        metavar="FOLDER",
    )
    max_tokens: int | None = option(
        "Maximum tokens of a reply.",
        min=1,
        show_default=f"{LABEL_TOKENS} for labels, else {ANSWER_TOKENS}",
    )
    reasoning_tokens: int | None = None
    stop: tuple[str, ...] = field(default=(), metadata=STOP)
    pipeline: str | None = option(
        "Your own retriever or pipeline, as method custom: FUNCTION gets the pipeline"
        " of visual-rag and the knowledge base, and returns a pipeline.",
        metavar="MODULE:FUNCTION",
    )
    round_size: int | None = option(
        "Evaluate in item order, in rounds of this size, for methods that learn from answers.",
        min=1,
    )
    concurrency: int = option("Maximum concurrent queries.", 32, min=1)

    def record(self, *, model: str, hyper: str | None, skipped: int) -> dict[str, object]:
        """Return the settings on which the answers depend: a run resumes if these are equal.

        `model` and `hyper` are the names of the loaded models, `skipped` the number of unreadable
        examples. Raises `LoadError` if a compressor or a store cannot be read.
        """
        return {
            "benchmark": self.benchmark,
            "passages": self.passages,
            "skipped": skipped,
            "model": model,
            "embedder": self.embed,
            "retrieve": self.retrieve,
            "label_noise": self.label_noise,
            "limit": self.limit,
            "kb_per_class": self.kb_per_class,
            "prompt": self.prompt,
            "order": self.order,
            "seed": self.seed,
            "samples": self.samples,
            **self.search.record(),
            "rationales": self.rationales,
            "compressor": None if self.compressor is None else str(self.compressor),
            "hyper": hyper,
            "store": None if self.store is None else str(self.store),
            **compressor_identity(self.compressor, self.store),
            "max_tokens": self.max_tokens,
            # Recorded only if set: reports list the recorded settings.
            **({"stop": list(self.stop)} if self.stop else {}),
            **({"kb_share": self.kb_share} if self.kb_share < 1 else {}),
            **({"rerank": self.rerank} if self.rerank != "none" else {}),
            **({"embed_text": self.embed_text} if self.embed_text else {}),
            **({"metric": self.metric} if self.metric not in (None, "cosine") else {}),
            **({"groups": self.groups} if self.groups else {}),
            **({"answers_from": str(self.answers_from)} if self.answers_from else {}),
            **({"synonyms": self.synonyms.read_text("utf-8")} if self.synonyms else {}),
            **({"pipeline": source_digest(self.pipeline)} if self.pipeline else {}),
            "round_size": self.round_size,
        }


def compressor_identity(compressor: Path | None, store: Path | None) -> dict[str, object]:
    """Return a digest of the compressor and the store's manifest: paths may be reused.

    A compressor's settings name the weights of both models, so its digest covers them too.
    """
    identity: dict[str, object] = {}
    try:
        if compressor is not None:
            identity["compressor_digest"] = _digest(compressor.expanduser())
        if store is not None:
            manifest = store.expanduser() / STORE
            identity["store_manifest"] = manifest.read_text("utf-8", errors="replace")
    except OSError as error:
        raise LoadError(
            f"{error.filename} cannot be read: {error.strerror}", hint="check its permissions"
        ) from error
    return identity


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in COMPRESSOR:
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]

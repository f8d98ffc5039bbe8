"""Options of `bottega eval`, and their panels on its help screen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option
from typer.core import TyperOption

from bottega._util.locations import StoreLocation
from bottega.cli.help import HelpCommand
from bottega.cli.method_actor import ANSWER_TOKENS
from bottega.cli.options import ORDER_HELP, knowledge_option
from bottega.evaluation.config import Relevance
from bottega.evaluation.methods.searchers import SAMPLES
from bottega.evaluation.methods.specifications import LABEL_METHODS, METHODS
from bottega.evaluation.search_config import Preset, RewardName, SearchConfig
from bottega.recipes.visual_rag import LABEL_TOKENS
from bottega.reranking import RewardVariant
from bottega.types import IMAGE_QUESTION

SHOTS, SEARCH_SHOTS = "5,10,20", "3"
PAPER = SearchConfig()

QuestionOption = Annotated[
    str | None,
    Option(
        help="Set the question about each image of image-folder:DIR or manyicl:DIR.",
        show_default=IMAGE_QUESTION,
    ),
]
MethodsOption = Annotated[
    str | None,
    Option(
        metavar="LIST",
        help=f"Methods, comma-separated: {', '.join(METHODS)}.",
        show_default=f"{', '.join(LABEL_METHODS)}; for facts zero-shot, random, oracle",
    ),
]
ShotsOption = Annotated[
    str | None,
    Option(
        metavar="LIST",
        help="Numbers of demonstrations, comma-separated.",
        show_default=f"{SHOTS}, or {SEARCH_SHOTS} with rcts or its controls; for a knowledge base, "
        "that of bottega tune",
    ),
]
KnowledgePerClassOption = Annotated[
    int | None, Option(min=1, help="Maximum examples per label in the knowledge base.")
]
KnowledgeShareOption = Annotated[
    float,
    Option(
        min=0.001,
        max=1,
        help="Keep this random share of the knowledge base's examples.",
    ),
]
EmbedOption = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Embedder: photos, bundled, pixels, photos+pixels:WEIGHT, or a "
        "sentence-transformers id or folder; with --retrieve text: words, minilm, or "
        "FOLDER:text; with --retrieve hybrid: bundled, or flmr: and a PreFLMR id or folder, "
        "with the options query_tokens=, choices= and instruction=.",
        show_default="photos for photographs if its extra is installed, else bundled",
    ),
]
RetrieveOption = Annotated[
    str,
    Option(
        metavar="NAME",
        help="Retrieval method: image (by --embed), text (by --embed-text), dual (by both), "
        "crossed (compares images with image and keywords of the model's draft), probe "
        "(compares images and keywords of responses with the same), keywords (dual, with the "
        "keywords of the question), hashtag (dual, within groups of questions), "
        "keyword-hashtag (probe, within groups of responses), bm25 (words), or hybrid (late "
        "interaction of image and words, with the bundled model or --embed flmr:FOLDER).",
    ),
]
EmbedTextOption = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Text embedder of dual and similar methods: words, minilm or FOLDER:text.",
        show_default="words; the text part of --embed if that is FOLDER:average",
    ),
]
MetricOption = Annotated[
    Literal["cosine", "l2"],
    Option(
        metavar="cosine|l2", help="Distance between vectors; l2 changes the results of raw-average."
    ),
]
GroupsOption = Annotated[
    int | None,
    Option(
        min=1,
        help="Number of groups of hashtag methods.",
        show_default="adapted to the examples",
    ),
]
LabelNoiseOption = Annotated[
    float, Option(min=0, max=1, help="Fraction of knowledge-base answers to corrupt.")
]
OrderOption = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help=ORDER_HELP,
        show_default="that of bottega tune; nearest-first for the benchmarks of RCTS, unless "
        "--answers-from is given; else nearest-last",
    ),
]
PipelineOption = Annotated[
    str | None,
    Option(
        metavar="MODULE:FUNCTION",
        help="Your own retriever or pipeline, as method custom: FUNCTION gets the pipeline of "
        "visual-rag and the knowledge base, and returns a pipeline.",
    ),
]
RerankOption = Annotated[
    Literal["none", "cover", "mmr"],
    Option(
        metavar="none|cover|mmr",
        help="Choice among four times as many retrieved examples: cover (as many labels as "
        "possible, for images with several labels) or mmr (similar to the item and different "
        "from each other).",
    ),
]
SamplesOption = Annotated[
    int | None,
    Option(
        min=2,
        help="Samples that majority and best-of-n choose from.",
        show_default=f"{SAMPLES}; with rcts the maximum calls of its search",
    ),
]
PresetOption = Annotated[
    Preset,
    Option(
        metavar="paper|released",
        help="Settings of rcts and its controls: those of the paper, or of the authors' code for "
        "this benchmark. The options below override them.",
    ),
]
RolloutsOption = Annotated[
    int | None,
    Option(
        min=1,
        help="Branches that a search answers and scores.",
        show_default=str(PAPER.rollouts),
    ),
]
RewardOption = Annotated[
    RewardName | None,
    Option(
        metavar="NAME",
        help="Reward of an answer: self (self-consistency, eq. 7), mutual (accuracy on retrieved "
        "examples, eq. 8), both (eq. 9) or ensemble (share of other samples with the same answer).",
        show_default="both; ensemble for models that give no rationales",
    ),
]
AlphaOption = Annotated[
    float | None,
    Option(
        min=0,
        max=1,
        help="Weight of the self-consistency reward in the reward (eq. 9).",
        show_default=f"{PAPER.alpha}; 0.5 on mmmu with --preset released",
    ),
]
FetchOption = Annotated[
    int | None,
    Option(
        min=1,
        help="Number of retrieved examples from which a search selects.",
        show_default=str(PAPER.fetch),
    ),
]
ChildrenOption = Annotated[
    int | None,
    Option(
        min=1,
        help="Maximum children of a node of the tree.",
        show_default=str(PAPER.children),
    ),
]
ExplorationOption = Annotated[
    float | None,
    Option(
        min=0,
        help="Exploration constant of the tree search (c in eq. 11).",
        show_default=str(PAPER.exploration),
    ),
]
VariantOption = Annotated[
    RewardVariant | None,
    Option(
        metavar="paper|released",
        help="Follow the paper or the authors' code where their formulas differ.",
        show_default="as --preset",
    ),
]
EarlyStopOption = Annotated[
    bool,
    Option(
        "--early-stop/--no-early-stop",
        help="End the search of rcts when its first three answers agree.",
    ),
]
RationalesOption = Annotated[
    bool | None,
    Option(
        "--rationales/--no-rationales",
        help="Show rationales in demonstrations, where examples have them.",
        show_default="as in RCTS: only with rcts and methods of equal cost if the benchmark has a "
        "prompt with rationales, otherwise with all methods",
    ),
]
RationalesFromOption = Annotated[
    StoreLocation | None,
    knowledge_option(
        "Show the rationales that `bottega rationales` wrote into this knowledge base."
    ),
]
AnswersFromOption = Annotated[
    StoreLocation | None,
    knowledge_option(
        "Show a master's answers from this file of `bottega answer` in demonstrations, "
        "instead of the gold answers.",
    ),
]
HyperOption = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Hyper model, which compresses the passages, if it is not --model: "
        "bundled:master, a folder, or a Hugging Face id.",
    ),
]
StoreOption = Annotated[
    Path | None,
    Option(
        metavar="FOLDER",
        help="Read compressed passages from this store, which `bottega compress build` wrote with "
        "--compressor. Default: compress on demand.",
    ),
]
MaxTokensOption = Annotated[
    int | None,
    Option(
        min=1,
        help="Maximum tokens of a reply.",
        show_default=f"{LABEL_TOKENS} for labels, else {ANSWER_TOKENS}",
    ),
]
ConcurrencyOption = Annotated[int, Option(min=1, help="Maximum concurrent queries.")]
RoundSizeOption = Annotated[
    int | None,
    Option(
        min=1,
        help="Evaluate in item order, in rounds of this size, for methods that learn from answers.",
    ),
]
AllowOverlapOption = Annotated[
    bool, Option("--allow-overlap", help="Allow test images in the knowledge base.")
]
PassagesOption = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Add passages to the knowledge base: the Google Search corpus of OK-VQA, or "
        "WIT, as a file, a folder or a Hugging Face id.",
    ),
]
RelevanceOption = Annotated[
    Relevance | None,
    Option(
        metavar="NAME",
        help="Rule for the relevant passages that racc-swapped excludes: contains (an answer "
        "anywhere in the text), stems (the same, with more letters after each word of the answer) "
        "or words (whole words).",
        show_default="stems for okvqa, else contains",
    ),
]
UnparsableOption = Annotated[
    str,
    Option(
        metavar="NAME",
        help="Score unparsable multiple-choice replies of mmmu as none (wrong) or random (a "
        "random choice, as in MMMU's own code).",
    ),
]
OutOption = Annotated[
    Path | None,
    Option(
        metavar="FOLDER",
        help="Store every answer in this folder. The same command resumes the run and "
        "retries failed items; `bottega report` reads it.",
    ),
]

# The parameters of each panel, by name.
PANELS = {
    "Benchmark": (
        *("question", "limit", "kb_per_class", "kb_share", "label_noise"),
        *("passages", "relevance"),
        *("allow_overlap", "synonyms", "unparsable", "seed"),
    ),
    "Methods": (
        *("methods", "pipeline", "shots", "samples", "round_size"),
        *("compressor", "hyper", "store"),
    ),
    "Tree search (rcts) and its controls": (
        *("preset", "rollouts", "reward", "alpha", "fetch"),
        *("children", "exploration", "variant", "early_stop"),
    ),
    "Model": ("model", "trust_remote_code", "max_tokens", "stop", "price", "budget"),
    "Retrieval": ("embed", "retrieve", "embed_text", "metric", "groups", "rerank"),
    "Prompt": ("prompt", "order", "rationales", "rationales_from", "answers_from"),
    "Run and results": ("out", "json", "traces", "concurrency", "on", "workers", "dry_run"),
}


class EvalCommand(HelpCommand):
    """Command whose help screen shows the options in panels."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        panel_of = {name: panel for panel, names in PANELS.items() for name in names}
        names = ["benchmark", *panel_of]
        self.params.sort(key=lambda one: names.index(one.name or ""))
        for option in self.params:
            if isinstance(option, TyperOption):
                option.rich_help_panel = panel_of[option.name or ""]

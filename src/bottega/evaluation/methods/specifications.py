"""The table of evaluation methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import CUSTOM
from bottega.evaluation.methods.controls import Swap, swap_image, swap_question
from bottega.evaluation.methods.searchers import (
    PipelineBuilder,
    compressed,
    custom,
    equal_scores,
    flat_search,
    gold_scores,
    joint_choice,
    key_value_reuse,
    other_passages,
    sampling_choice,
    tree_search,
)
from bottega.evaluation.methods.votes import Vote, knn, nearest_label, strict_vote, vote
from bottega.parsing import most_confident, most_frequent

# How demonstrations are found. "passages": those that the benchmark scores; else the gold passage
# and others with late-interaction scores, where items name theirs; else by a search. "vectors": a
# classifier uses all labelled vectors and shows no example.
Retrieval = Literal[
    "none", "search", "uniform", "balanced", "everything", "oracle", "passages", "vectors"
]
# Each comparison of methods begins with the differences to this one.
REFERENCE = "knn"
LOGREG = "logreg"
BASELINES = (
    *(REFERENCE, LOGREG, "vote", "vote-strict", "nearest"),
    *("top-k", "random", "zero-shot"),
)
EQUAL_COST = ("majority", "best-of-n", "rcts-flat", "rcts-random", "rcts-best-of-n")
RACC_BASELINES = ("concat", "racc-flat", "racc-swapped", "zero-shot")
PAPER_METHODS = ("zero-shot", "random", "balanced", "visual-rag", "vote")
LABEL_METHODS = (*PAPER_METHODS, "nearest", "knn", LOGREG)
PASSAGE_METHODS = ("zero-shot", "random", "oracle")
CHOICE_METHODS = ("zero-shot", "random", "top-k")
NEEDS_GOLD_PASSAGES = ("oracle", "racc-oracle")
SAMPLING_METHODS = ("majority", "best-of-n")
SEARCH_METHODS = ("rcts", "rcts-flat", "rcts-random", "rcts-best-of-n")


@dataclass(frozen=True)
class MethodSpec:
    """Definition of an evaluation method: its needs, its construction and its baselines.

    `name` stands in `--methods`; `retrieval` says how its examples are found. A method answers by a
    `vote`, by a classifier (with `retrieval` "vectors"), or by the pipeline of Visual RAG, of which
    `build` replaces parts and `swap` the image or the question. `shots` is the only number of shots
    of a method that has just one. Methods that `match_search_cost` may spend as much as RCTS's tree
    search, so they see its rationales. `baselines` are the methods that it is compared with, `note`
    explains it under the results.
    """

    name: str
    retrieval: Retrieval = "search"
    vote: Vote | None = None
    build: PipelineBuilder | None = None
    swap: Callable[..., Swap] | None = None
    shots: int | None = None
    baselines: tuple[str, ...] = ()
    match_search_cost: bool = False
    compresses: bool = False
    note: str = ""

    @property
    def needs_labels(self) -> bool:
        """Whether examples must have labels to count."""
        return not self.uses_model or self.retrieval == "balanced"

    @property
    def uses_model(self) -> bool:
        """Whether a model answers."""
        return self.vote is None and self.retrieval != "vectors"

    @property
    def reads_passages(self) -> bool:
        """Whether the knowledge base must contain nothing but passages."""
        return self.retrieval == "passages"

    @property
    def shows_demonstrations(self) -> bool:
        """Whether a model sees demonstrations."""
        return self.uses_model and self.retrieval != "none"

    def searches(self, data: Benchmark, *, names_passages: bool) -> bool:
        """Return whether the method searches the knowledge base."""
        return self.retrieval in ("search", "vectors") or (
            self.reads_passages and not names_passages
        )


_SPECS = (
    MethodSpec("zero-shot", "none", shots=0),
    MethodSpec("random", "uniform"),
    MethodSpec("balanced", "balanced"),
    MethodSpec("visual-rag", baselines=BASELINES),
    MethodSpec(
        "vote",
        vote=vote,
        note="vote is the majority label of the nearest examples, without a model; ties go to the"
        " nearer examples.",
    ),
    MethodSpec("vote-strict", vote=strict_vote, note="vote-strict counts a tie as wrong."),
    MethodSpec(
        "nearest",
        vote=nearest_label,
        shots=1,
        note="nearest is the label of the most similar example.",
    ),
    MethodSpec("knn", vote=knn, note="knn is a vote weighted by similarity."),
    MethodSpec(
        LOGREG,
        "vectors",
        shots=0,
        baselines=(REFERENCE,),
        note="logreg is a logistic regression on the vectors of all labelled examples.",
    ),
    MethodSpec("top-k", baselines=BASELINES),
    MethodSpec(
        "majority",
        build=sampling_choice(most_frequent),
        baselines=BASELINES,
        match_search_cost=True,
    ),
    MethodSpec(
        "best-of-n",
        build=sampling_choice(most_confident),
        baselines=BASELINES,
        match_search_cost=True,
    ),
    MethodSpec(
        "rcts",
        build=tree_search,
        baselines=(*BASELINES, *EQUAL_COST),
        match_search_cost=True,
    ),
    MethodSpec(
        "rcts-flat",
        build=flat_search("similar"),
        baselines=(*BASELINES, "rcts-random"),
        match_search_cost=True,
    ),
    MethodSpec(
        "rcts-random", build=flat_search("random"), baselines=BASELINES, match_search_cost=True
    ),
    MethodSpec(
        "rcts-best-of-n", build=flat_search("nearest"), baselines=BASELINES, match_search_cost=True
    ),
    MethodSpec("in-context", "everything"),
    MethodSpec("oracle", "oracle"),
    MethodSpec("concat", "passages"),
    MethodSpec("candidates", "passages", build=joint_choice),
    MethodSpec("kv-reuse", "passages", build=key_value_reuse),
    MethodSpec("racc", "passages", build=compressed(), baselines=RACC_BASELINES, compresses=True),
    MethodSpec("racc-oracle", "passages", build=compressed(gold_scores), compresses=True),
    MethodSpec("racc-flat", "passages", build=compressed(equal_scores), compresses=True),
    MethodSpec("racc-swapped", "passages", build=compressed(other_passages), compresses=True),
    MethodSpec("swap-image", swap=swap_image),
    MethodSpec("swap-question", swap=swap_question),
    MethodSpec(
        CUSTOM,
        build=custom,
        baselines=BASELINES,
        note="custom is what the function of --pipeline makes of visual-rag.",
    ),
)
METHODS = {spec.name: spec for spec in _SPECS}

COMPRESSION_METHODS = tuple(spec.name for spec in _SPECS if spec.compresses)

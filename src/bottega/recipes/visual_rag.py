"""Recipe of Visual RAG."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TypeAlias, get_args

import numpy as np

from bottega.bundled import PHOTO_OPENING
from bottega.errors import EmptyKnowledgeBaseError, SettingError, check_count, check_fraction
from bottega.generation.bundled_models import PhotoGenerator, answer_text
from bottega.image import Image
from bottega.knowledge import JoinedEmbedder, KnowledgeBase
from bottega.knowledge.embedders.composite import photo_embedder_of, uncached
from bottega.knowledge.embedders.photo_embedder import match_vectors
from bottega.knowledge.fitted_search import FittedSearch
from bottega.knowledge.fitted_vote import FITTED_SCALE, sharpened
from bottega.knowledge.metric import MEAN_COUNT
from bottega.parsing import LabelParser
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import AppendixAPrompter, InterleavedPrompter
from bottega.protocols import (
    Candidates,
    Generator,
    Pricer,
    Prompter,
    Recorder,
    Reranker,
    Retriever,
    Tier,
    Vectors,
    turns_only,
)
from bottega.reranking import DemonstrationOrder, GatedReranker, TopKReranker
from bottega.retrieval import DenseRetriever
from bottega.routing.novelty_gate import AVERAGED, FALSE_UNKNOWN, NoveltyGate
from bottega.types import Candidate, Prompt, Query, Sampling

VectorSource: TypeAlias = Callable[[Collection[str]], dict[str, Vectors]]

LABEL_TOKENS = 64
# Nats that the photograph model adds to the score of an image per unit of its feature at
# `PHOTO_OPENING`. The model was built with this flag to lower the score of the tokens before the
# first image; a small negative value raises the score of a class mean.
NATS_PER_FLAG = -50.7
FETCH_FACTOR = 4


@dataclass(frozen=True)
class Classifier:
    """Settings that classification pipelines share; only the retriever and the shots differ.

    `generator` names one of `labels`, or several with `multi_label`. `order` arranges the
    demonstrations, `sampling` limits the reply, `seed` seeds random choices. `record` and `price`
    are passed to `Pipeline`. `prompt` defaults to `default_prompter`. Decoding is greedy.
    `guard` wraps the re-ranker, to withhold demonstrations (`demonstration_guard`).
    `rerank` replaces the selection of the nearest candidates; it gets `FETCH_FACTOR` times as many.
    """

    generator: Generator
    labels: Sequence[str]
    prompt: Prompter | None = None
    multi_label: bool = False
    order: DemonstrationOrder = "nearest-last"
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=LABEL_TOKENS))
    record: Recorder | None = None
    price: Pricer | None = None
    seed: int = 0
    guard: Callable[[Reranker], Reranker] | None = None
    rerank: Reranker | None = None

    def pipeline(self, retrieve: Retriever | None = None, shots: int = 0) -> Pipeline:
        """Return a pipeline with these settings."""
        rerank: Reranker = self.rerank or TopKReranker(self.order, seed=self.seed)
        if self.guard is not None:
            rerank = self.guard(rerank)
        return Pipeline(
            route=FixedRouter(Tier(self.generator.name, self.generator, shots)),
            retrieve=retrieve,
            rerank=rerank,
            prompt=self.prompt or default_prompter(self.generator),
            parse=LabelParser(multi_label=self.multi_label),
            record=self.record,
            price=self.price,
            sampling=self.sampling,
            choices=tuple(self.labels),
            fetch=FETCH_FACTOR * shots if self.rerank and shots else None,
        )


@dataclass(frozen=True)
class FittedReranker:
    """Re-ranker for the photograph model over a knowledge base with a fitted metric.

    It puts the class means before the demonstrations that `rerank` selects; `share_features` lets
    the model read them. For a query whose nearest examples by the plain cosine are too far for the
    `gate`, it returns nothing. The gate uses the plain cosine because the fitted metric enlarges
    differences between the classes of the knowledge base, and shows less well whether a query
    belongs to none of them.
    """

    rerank: Reranker
    knowledge: KnowledgeBase
    gate: NoveltyGate
    shows_means: bool = True

    async def __call__(self, query: Query, candidates: Candidates, k: int, /) -> list[Candidate]:
        nearest = partial(self.knowledge.search, query, AVERAGED, plain=True)
        if not self.gate.shows(await asyncio.to_thread(nearest)):
            return []
        chosen = await self.rerank(query, candidates, k)
        if not self.shows_means:
            return chosen
        return [*await asyncio.to_thread(self.knowledge.class_means, query), *chosen]


def share_features(generator: Generator, knowledge: KnowledgeBase) -> bool:
    """Let the photograph model reuse image vectors of the knowledge base and its embedder.

    With a fitted metric, the model reads vectors under that metric, also of images that are not
    stored; any embedder will do. Without one, it reads the part of the vectors that its own network
    computes. Returns False, and changes nothing, if the generator is not a photograph model or can
    read no part of the vectors.
    """
    if not isinstance(generator, PhotoGenerator):
        return False
    if knowledge.fitted is not None:
        # The pipeline references both. A reference of the model would keep closed bases in memory.
        search, base = weakref.proxy(knowledge.fitted), weakref.proxy(knowledge)

        def prepare(images: Sequence[Image]) -> None:
            search.keep(images, base.embed([Query("", (image,)) for image in images]))

        generator.set_feature_sources(
            partial(_fitted_features, search),
            prepare=prepare,
            shares=partial(_vote_shares, search),
        )
        return True
    photos, name = photo_embedder_of(knowledge.embedder()), generator.name.removeprefix("bundled:")
    if photos is None or name not in photos.parts:
        return False

    def source(vectors: VectorSource) -> VectorSource:
        return lambda sha256s: {
            sha256: match_vectors(name, photos.features(row, name))
            for sha256, row in vectors(sha256s).items()
        }

    stored = partial(_photo_vectors, knowledge)
    generator.set_feature_sources(source(photos.image_vectors), source(stored))
    return True


def _fitted_features(search: FittedSearch, sha256s: Collection[str]) -> dict[str, Vectors]:
    """Return the features of images and class means for the photograph model, by the sha256 of
    their image: the vector under the fitted metric and, for a mean, the flag with which it counts
    as `MEAN_COUNT` demonstrations."""
    images, means = search.image_rows(sha256s)
    flag = math.log(MEAN_COUNT) / NATS_PER_FLAG
    features = {name: _feature(row, 0.0) for name, row in images.items()}
    return features | {name: _feature(row, flag) for name, row in means.items()}


def _vote_shares(search: FittedSearch, prompt: Prompt) -> dict[str, float]:
    """Return the calibrated shares of the demonstrated answers in the vote for the last image."""
    shown = [
        (images[-1].sha256, answer)
        for question, reply in pairwise(prompt.messages)
        if (images := Prompt((question,)).images) and (answer := answer_text(reply))
    ]
    query = prompt.images[-1].sha256 if prompt.images else ""
    rows, means = search.image_rows({query, *(sha256 for sha256, _ in shown)})
    weights: defaultdict[str, float] = defaultdict(float)
    for sha256, answer in shown:
        count, row = (MEAN_COUNT, means[sha256]) if sha256 in means else (1, rows.get(sha256))
        if row is not None and query in rows:
            weights[answer] += count * math.exp(FITTED_SCALE * (float(row @ rows[query]) - 1))
    if not weights:
        return {}
    votes = np.array([list(weights.values())])
    shares = sharpened(votes / votes.sum(), search.exponent)[0].tolist()
    return dict(zip(weights, shares, strict=True))


def _feature(row: Vectors, flag: float) -> Vectors:
    feature = np.zeros(PHOTO_OPENING + 1, np.float32)
    feature[: len(row)], feature[PHOTO_OPENING] = row, flag
    return feature


def _photo_vectors(knowledge: KnowledgeBase, sha256s: Collection[str]) -> dict[str, Vectors]:
    """Return the stored vectors of photographs, without the pixels' part, by the sha256 of the
    image."""
    found = knowledge.image_vectors(sha256s)
    embedder = uncached(knowledge.embedder())
    if isinstance(embedder, JoinedEmbedder):
        return {sha256: embedder.first_part(row) for sha256, row in found.items()}
    return found


def novelty_gate(
    generator: Generator, knowledge: KnowledgeBase, *, false_unknown: float = FALSE_UNKNOWN
) -> NoveltyGate | None:
    """Return the gate for a photograph model over a knowledge base whose vectors it can read
    (`share_features`), else None. It rejects by mistake about the share `false_unknown` of the
    photographs that are like the examples. Blocks for about a second at 100,000 examples."""
    check_fraction("false_unknown", false_unknown)
    if not share_features(generator, knowledge):
        return None
    count = min(AVERAGED, max(1, len(knowledge) - 1))
    return NoveltyGate(knowledge.leave_one_out_scores(count), false_unknown)


def demonstration_guard(
    generator: Generator,
    knowledge: KnowledgeBase,
    *,
    multi_label: bool = False,
    false_unknown: float = FALSE_UNKNOWN,
) -> Callable[[Reranker], Reranker] | None:
    """Return the wrapper for the re-ranker of a photograph model over a knowledge base whose
    vectors it can read: `FittedReranker` with a fitted metric, else `GatedReranker`. Return None
    for other generators and knowledge bases."""
    gate = novelty_gate(generator, knowledge, false_unknown=false_unknown)
    if gate is None:
        return None
    if knowledge.fitted is None:
        return partial(GatedReranker, shows=gate.shows)
    return partial(FittedReranker, knowledge=knowledge, gate=gate, shows_means=not multi_label)


def _search_as_built(
    knowledge: KnowledgeBase, fitted: FittedSearch | None, query: Query, k: int
) -> list[Candidate]:
    """Search under the metric that the photograph model reads. Raises `SettingError` if another one
    was fitted since."""
    if knowledge.fitted is not fitted:
        raise SettingError(
            "the metric of the knowledge base has changed since the pipeline was built",
            hint="build it again: visual_rag(knowledge, generator)",
        )
    return knowledge.search(query, k)


def default_prompter(generator: Generator) -> Prompter:
    """Return brief turns for a generator with `turns_only`, else the paper's appendix A."""
    if turns_only(generator):
        return InterleavedPrompter(
            show_choices=False, repeat_question=False, show_own_choices=False
        )
    return AppendixAPrompter()


def visual_rag(
    knowledge: KnowledgeBase,
    generator: Generator,
    *,
    labels: Sequence[str] | None = None,
    shots: int = 10,
    prompt: Prompter | None = None,
    order: DemonstrationOrder = "nearest-last",
    multi_label: bool = False,
    retrieve: Retriever | None = None,
    sampling: Sampling | None = None,
    record: Recorder | None = None,
    price: Pricer | None = None,
    false_unknown: float = FALSE_UNKNOWN,
) -> Pipeline:
    """Return a pipeline that classifies images with the `shots` nearest labelled images as
    demonstrations.

    Visual RAG (Bonomo and Bianco). The paper's k is 5, 10, 50 or 100, without class balancing. The
    paper does not specify the order of demonstrations; the default is nearest last.

    `labels` defaults to `knowledge.labels()`, read once, when this function is called: build the
    pipeline again after adding examples of a new class. An empty `labels` allows any answer.
    `prompt` defaults to the paper's appendix A, or to brief turns for a generator that needs them,
    such as the bundled one. The photograph model abstains if no example is similar enough
    (`NoveltyGate`): by mistake for about the share `false_unknown` of the photographs that are like
    the examples. `retrieve` defaults to the search of `knowledge`. `sampling` defaults to greedy
    replies of at most 64 tokens. A photograph model reads the vectors of `knowledge`
    (`share_features`). After `fit_metric`, its pipeline raises `SettingError`: build it again.

    Raises `SettingError`, and `EmptyKnowledgeBaseError` if `labels` is None and the knowledge base
    has none.
    """
    if not isinstance(knowledge, KnowledgeBase):
        raise SettingError(
            f"knowledge must be a KnowledgeBase, got {knowledge!r:.80}",
            hint="open it with KnowledgeBase.open(path, embed)",
        )
    if not hasattr(generator, "generate"):
        raise SettingError(
            f"generator must be a Generator, got {generator!r:.80}",
            hint="pass bundled(), OpenAIGenerator(name) or TransformersGenerator(name)",
        )
    if order not in get_args(DemonstrationOrder):
        raise SettingError(
            f"order is unknown, got {order!r}",
            hint=f"use {', '.join(get_args(DemonstrationOrder))}",
        )
    check_count("shots", shots)
    if isinstance(generator, PhotoGenerator):
        generator = generator.reader_for(knowledge.fitted)
        retrieve = retrieve or DenseRetriever(
            partial(_search_as_built, knowledge, knowledge.fitted)
        )
    if labels is None and not (labels := knowledge.labels()):
        raise EmptyKnowledgeBaseError(
            "the knowledge base has no labels: it is empty",
            hint="add labelled examples first (knowledge.add, `bottega add`), or pass labels=",
        )
    method = Classifier(
        generator,
        labels,
        prompt,
        multi_label=multi_label,
        order=order,
        sampling=sampling or Sampling(max_tokens=LABEL_TOKENS),
        record=record,
        price=price,
        guard=demonstration_guard(
            generator, knowledge, multi_label=multi_label, false_unknown=false_unknown
        ),
    )
    return method.pipeline(retrieve or DenseRetriever(knowledge.search), shots)

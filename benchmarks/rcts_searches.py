"""Parts of the RCTS experiments: a task with its knowledge base, and its methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.rcts_plan import SEARCHES, Kind, MethodConfig, Setting
from bottega import (
    Answer,
    Candidate,
    Example,
    KnowledgeBase,
    Pipeline,
    Query,
    ReplayGenerator,
    Sampling,
    bundled,
)
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import plan
from bottega.evaluation.methods.retrieval import nearest_retriever, open_retrieval
from bottega.evaluation.outcomes import Method, Outcome
from bottega.naming import SIMULATED, open_model
from bottega.prompting import ContinuationPrompter
from bottega.protocols import Generator, Searcher
from bottega.recipes import Classifier
from bottega.reranking import (
    BudgetedGenerator,
    EnsembleReward,
    FlatSearch,
    MutualReward,
    RewardFunction,
    RewardValue,
    RewardVariant,
    SelfConsistencyReward,
    TreeSearch,
    WeightedReward,
)
from bottega.reranking.flat_search import Sequences

ANSWERS = Sampling(max_tokens=64)
FETCH = 20
DRAWS = 15
SEQUENCES: dict[Kind, Sequences] = {
    "rcts-random": "random",
    "rcts-flat": "similar",
    "rcts-best-of-n": "nearest",
}
# As `bottega eval` samples what it chooses from.
TEMPERATURE = 0.7


class _Brief(ReplayGenerator):
    """Generator that accepts only turns, as the bundled models do."""

    turns_only = True


def model_of(setting: Setting, replies: Path | None) -> Generator:
    """Return the model of a setting. The apprentice's replies are stored by request content, so
    methods share identical requests and a second run sends none.
    """
    if setting.simulated:
        return open_model(SIMULATED)
    model = bundled("apprentice", max_batch=64)
    return model if replies is None else _Brief(replies, model)


class TaskSetup:
    """One sample of a task, and its methods."""

    def __init__(self, setting: Setting, seed: int, model: Generator) -> None:
        self.setting = setting
        self.seed = seed
        self.data = setting.load(seed)
        self._model = model
        self._embed = open_retrieval(setting.retrieve, setting.embed).embedder
        self._knowledge = self._opened(lambda one: one)
        self._bare = self._opened(lambda one: replace(one, rationale=None))
        self._right = {_query_key(item.query): item.answer for item in self.data.items}

    def close(self) -> None:
        self._knowledge.close()
        self._bare.close()

    def method(self, config: MethodConfig) -> Method:
        candidates = self._knowledge if config.rationales else self._bare
        settings = Classifier(self._model, self.data.labels, sampling=ANSWERS, seed=self.seed)
        if config.kind not in SEARCHES:
            [method] = plan(
                RunConfig(
                    methods=[config.kind],
                    shots=[config.shots],
                    seed=self.seed,
                    samples=config.samples,
                ),
                self.data,
                candidates,
                settings,
            )
            return method
        pipeline = settings.pipeline(nearest_retriever(self.data, candidates), config.shots)
        pipeline = replace(pipeline, parse=self.data.parse, fetch=FETCH)
        pipeline = replace(pipeline, search=self._search(config, pipeline))

        async def answer(query: Query) -> Outcome:
            trace = await pipeline.trace(query)
            return Outcome(trace.answer, trace)

        return Method(config.kind, config.shots, answer)

    def _search(self, config: MethodConfig, pipeline: Pipeline) -> Searcher:
        reward = self._reward(config, pipeline)
        if config.kind == "rcts":
            return TreeSearch(
                self._model,
                prompt=pipeline.prompt,
                parse=pipeline.parse,
                reward=reward,
                rollouts=config.rollouts,
                children=config.children,
                parallel=config.parallel,
                exploration=config.exploration,
                early_stop=config.early_stop,
                variant="released" if config.released else "paper",
                sampling=ANSWERS,
                seed=self.seed,
            )
        sampled = config.kind == "rcts-best-of-n"
        return FlatSearch(
            self._model,
            prompt=pipeline.prompt,
            parse=pipeline.parse,
            reward=reward,
            sequences=SEQUENCES[config.kind],
            branches=config.rollouts,
            sampling=replace(ANSWERS, temperature=TEMPERATURE if sampled else 0.0),
            seed=self.seed,
        )

    def _reward(self, config: MethodConfig, pipeline: Pipeline) -> RewardFunction:
        prompt, parse = pipeline.prompt, pipeline.parse
        if config.reward == "ensemble":
            return EnsembleReward(
                prompt, parse, shots=config.shots, n=DRAWS, sampling=ANSWERS, seed=self.seed
            )
        if config.reward == "oracle":
            return OracleReward(self._right)
        variant: RewardVariant = "released" if config.released else "paper"
        sampling = replace(ANSWERS, temperature=0.8)
        own = SelfConsistencyReward(
            ContinuationPrompter(prompt), parse, sampling=sampling, variant=variant
        )
        mutual = MutualReward(prompt, parse, sampling=sampling, variant=variant)
        parts: dict[str, RewardFunction] = {"self": own, "mutual": mutual}
        return parts.get(config.reward) or WeightedReward(own, mutual, config.alpha)

    def _opened(self, change: Callable[[Example], Example]) -> KnowledgeBase:
        candidates = KnowledgeBase.open(":memory:", self._embed)
        candidates.add(change(one) for one in self.data.knowledge)
        return candidates


class OracleReward:
    """Oracle reward from gold answers: the limit of a search with a perfect reward, not a
    method."""

    def __init__(self, right: Mapping[tuple[str, ...], str]) -> None:
        self._right = right

    async def __call__(
        self,
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        ask: BudgetedGenerator,
        /,
    ) -> RewardValue:
        hit = float(answer.valid and answer.text == self._right[_query_key(query)])
        return RewardValue(hit, {"oracle": hit})


def _query_key(query: Query) -> tuple[str, ...]:
    """Return the key of a query; digits have no ids."""
    return (query.text, *(image.sha256 for image in query.images))

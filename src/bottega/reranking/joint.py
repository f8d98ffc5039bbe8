"""Joint choice of candidate and answer by probability (RAVQA-v2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bottega.errors import SettingError
from bottega.protocols import Generator, Parser, Prompter
from bottega.reranking.search_budget import BudgetedGenerator, gather_all
from bottega.reranking.selection import check_depth, check_scores
from bottega.types import (
    Answer,
    Candidate,
    Completion,
    Prompt,
    Query,
    Reply,
    Sampling,
    SearchNode,
    SearchResult,
    SearchTree,
)

ROUNDING = 1e-3  # tolerated excess of a log probability over 0
RETRIEVED, ANSWERED = "log retrieval", "log answer"


@dataclass(frozen=True)
class CandidateAnswer:
    """Answer of the model with one candidate. All scores are log probabilities."""

    candidate: Candidate
    retrieved: float
    prompt: Prompt
    reply: Reply
    completion: Completion
    answer: Answer

    @property
    def answered(self) -> float:
        """Log probability of the answer, or nan."""
        logprob = self.completion.logprob
        return math.nan if logprob is None else logprob

    @property
    def is_complete(self) -> bool:
        return self.completion.finish_reason == "stop" and bool(self.completion.text.strip())

    @property
    def joint(self) -> float:
        return self.retrieved + self.answered


class JointChoiceSearch:
    """Searcher that answers with each of K candidates separately (RAVQA-v2, Lin et al. 2023, after
    RAG).

    It returns the answer with the highest log_softmax(retrieval score) + log probability, and of
    equals that of the nearest candidate. The K requests are concurrent.

    The softmax is over the K candidates. The paper's retriever was trained for it; scores of other
    retrievers are first divided by `temperature`. Cosines differ too little to matter at 1; sums
    over tokens (late interaction) differ by several nats.

    A reply that is empty, refused or truncated is used only if no reply is complete, because its
    probability omits the missing text.

    The tree of the trace holds each candidate with its answer and both log probabilities. Raises
    `SettingError` for scores that are not finite, and if the model returns no valid log
    probabilities. Answers without one, such as refusals, and answers with one above 0 are ignored.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        prompt: Prompter,
        parse: Parser,
        sampling: Sampling | None = None,
        temperature: float = 1.0,
    ) -> None:
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
            raise SettingError(
                f"temperature must be a number, got {temperature!r}",
                hint="set temperature to 1 for unscaled scores",
            )
        if not (math.isfinite(temperature) and temperature > 0):
            raise SettingError(
                f"temperature must be finite and above 0, got {temperature}",
                hint="set temperature to 1 for unscaled scores",
            )
        self._generator = generator
        self._prompt, self._parse = prompt, parse
        self._sampling = replace(sampling or Sampling(), n=1)
        self._temperature = temperature

    async def search(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> SearchResult:
        check_depth(k)
        shown = tuple(candidates[:k])
        if not shown:
            return await self._answer_without(query)
        weights = self._weights([one.score for one in shown])
        budgeted = BudgetedGenerator(self._generator)
        pairs = zip(shown, weights, strict=True)
        reads = await gather_all(self._read(query, *pair, budgeted) for pair in pairs)
        best = self._best(reads)
        tree = SearchTree(
            SearchNode(children=tuple(map(_node, reads)), visits=len(reads)),
            (best,),
            "exhausted",
            budgeted.requests,
            budgeted.calls,
            budgeted.usage,
        )
        chosen = reads[best]
        return SearchResult((chosen.candidate,), chosen.prompt, chosen.reply, chosen.answer, tree)

    def _weights(self, scores: Sequence[float]) -> list[float]:
        check_scores(scores)
        weights = log_softmax([score / self._temperature for score in scores])
        if not all(map(math.isfinite, weights)):
            raise SettingError(
                f"scores from {min(scores)} to {max(scores)} are too large for a temperature of"
                f" {self._temperature}",
                hint="set temperature to about the typical difference of the scores",
            )
        return weights

    async def _answer_without(self, query: Query) -> SearchResult:
        prompt = self._prompt(query, ())
        reply = await self._generator.generate(prompt, self._sampling)
        return SearchResult((), prompt, reply, self._parse(query, reply.completions[0]))

    async def _read(
        self, query: Query, candidate: Candidate, retrieved: float, budgeted: BudgetedGenerator
    ) -> CandidateAnswer:
        prompt = self._prompt(query, (candidate,))
        reply = await budgeted.generate(prompt, self._sampling)
        first = reply.completions[0]
        return CandidateAnswer(
            candidate, retrieved, prompt, reply, first, self._parse(query, first)
        )

    def _best(self, reads: Sequence[CandidateAnswer]) -> int:
        usable = [i for i, one in enumerate(reads) if -math.inf < one.answered <= ROUNDING]
        if not usable:
            given = [one.answered for one in reads if not math.isnan(one.answered)]
            raise SettingError(
                f"{self._generator.name} must return log probabilities, got"
                f" {given[0] if given else 'none'}",
                hint="request them with OpenAIGenerator(..., extra_body={'logprobs': True}), or"
                " use a model that returns them",
            )
        complete = [i for i in usable if reads[i].is_complete]
        return max(complete or usable, key=lambda i: reads[i].joint)


def log_softmax(scores: Sequence[float]) -> list[float]:
    """Return the log softmax of at least one score."""
    most = max(scores)
    total = most + math.log(sum(math.exp(score - most) for score in scores))
    return [score - total for score in scores]


def _node(read: CandidateAnswer) -> SearchNode:
    parts = {RETRIEVED: read.retrieved, ANSWERED: read.answered}
    return SearchNode(read.candidate, read.joint, 1, (), read.answer, parts)

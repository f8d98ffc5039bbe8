"""An answer from each candidate alone; the likeliest of candidate and answer together is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bottega.errors import SettingError
from bottega.protocols import Generator, Parser, Prompter
from bottega.reranking.search_budget import BudgetedGenerator, together
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

ROUNDING = 1e-3  # above zero, of a sum of log probabilities
RETRIEVED, SAID = "log retrieval", "log answer"


@dataclass(frozen=True)
class Read:
    """What was answered after one candidate. `joint` is a log probability."""

    candidate: Candidate
    retrieved: float
    prompt: Prompt
    reply: Reply
    completion: Completion
    answer: Answer

    @property
    def said(self) -> float:
        told = self.completion.logprob
        return math.nan if told is None else told

    @property
    def is_whole(self) -> bool:
        return self.completion.finish_reason == "stop" and bool(self.completion.text.strip())

    @property
    def joint(self) -> float:
        return self.retrieved + self.said


class JointChoiceSearch:
    """The K candidates of RAVQA-v2 (Lin et al. 2023, after RAG): each is shown alone, and of the
    answers the one is taken whose log_softmax(retrieval score) + log probability is greatest; the
    first, and so the nearest, of equals. A `Searcher`: K requests, all at once.

    The softmax is over the candidates that are shown, as in the paper, whose retriever was trained
    for it. Scores of others have other scales, and are divided by `temperature` before: cosines
    differ too little to weigh anything at 1, sums over tokens (late interaction) by several nats.

    A reply that is empty, refused or cut at its limit is taken where there is no whole one: of what
    was left unsaid no probability tells.

    The trace's tree holds every candidate with its answer and both log probabilities. Raises
    `SettingError` for scores that are not finite, and where the model gives no log probabilities;
    an answer that alone has none, such as a refusal, is not taken, nor one that claims more than
    certainty.
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
                f"the temperature of scores is {temperature!r}, and no number",
                hint="1 takes them as they are",
            )
        if not (math.isfinite(temperature) and temperature > 0):
            raise SettingError(
                f"the temperature of scores is {temperature}", hint="1 takes them as they are"
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
            return await self._alone(query)
        weights = self._weights([one.score for one in shown])
        ask = BudgetedGenerator(self._generator)
        pairs = zip(shown, weights, strict=True)
        reads = await together(self._read(query, *pair, ask) for pair in pairs)
        best = self._best(reads)
        tree = SearchTree(
            SearchNode(children=tuple(map(_node, reads)), visits=len(reads)),
            (best,),
            "exhausted",
            ask.requests,
            ask.calls,
            ask.usage,
        )
        chosen = reads[best]
        return SearchResult((chosen.candidate,), chosen.prompt, chosen.reply, chosen.answer, tree)

    def _weights(self, scores: Sequence[float]) -> list[float]:
        check_scores(scores)
        weights = log_softmax([score / self._temperature for score in scores])
        if not all(map(math.isfinite, weights)):
            raise SettingError(
                f"scores from {min(scores)} to {max(scores)} are too large to be compared at a"
                f" temperature of {self._temperature}",
                hint="set the temperature higher, about as large as their usual difference",
            )
        return weights

    async def _alone(self, query: Query) -> SearchResult:
        prompt = self._prompt(query, ())
        reply = await self._generator.generate(prompt, self._sampling)
        return SearchResult((), prompt, reply, self._parse(query, reply.completions[0]))

    async def _read(
        self, query: Query, candidate: Candidate, retrieved: float, ask: BudgetedGenerator
    ) -> Read:
        prompt = self._prompt(query, (candidate,))
        reply = await ask.ask(prompt, self._sampling)
        said = reply.completions[0]
        return Read(candidate, retrieved, prompt, reply, said, self._parse(query, said))

    def _best(self, reads: Sequence[Read]) -> int:
        known = [place for place, one in enumerate(reads) if -math.inf < one.said <= ROUNDING]
        if not known:
            given = [one.said for one in reads if not math.isnan(one.said)]
            told = (
                f"log probabilities that are none ({given[0]})" if given else "no log probabilities"
            )
            raise SettingError(
                f"{self._generator.name} gives {told}, by which answers from"
                " several candidates are compared",
                hint="ask an endpoint for them, OpenAIGenerator(..., extra_body={'logprobs':"
                " True}), or use a model that has them",
            )
        whole = [place for place in known if reads[place].is_whole]
        return max(whole or known, key=lambda place: reads[place].joint)


def log_softmax(scores: Sequence[float]) -> list[float]:
    most = max(scores)
    total = most + math.log(sum(math.exp(score - most) for score in scores))
    return [score - total for score in scores]


def _node(read: Read) -> SearchNode:
    parts = {RETRIEVED: read.retrieved, SAID: read.said}
    return SearchNode(read.candidate, read.joint, 1, (), read.answer, parts)

"""Recipe of RCTS, and its search for single requests with a budget of completions and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bottega.errors import BottegaError, GenerationError, SettingError
from bottega.knowledge import KnowledgeBase
from bottega.parsing import LabelParser, equal_answers
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import ConclusionPrompter, ContinuationPrompter, ReasoningPrompter
from bottega.protocols import (
    Candidates,
    Generator,
    Parser,
    Pricer,
    Prompter,
    Recorder,
    Reranker,
    Retriever,
    Searcher,
    Tier,
    turns_only,
)
from bottega.recipes.visual_rag import default_prompter
from bottega.reranking import (
    AgreementFunction,
    EnsembleReward,
    MutualReward,
    RewardFunction,
    RewardVariant,
    SelfConsistencyReward,
    TreeSearch,
    WeightedReward,
    check_depth,
)
from bottega.reranking.search_budget import most_prompt_tokens
from bottega.retrieval import DenseRetriever
from bottega.types import Completion, Prompt, Query, Reply, Sampling, SearchResult, Usage

ASK_CHOICE = "Answer with one of these choices and nothing else."

ROLLOUTS, FETCH, SECONDS = 10, 20, 60.0
PROBES = 5  # samples of the self-consistency reward, and questions of the mutual reward
ENSEMBLE = 15
FIRST_ANSWERS = 3  # without demonstrations, with the nearest ones, with a sampled branch
OR_LOWER = "or lower the limit of tokens per completion (max_tokens or --max-tokens)"
Reason = Literal["timeout", "budget", "failed"]


def rcts(
    knowledge: KnowledgeBase,
    generator: Generator,
    *,
    labels: Sequence[str] = (),
    shots: int = 3,
    fetch: int = 20,
    rollouts: int = 10,
    alpha: float = 0.2,
    parallel: int = 1,
    variant: RewardVariant = "paper",
    reward: RewardFunction | None = None,
    search: Searcher | None = None,
    retrieve: Retriever | None = None,
    prompt: Prompter | None = None,
    parse: Parser | None = None,
    agree: AgreementFunction = equal_answers,
    max_calls: int | None = None,
    max_tokens: int | None = None,
    record: Recorder | None = None,
    price: Pricer | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Pipeline:
    """RCTS (Yang et al.): choose `shots` of `fetch` retrieved examples, and their order, by a tree
    search that queries the model with them and evaluates its answers.

    The reward of an answer is `alpha` times its self-consistency (how reliably it follows from its
    own rationale), plus `1 - alpha` times its mutual reward (the accuracy on retrieved labelled
    examples with the answer as a demonstration). The default `prompt` asks for the rationale
    (`ReasoningPrompter`); for a generator that reads brief turns only, it is such turns. Without a
    rationale only the mutual reward counts; `reward=EnsembleReward(...)` may then be better.
    `agree` compares two answers, by default with `same_answer`. The paper retrieves by late
    interaction (`retrieve=DenseRetriever(LateInteractionIndex(...).search)`); the default is the
    search of `knowledge`. `parallel` branches are answered concurrently; 1 is the paper's order.
    `max_calls` completions and `max_tokens` tokens limit the search of one query. A given `search`,
    such as a `FlatSearch`, is used unchanged.
    """
    check_depth(shots)
    _check_fetch(fetch, shots)
    brief = turns_only(generator)
    prompt = prompt or (default_prompter(generator) if brief else ReasoningPrompter())
    parse = parse or LabelParser()
    sampling = sampling or Sampling(max_tokens=512)
    continuation = ContinuationPrompter(prompt) if brief else None
    if search is None:
        search = TreeSearch(
            generator,
            prompt=prompt,
            parse=parse,
            reward=reward
            or default_reward(prompt, parse, alpha, sampling, variant, agree, continuation),
            rollouts=rollouts,
            parallel=parallel,
            variant=variant,
            sampling=sampling,
            agree=agree,
            seed=seed,
            max_calls=max_calls,
            max_tokens=max_tokens,
        )
    return Pipeline(
        route=FixedRouter(Tier(generator.name, generator, shots)),
        retrieve=retrieve or DenseRetriever(knowledge.search),
        prompt=prompt,
        parse=parse,
        search=search,
        record=record,
        price=price,
        sampling=sampling,
        choices=tuple(labels),
        fetch=fetch,
    )


def _check_fetch(fetch: int, shots: int) -> None:
    if fetch < shots:
        raise SettingError(
            f"fetch must be at least shots, got fetch={fetch} and shots={shots}",
            hint="raise fetch well above shots, or lower shots",
        )


def default_reward(
    prompt: Prompter,
    parse: Parser,
    alpha: float = 0.2,
    sampling: Sampling | None = None,
    variant: RewardVariant = "paper",
    agree: AgreementFunction = equal_answers,
    conclude: Callable[[Query, str], Prompt] | None = None,
) -> WeightedReward:
    """Return the paper's reward (eq. 9), sampled at temperature 0.8 with the `max_tokens` of
    `sampling`. `conclude` builds the prompt that asks for an answer from a rationale, by default
    `conclusion_prompter(parse)`; use `ContinuationPrompter(prompt)` for a model with brief turns
    only."""
    samples = Sampling(0.8, (sampling or Sampling(max_tokens=512)).max_tokens)
    own = SelfConsistencyReward(
        conclude or conclusion_prompter(parse),
        parse,
        sampling=samples,
        agree=agree,
        variant=variant,
    )
    mutual = MutualReward(prompt, parse, sampling=samples, agree=agree, variant=variant)
    return WeightedReward(own, mutual, alpha)


def conclusion_prompter(parse: Parser) -> ConclusionPrompter:
    """Return the prompter with the paper's text that asks for a letter if `parse` reads letters,
    else for one of the choices (`LabelParser`)."""
    query = Query("", choices=("left", "right"))
    if parse(query, Completion("B")).text == "right":
        return ConclusionPrompter()
    return ConclusionPrompter(option="- {choice}", letter_instruction=ASK_CHOICE)


class SearchError(BottegaError):
    """Search that ended without a result, for the given `reason`."""

    def __init__(self, message: str, reason: Reason, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


@dataclass(frozen=True)
class SearchLimits:
    """Budget of the tree search of one request: completions (None: those of 10 rollouts), tokens
    (None: any number) and seconds. Set `brief` for models that support brief turns only: they give
    no rationales, so their reward is `EnsembleReward`."""

    calls: int | None = None
    tokens: int | None = None
    seconds: float = SECONDS
    brief: bool = False

    @property
    def reward_calls(self) -> int:
        """Return the completions that the reward of one branch needs."""
        return ENSEMBLE if self.brief else 2 * PROBES

    @property
    def rollout_calls(self) -> int:
        """Return the completions of a search until its first branch is scored."""
        return FIRST_ANSWERS + self.reward_calls

    @property
    def max_calls(self) -> int:
        """Return the maximum number of completions. All branches share the samples of an
        ensemble."""
        scored = 1 if self.brief else ROLLOUTS
        return self.calls or 1 + ROLLOUTS + scored * self.reward_calls

    def check(self, name: Callable[[str], str], max_tokens: int) -> None:
        """Raise `SettingError` for a budget smaller than one rollout. `name` returns the name of a
        setting, `max_tokens` is the limit of a completion."""
        needed = {"calls": self.rollout_calls, "tokens": self.rollout_calls * max_tokens}
        for setting, least in needed.items():
            given = getattr(self, setting)
            if given is not None and given < least:
                limit = f" of up to {max_tokens:,} tokens" if setting == "tokens" else ""
                raise SettingError(
                    f"{name(setting)} is a budget smaller than one rollout, got {given}: the first"
                    f" rollout needs {self.rollout_calls} completions{limit}",
                    hint=f"set it to {least} or more, or remove it"
                    + (f", {OR_LOWER}" if limit else ""),
                )

    def tree_search(
        self,
        generator: Generator,
        *,
        prompt: Prompter,
        parse: Parser,
        shots: int,
        sampling: Sampling,
    ) -> TreeSearch:
        """Return the search of RCTS within these limits. Raises `SearchError` if the tokens do not
        allow one rollout."""
        if self.tokens is not None and self.tokens < self.rollout_calls * sampling.max_tokens:
            raise _too_small()
        reward: RewardFunction = default_reward(prompt, parse, sampling=sampling)
        if self.brief:
            reward = EnsembleReward(
                prompt, parse, shots=shots, n=ENSEMBLE, sampling=sampling, agree=equal_answers
            )
        return TreeSearch(
            generator,
            prompt=prompt,
            parse=parse,
            reward=reward,
            rollouts=ROLLOUTS,
            sampling=sampling,
            agree=equal_answers,
            max_calls=self.max_calls,
            max_tokens=self.tokens,
        )

    async def search(
        self, search: TreeSearch, query: Query, candidates: Candidates, k: int
    ) -> SearchResult:
        """Return the result of a search. Raises `SearchError` if the search exceeds its time limit,
        the budget does not allow one rollout, or the model fails."""
        prompt = search.prompt(query, candidates[:k])
        longest = most_prompt_tokens(prompt) + search.sampling.max_tokens
        if self.tokens is not None and self.tokens < self.rollout_calls * longest:
            raise _too_small()
        try:
            async with asyncio.timeout(self.seconds):
                found = await search.search(query, candidates, k)
        except TimeoutError as error:
            raise SearchError(
                f"the search did not end within {self.seconds:g} s",
                "timeout",
                hint="raise the time limit of the search (search_seconds or --search-seconds), or"
                " lower its completions",
            ) from error
        except (GenerationError, SettingError) as error:
            raise SearchError(f"the search failed: {error}", "failed", hint=error.hint) from error
        if found.tree is not None and found.tree.ended == "budget" and not found.tree.root.visits:
            raise _too_small()
        return found


def _too_small() -> SearchError:
    return SearchError(
        "the budget of the search is smaller than one rollout of this request",
        "budget",
        hint=f"raise the token limit of the search (search_tokens or --search-tokens), {OR_LOWER}",
    )


@dataclass(frozen=True)
class LimitedSearcher:
    """Searcher within limits. If `tree` has no result, it answers once with the demonstrations that
    `rerank` selects, and `on_error` is called. The usage of that reply includes the search."""

    tree: TreeSearch
    limits: SearchLimits
    rerank: Reranker
    on_error: Callable[[SearchError], None]

    async def search(self, query: Query, candidates: Candidates, k: int, /) -> SearchResult:
        counter = UsageCounter(self.tree.generator)
        tree = replace(self.tree, generator=counter)
        try:
            return await self.limits.search(tree, query, candidates, k)
        except SearchError as error:
            self.on_error(error)
        shown = await self.rerank(query, candidates, k)
        prompt = tree.prompt(query, shown)
        reply = await counter.generate(prompt, tree.sampling)
        answer = tree.parse(query, reply.completions[0])
        return SearchResult(tuple(shown), prompt, replace(reply, usage=counter.usage), answer)


class UsageCounter:
    """Generator wrapper that adds up the usage of its replies."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.usage = Usage()

    @property
    def name(self) -> str:
        return self._generator.name

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        reply = await self._generator.generate(prompt, sampling)
        self.usage += reply.usage
        return reply

    async def aclose(self) -> None:
        """Leave the generator open: its owner closes it."""

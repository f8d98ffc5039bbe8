"""RCTS for single requests: a tree search with a budget of completions, tokens and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from bottega.errors import BottegaError, GenerationError, SettingError
from bottega.parsing import equal_answers
from bottega.protocols import Candidates, Generator, Parser, Prompter, Reranker
from bottega.recipes.rcts import default_reward
from bottega.reranking import EnsembleReward, RewardFunction, TreeSearch
from bottega.reranking.search_budget import most_prompt_tokens
from bottega.types import Prompt, Query, Reply, Sampling, SearchResult, Usage

ROLLOUTS, FETCH, SECONDS = 10, 20, 60.0
PROBES = 5  # samples of the self-consistency reward, and questions of the mutual reward
ENSEMBLE = 15
FIRST_ANSWERS = 3  # without demonstrations, with the nearest ones, with a sampled branch
OR_LOWER = "or lower the limit of tokens per completion (max_tokens or --max-tokens)"

Reason = Literal["timeout", "budget", "failed"]


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

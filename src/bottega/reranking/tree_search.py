"""Monte Carlo tree search for helpful demonstrations, by the reward of their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import combinations
from math import ceil
from typing import Literal, TypeVar

from bottega._util.identity import query_rng
from bottega.errors import SettingError
from bottega.protocols import Candidates, Generator, Parser, Prompter
from bottega.reranking.rewards import (
    AgreementFunction,
    RewardFunction,
    RewardValue,
    Variant,
    check_at_least_one,
    check_variant,
    checked_reward,
    exact_agreement,
)
from bottega.reranking.search_budget import (
    BudgetedGenerator,
    ReservedCost,
    gather_affordable,
    most_prompt_tokens,
)
from bottega.reranking.selection import check_depth
from bottega.reranking.tree import MonteCarloTree, TreeNode
from bottega.types import (
    Answer,
    Candidate,
    Prompt,
    Query,
    Reply,
    Sampling,
    SearchResult,
    SearchTree,
)

T = TypeVar("T")

Ended = Literal["rollouts", "agreement", "exhausted", "budget"]


@dataclass(frozen=True)
class TreeSearch:
    """MCTS-HR, the re-ranking of RCTS (section 3.4, appendix A).

    The search selects demonstrations and their order: `generator` answers with them, and `reward`
    scores the answers.

    It first answers without demonstrations, with the nearest candidates, and with a sampled branch.
    If the three answers agree, it returns that of the nearest candidates, without a reward.
    Otherwise it answers and scores `rollouts` branches, these two included (10 in the paper; the
    released settings have 8 without the first two). The result is the answer of the branch with the
    largest sum of values. `children` is the width of the tree; `MonteCarloTree` describes the two
    variants. A branch shows its demonstrations in the order of their selection.

    `parallel` branches are selected in sequence, answered and scored concurrently, and added to the
    tree in the order of their selection. The result depends on the seed and on the replies, never
    on their order. 1 is the paper's order.

    A search requests at most `most_calls` completions and `most_tokens` tokens, see
    `BudgetedGenerator`; when the budget is spent, it returns the best branch so far. An error of
    the generator ends the search. Called as a `Reranker` it returns only the demonstrations.
    """

    generator: Generator
    _: KW_ONLY
    prompt: Prompter
    parse: Parser
    reward: RewardFunction
    rollouts: int = 10
    children: int = 3
    parallel: int = 1
    exploration: float = 0.5
    variant: Variant = "paper"
    sampling: Sampling = field(default_factory=Sampling)
    agree: AgreementFunction = exact_agreement
    seed: int = 0
    most_calls: int | None = None
    most_tokens: int | None = None
    count: Callable[[Prompt], int] = most_prompt_tokens

    def __post_init__(self) -> None:
        check_at_least_one("rollouts", self.rollouts)
        check_at_least_one("parallel", self.parallel)
        check_variant(self.variant)
        if self.sampling.n != 1:
            raise SettingError(
                f"sampling.n must be 1, got {self.sampling.n}",
                hint="set sampling.n to 1; rewards have their own samples",
            )
        # Report invalid settings before the first query.
        self._tree(Query(""), (), 0)
        self._budgeted()

    async def search(self, query: Query, candidates: Candidates, k: int, /) -> SearchResult:
        check_depth(k)
        tree = self._tree(query, candidates, k)
        return await TreeSearchRun(self, tree, self._budgeted(), query, candidates).run()

    async def __call__(self, query: Query, candidates: Candidates, k: int, /) -> list[Candidate]:
        return list((await self.search(query, candidates, k)).shown)

    def _tree(self, query: Query, candidates: Candidates, k: int) -> MonteCarloTree:
        return MonteCarloTree(
            candidates,
            k,
            width=self.children,
            exploration=self.exploration,
            variant=self.variant,
            random=query_rng(query, self.seed),
        )

    def _budgeted(self) -> BudgetedGenerator:
        return BudgetedGenerator(
            self.generator,
            seed=self.seed,
            most_calls=self.most_calls,
            most_tokens=self.most_tokens,
            count=self.count,
        )


class TreeSearchRun:
    """State of one query's search."""

    def __init__(
        self,
        how: TreeSearch,
        tree: MonteCarloTree,
        budgeted: BudgetedGenerator,
        query: Query,
        candidates: Candidates,
    ) -> None:
        self._how = how
        self._tree = tree
        self._budgeted = budgeted
        self._query = query
        self._candidates = candidates
        self._replies: dict[TreeNode, tuple[Prompt, Reply]] = {}
        self._price: dict[str, ReservedCost] = {}

    async def run(self) -> SearchResult:
        ended = await self._search()
        root, budgeted = self._tree.root, self._budgeted
        best = self._tree.best() or root
        if best.answer is None:
            raise SettingError(
                "the budget of the search does not allow a single answer",
                hint="raise most_calls or most_tokens, or lower sampling.max_tokens",
            )
        prompt, reply = self._replies[best]
        frozen = self._tree.record(root)
        tree = SearchTree(
            frozen, best.steps, ended, budgeted.requests, budgeted.calls, budgeted.usage
        )
        return SearchResult(
            tuple(self._tree.demonstrations(best)), prompt, reply, best.answer, tree
        )

    async def _search(self) -> Ended:
        tree, left = self._tree, self._how.rollouts
        begun = [grow() for grow in (tree.greedy, tree.sample)[:left]]
        leaves = [leaf for leaf in begun if leaf is not None]
        answered = await self._answer([tree.root, *leaves])
        if self._agree([node.answer for node in answered if node.answer]):
            return "agreement"
        answered = [leaf for leaf in answered if leaf is not tree.root]
        while leaves:
            if await self._score(answered) < len(leaves):
                return "budget"
            left -= len(leaves)
            if left == 0:
                return "rollouts"
            leaves = self._next_leaves(left)
            answered = await self._answer(leaves)
        return "exhausted"

    def _agree(self, answers: Sequence[Answer]) -> bool:
        """Whether the answers of root, greedy and sampled branch agree (early stopping, appendix
        A)."""
        return len(answers) == 3 and all(
            one.valid and other.valid and self._how.agree(one, other, self._query) == 1
            for one, other in combinations(answers, 2)
        )

    def _next_leaves(self, most: int) -> list[TreeNode]:
        """Return the leaves of the next batch.

        Its size fits the budget by the cost of earlier branches; otherwise the search could start
        all branches and finish no branch.
        """
        prices = self._price.values()
        price = ReservedCost(sum(one.calls for one in prices), sum(one.tokens for one in prices))
        size = min(most, self._how.parallel, max(1, self._budgeted.room(price)))
        chosen = [self._tree.sample() for _ in range(int(size))]
        return [leaf for leaf in chosen if leaf is not None]

    async def _answer(self, nodes: Sequence[TreeNode]) -> list[TreeNode]:
        """Answer the nodes; return those that the budget allowed and discard the others."""
        replies = await self._within_budget("answer", [self._reply(node) for node in nodes])
        answered = []
        for node, reply in zip(nodes, replies, strict=True):
            if reply is not None:
                self._replies[node] = reply
                node.answer = self._how.parse(self._query, reply[1].completions[0])
                answered.append(node)
            elif node.parent is not None:
                self._tree.discard(node)
        return answered

    async def _reply(self, node: TreeNode) -> tuple[Prompt, Reply]:
        prompt = self._how.prompt(self._query, self._tree.demonstrations(node))
        return prompt, await self._budgeted.generate(prompt, self._how.sampling)

    async def _score(self, leaves: Sequence[TreeNode]) -> int:
        """Score the leaves; return how many the budget allowed."""
        # Score one leaf first to learn its cost.
        alone = 1 if self._budgeted.is_limited and "reward" not in self._price else 0
        scored = 0
        for batch in (leaves[:alone], leaves[alone:]):
            rewards = await self._within_budget(
                "reward", [self._reward(leaf.answer) for leaf in batch if leaf.answer]
            )
            for leaf, value in zip(batch, rewards, strict=True):
                if value is not None:
                    self._tree.finish(leaf, value)
                    scored += 1
        return scored

    async def _reward(self, answer: Answer) -> RewardValue:
        how = self._how
        return await checked_reward(
            how.reward, self._query, answer, self._candidates, self._budgeted
        )

    async def _within_budget(self, what: str, work: Sequence[Awaitable[T]]) -> list[T | None]:
        """Run the work within the budget, and record the highest cost of one item."""
        if not work:
            return []
        before = self._budgeted.reserved
        results = await gather_affordable(work)
        self._budgeted.settle()
        after, previous = self._budgeted.reserved, self._price.get(what, ReservedCost())
        calls = ceil((after.calls - before.calls) / len(work))
        tokens = ceil((after.tokens - before.tokens) / len(work))
        self._price[what] = ReservedCost(max(previous.calls, calls), max(previous.tokens, tokens))
        return results

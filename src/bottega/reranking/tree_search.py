"""Monte Carlo tree search for helpful demonstrations (RCTS, section 3.4 and appendix A)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import combinations
from math import ceil
from typing import TypeVar

from bottega._util.identity import query_rng
from bottega.errors import SettingError, check_count
from bottega.protocols import Candidates, Generator, Parser, Prompter
from bottega.reranking.monte_carlo_tree import MonteCarloTree, TreeNode
from bottega.reranking.rewards import (
    AgreementFunction,
    RewardFunction,
    RewardVariant,
    check_variant,
    checked_reward,
    exact_agreement,
    max_cost,
)
from bottega.reranking.search_budget import (
    BudgetedGenerator,
    ReservedCost,
    check_rollout,
    gather_affordable,
    most_prompt_tokens,
)
from bottega.reranking.selection import check_depth
from bottega.types import Answer, Candidate, Ended, Prompt, Query, Reply, Sampling, SearchResult

T = TypeVar("T")


@dataclass(frozen=True)
class TreeSearch:
    """MCTS-HR, the re-ranking of RCTS (section 3.4, appendix A).

    The search selects demonstrations and their order: `generator` answers with them, and `reward`
    scores the answers. `prompt` shows the demonstrations, `sampling` has the settings of a reply,
    `parse` reads it, and `agree` compares answers. `exploration` weighs rarely visited
    branches, and `count` estimates the tokens of a prompt.

    It first answers without demonstrations, with the nearest candidates, and with a sampled branch.
    If the three answers agree and `early_stop` is set, it returns that of the nearest candidates,
    without a reward. Otherwise it answers and scores `rollouts` branches, these two included (10 in
    the paper; the released settings have 8 without the first two). The result is the answer of the
    branch with the largest sum of values. `children` is the width of the tree; `MonteCarloTree`
    describes the two values of `variant`. A branch shows its demonstrations in the order of their
    selection.

    `zero_shot_prompt` replaces `prompt` for the answer without demonstrations, for example where
    `prompt` asks for a rationale and the zero-shot prompt of a benchmark does not.

    `parallel` branches are selected in sequence, answered and scored concurrently, and added to the
    tree in the order of their selection. The result depends on the seed and on the replies, never
    on their order. 1 is the paper's order.

    A search requests at most `max_calls` completions and `max_tokens` tokens, see
    `BudgetedGenerator`; when the budget is spent, it returns the best branch so far. A budget
    smaller than one rollout raises `SettingError` before a request is sent. An error of the
    generator ends the search. Called as a `Reranker` it returns only the demonstrations.
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
    variant: RewardVariant = "paper"
    early_stop: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    agree: AgreementFunction = exact_agreement
    seed: int = 0
    max_calls: int | None = None
    max_tokens: int | None = None
    count: Callable[[Prompt], int] = most_prompt_tokens
    zero_shot_prompt: Prompter | None = None

    def __post_init__(self) -> None:
        check_count("rollouts", self.rollouts)
        check_count("parallel", self.parallel)
        check_variant(self.variant)
        if self.sampling.n != 1:
            raise SettingError(
                f"sampling.n must be 1, got {self.sampling.n}",
                hint="set sampling.n to 1; rewards have their own samples",
            )
        # Report invalid settings before the first query.
        self._tree(Query(""), (), 0)
        self._budgeted()
        self._check_rollout(())

    async def search(self, query: Query, candidates: Candidates, k: int, /) -> SearchResult:
        check_depth(k)
        if self.max_tokens is not None:
            self._check_rollout((self.zero_shot(query), self.prompt(query, candidates[:k])))
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

    def zero_shot(self, query: Query) -> Prompt:
        """Return the prompt without demonstrations."""
        return (self.zero_shot_prompt or self.prompt)(query, ())

    def _check_rollout(self, prompts: Sequence[Prompt]) -> None:
        """Raise `SettingError` if the budget ends before the first branch is scored. Only the
        given prompts are counted, so a sufficient budget is never rejected."""
        answers = 1 + min(self.rollouts, 2)
        tokens = answers * self.sampling.max_tokens + sum(map(self.count, prompts))
        needed = ReservedCost(answers, tokens) + max_cost(self.reward)
        check_rollout(self.max_calls, self.max_tokens, needed)

    def _budgeted(self) -> BudgetedGenerator:
        return BudgetedGenerator(
            self.generator,
            seed=self.seed,
            max_calls=self.max_calls,
            max_tokens=self.max_tokens,
            count=self.count,
        )


@dataclass
class TreeSearchRun:
    """State of one query's search."""

    how: TreeSearch
    tree: MonteCarloTree
    budgeted: BudgetedGenerator
    query: Query
    candidates: Candidates
    replies: dict[TreeNode, tuple[Prompt, Reply]] = field(default_factory=dict)
    price: dict[str, ReservedCost] = field(default_factory=dict)

    async def run(self) -> SearchResult:
        ended = await self._search()
        root = self.tree.root
        best = self.tree.best() or root
        assert best.answer is not None  # the budget allows one rollout
        prompt, reply = self.replies[best]
        record, shown = self.tree.record(root), tuple(self.tree.demonstrations(best))
        tree = self.budgeted.tree(record, best.steps, ended)
        return SearchResult(shown, prompt, reply, best.answer, tree)

    async def _search(self) -> Ended:
        tree, left = self.tree, self.how.rollouts
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
        return (
            self.how.early_stop
            and len(answers) == 3
            and all(
                one.valid and other.valid and self.how.agree(one, other, self.query) == 1
                for one, other in combinations(answers, 2)
            )
        )

    def _next_leaves(self, limit: int) -> list[TreeNode]:
        """Return the leaves of the next batch.

        Its size fits the budget by the cost of earlier branches; otherwise the search could start
        all branches and finish no branch.
        """
        price = sum(self.price.values(), ReservedCost())
        size = min(limit, self.how.parallel, max(1, self.budgeted.room(price)))
        chosen = [self.tree.sample() for _ in range(int(size))]
        return [leaf for leaf in chosen if leaf is not None]

    async def _answer(self, nodes: Sequence[TreeNode]) -> list[TreeNode]:
        """Answer the nodes; return those that the budget allowed and discard the others."""

        async def ask(node: TreeNode) -> tuple[Prompt, Reply]:
            if node is self.tree.root:
                prompt = self.how.zero_shot(self.query)
            else:
                prompt = self.how.prompt(self.query, self.tree.demonstrations(node))
            return prompt, await self.budgeted.generate(prompt, self.how.sampling)

        replies = await self._within_budget("answer", [ask(node) for node in nodes])
        answered = []
        for node, reply in zip(nodes, replies, strict=True):
            if reply is not None:
                self.replies[node] = reply
                node.answer = self.how.parse(self.query, reply[1].completions[0])
                answered.append(node)
            elif node.parent is not None:
                self.tree.discard(node)
        return answered

    async def _score(self, leaves: Sequence[TreeNode]) -> int:
        """Score the leaves; return how many the budget allowed."""
        # Score one leaf first to learn its cost.
        alone = 1 if self.budgeted.is_limited and "reward" not in self.price else 0
        scored = 0
        for batch in (leaves[:alone], leaves[alone:]):
            rewards = await self._within_budget(
                "reward",
                [
                    checked_reward(
                        self.how.reward, self.query, leaf.answer, self.candidates, self.budgeted
                    )
                    for leaf in batch
                    if leaf.answer
                ],
            )
            for leaf, value in zip(batch, rewards, strict=True):
                if value is not None:
                    self.tree.finish(leaf, value)
                    scored += 1
        return scored

    async def _within_budget(self, what: str, work: Sequence[Awaitable[T]]) -> list[T | None]:
        """Run the work within the budget, and record the highest cost of one item."""
        if not work:
            return []
        before = self.budgeted.reserved
        results = await gather_affordable(work)
        self.budgeted.settle()
        after, previous = self.budgeted.reserved, self.price.get(what, ReservedCost())
        calls = ceil((after.calls - before.calls) / len(work))
        tokens = ceil((after.tokens - before.tokens) / len(work))
        self.price[what] = ReservedCost(max(previous.calls, calls), max(previous.tokens, tokens))
        return results

"""Monte Carlo tree search for the demonstrations that help, by what their answers are worth."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import combinations
from math import ceil
from typing import Literal, TypeVar

from bottega._util.rng import query_rng
from bottega.errors import SettingError
from bottega.protocols import Generator, Parser, Prompter
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
from bottega.reranking.tree import Tree, TreeNode
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
    """MCTS-HR, the re-ranking of RCTS (section 3.4, appendix A): which of the candidates are shown,
    and in which order, is searched for by asking `generator` with them and judging what it says.

    First the query alone, with the nearest candidates and with a sampled branch: if the three
    answers agree, the answer of the nearest is taken and nothing is judged. Otherwise `rollouts`
    branches are answered and judged in all, these two included (the paper's 10; the released
    settings say 8 and do not count the first two). The answer is that of the branch with the
    largest sum of values. `children` is the width of the tree; `Tree` tells how the two variants
    differ. A branch shows its demonstrations in the order in which they were chosen.

    `parallel` branches are chosen one after another, then answered at once and judged at once, and
    only then enter the tree, in the order in which they were chosen: the result depends on the seed
    and on what the model says, never on which reply was first. 1 is the paper's order.

    At most `most_calls` completions and `most_tokens` tokens are asked for by each search, see
    `BudgetedGenerator`; when they are spent the best branch so far is taken. An error of the
    generator ends the search. As a `Reranker` it gives the demonstrations only, and its answer is
    lost.
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
                f"sampling.n is {self.sampling.n}, but a branch is answered once",
                hint="set it to 1; the rewards have samples of their own",
            )
        # What these refuse is refused before the first query.
        self._tree(Query(""), (), 0)
        self._asker()

    async def search(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> SearchResult:
        check_depth(k)
        tree = self._tree(query, candidates, k)
        return await Search(self, tree, self._asker(), query, candidates).found()

    async def __call__(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> list[Candidate]:
        return list((await self.search(query, candidates, k)).shown)

    def _tree(self, query: Query, candidates: Sequence[Candidate], k: int) -> Tree:
        return Tree(
            candidates,
            k,
            width=self.children,
            exploration=self.exploration,
            variant=self.variant,
            random=query_rng(query, self.seed),
        )

    def _asker(self) -> BudgetedGenerator:
        return BudgetedGenerator(
            self.generator,
            seed=self.seed,
            most_calls=self.most_calls,
            most_tokens=self.most_tokens,
            count=self.count,
        )


class Search:
    """One query's."""

    def __init__(
        self,
        how: TreeSearch,
        tree: Tree,
        asker: BudgetedGenerator,
        query: Query,
        candidates: Sequence[Candidate],
    ) -> None:
        self._how = how
        self._tree = tree
        self._asker = asker
        self._query = query
        self._candidates = candidates
        self._replies: dict[TreeNode, tuple[Prompt, Reply]] = {}
        self._price: dict[str, ReservedCost] = {}

    async def found(self) -> SearchResult:
        ended = await self._searched()
        root, asker = self._tree.root, self._asker
        best = self._tree.best() or root
        if best.answer is None:
            raise SettingError(
                "the budget of the search does not allow a single answer",
                hint="raise most_calls or most_tokens, or lower sampling.max_tokens",
            )
        prompt, reply = self._replies[best]
        frozen = self._tree.frozen(root)
        tree = SearchTree(frozen, best.steps, ended, asker.requests, asker.calls, asker.usage)
        return SearchResult(tuple(self._tree.shown(best)), prompt, reply, best.answer, tree)

    async def _searched(self) -> Ended:
        tree, left = self._tree, self._how.rollouts
        begun = [grow() for grow in (tree.greedy, tree.sampled)[:left]]
        leaves = [leaf for leaf in begun if leaf is not None]
        answered = await self._answered([tree.root, *leaves])
        if self._agree([node.answer for node in answered if node.answer]):
            return "agreement"
        answered = [leaf for leaf in answered if leaf is not tree.root]
        while leaves:
            if await self._judged(answered) < len(leaves):
                return "budget"
            left -= len(leaves)
            if left == 0:
                return "rollouts"
            leaves = self._chosen(left)
            answered = await self._answered(leaves)
        return "exhausted"

    def _agree(self, answers: Sequence[Answer]) -> bool:
        """Early stopping (appendix A): the root's answer, the greedy and the sampled branch's."""
        return len(answers) == 3 and all(
            one.valid and other.valid and self._how.agree(one, other, self._query) == 1
            for one, other in combinations(answers, 2)
        )

    def _chosen(self, most: int) -> list[TreeNode]:
        """The leaves of the next batch: no more than the budget can pay for by what others took,
        or all would be begun and none finished."""
        prices = self._price.values()
        price = ReservedCost(sum(one.calls for one in prices), sum(one.tokens for one in prices))
        size = min(most, self._how.parallel, max(1, self._asker.room(price)))
        chosen = [self._tree.sampled() for _ in range(int(size))]
        return [leaf for leaf in chosen if leaf is not None]

    async def _answered(self, nodes: Sequence[TreeNode]) -> list[TreeNode]:
        """Those that the budget allowed an answer; the others are given up."""
        replies = await self._paid("answer", [self._reply(node) for node in nodes])
        answered = []
        for node, reply in zip(nodes, replies, strict=True):
            if reply is not None:
                self._replies[node] = reply
                node.answer = self._how.parse(self._query, reply[1].completions[0])
                answered.append(node)
            elif node.parent is not None:
                self._tree.give_up(node)
        return answered

    async def _reply(self, node: TreeNode) -> tuple[Prompt, Reply]:
        prompt = self._how.prompt(self._query, self._tree.shown(node))
        return prompt, await self._asker.ask(prompt, self._how.sampling)

    async def _judged(self, leaves: Sequence[TreeNode]) -> int:
        """How many of them the budget allowed to be judged."""
        # What one takes has to be known before many are under way.
        alone = 1 if self._asker.is_limited and "reward" not in self._price else 0
        judged = 0
        for batch in (leaves[:alone], leaves[alone:]):
            worths = await self._paid(
                "reward", [self._worth(leaf.answer) for leaf in batch if leaf.answer]
            )
            for leaf, worth in zip(batch, worths, strict=True):
                if worth is not None:
                    self._tree.finish(leaf, worth)
                    judged += 1
        return judged

    async def _worth(self, said: Answer) -> RewardValue:
        how = self._how
        return await checked_reward(how.reward, self._query, said, self._candidates, self._asker)

    async def _paid(self, what: str, work: Sequence[Awaitable[T]]) -> list[T | None]:
        """As far as the budget allows, and notes what one of them takes at most."""
        if not work:
            return []
        before = self._asker.reserved
        results = await gather_affordable(work)
        self._asker.settle()
        after, known = self._asker.reserved, self._price.get(what, ReservedCost())
        calls = ceil((after.calls - before.calls) / len(work))
        tokens = ceil((after.tokens - before.tokens) / len(work))
        self._price[what] = ReservedCost(max(known.calls, calls), max(known.tokens, tokens))
        return results

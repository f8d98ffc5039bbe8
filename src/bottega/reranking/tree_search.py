"""Monte Carlo tree search for helpful demonstrations (RCTS, section 3.4 and appendix A)."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import combinations
from math import ceil
from random import Random
from typing import Literal, TypeVar

from bottega._util.identity import query_rng
from bottega.errors import SettingError, check_count
from bottega.protocols import Candidates, Generator, Parser, Prompter
from bottega.reranking.rewards import (
    AgreementFunction,
    RewardFunction,
    RewardValue,
    Variant,
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
from bottega.reranking.selection import LEAST_WEIGHT, check_depth, scaled
from bottega.types import (
    Answer,
    Candidate,
    Prompt,
    Query,
    Reply,
    Sampling,
    SearchNode,
    SearchResult,
    SearchTree,
)

EPSILON = 1e-10


@dataclass(eq=False)
class TreeNode:
    """Node of the tree. `index` is that of its candidate; `value` is Q and `visits` N of the paper.

    `pending` counts unfinished branches through the node.
    """

    index: int | None = None
    parent: TreeNode | None = None
    value: float = 0.0
    visits: int = 0
    pending: int = 0
    children: list[TreeNode] = field(default_factory=list)
    answer: Answer | None = None
    reward: RewardValue = field(default_factory=RewardValue)

    def to_root(self) -> Iterator[TreeNode]:
        """Yield this node and its ancestors, the root last."""
        node: TreeNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def by_level(self) -> Iterator[TreeNode]:
        """Yield this node and its descendants, level by level."""
        level = [self]
        while level:
            yield from level
            level = [child for node in level for child in node.children]

    @property
    def steps(self) -> tuple[int, ...]:
        """The index of each node among its siblings, from the root to this node."""
        steps = [node.parent.children.index(node) for node in self.to_root() if node.parent]
        return tuple(steps[::-1])

    @property
    def path(self) -> list[int]:
        """The candidates' indices from the root to this node."""
        return [node.index for node in self.to_root() if node.index is not None][::-1]


class MonteCarloTree:
    """Tree whose branches are sequences of `depth` candidates; a node has up to `width` children.

    `variant` decides where the paper and the authors' released code differ:

    - Eq. 6, s_i: `paper` scales the scores to 0..1 over all candidates (as eq. 5 defines s_i),
      `released` for each sample over the candidates that are not on the path.
    - Eq. 6, A_valid: `paper` also excludes the candidates of the parent's other children: the
      search ends when all sequences are traversed (appendix A). `released` may repeat them.
    - Eq. 10, Q(c): `paper` passes the new value of each node to its parent, `released` passes the
      leaf's value to all ancestors.
    - Eq. 11, numerator: `paper` has ln N(father) + 1, as printed, `released` ln(N(father) + 1).
    - Node expansion (appendix A, by eq. 11): `paper` selects the node of the highest UCT,
      `released` samples one with the UCTs as weights.

    The root has no father for eq. 11: both variants first expand it to its full width, as released.
    Until a branch is finished, eq. 11 counts it as a visit without a reward (virtual loss).
    """

    def __init__(
        self,
        candidates: Candidates,
        depth: int,
        *,
        width: int = 3,
        exploration: float = 0.5,
        variant: Variant = "paper",
        random: Random,
    ) -> None:
        check_count("width", width)
        if not (math.isfinite(exploration) and exploration >= 0):
            raise SettingError(
                f"exploration must be finite and at least 0, got {exploration}",
                hint="set exploration to 0.5",
            )
        self.root = TreeNode()
        self.depth = min(depth, len(candidates))
        self._candidates = candidates
        self._width = width
        self._exploration = exploration
        self._released = variant == "released"
        self._random = random
        self._weights = scaled([one.score for one in candidates])

    def greedy(self) -> TreeNode | None:
        """Add the branch of the nearest candidates and return its leaf; None if it cannot grow."""
        return self._grow(self.root, nearest=True) if self._is_open(self.root) else None

    def sample(self) -> TreeNode | None:
        """Add a sampled branch and return its leaf; None if the width allows no further branch.

        The branch is pending until `finish` or `discard`.
        """
        ready = [node for node in self.root.by_level() if self._is_open(node)]
        if not ready:
            return None
        if self._released and ready[0] is not self.root:
            weights = [self.uct(node) for node in ready]
            [chosen] = self._random.choices(ready, weights if any(weights) else None)
        else:
            chosen = max(ready, key=self.uct)  # of equals the one nearer to the root
        return self._grow(chosen)

    def uct(self, node: TreeNode) -> float:
        """Return the UCT of a node (eq. 11); infinity for the root."""
        if node.parent is None:
            return math.inf
        # Virtual loss: a pending branch is a visit of value 0, which spreads concurrent selections.
        visits, above = node.visits + node.pending, node.parent.visits + node.parent.pending
        value = node.value * node.visits / visits if node.pending else node.value
        numerator = math.log(above + 1) if self._released else math.log(above) + 1
        return value + self._exploration * math.sqrt(numerator / (visits + EPSILON))

    def finish(self, leaf: TreeNode, reward: RewardValue) -> None:
        """Propagate a leaf's reward to the root (eq. 10)."""
        self._settle(leaf)
        leaf.reward, leaf.value, leaf.visits = reward, reward.value, 1
        propagated = leaf.value
        for node in list(leaf.to_root())[1:]:
            best = max(child.value for child in node.children if child.visits)
            mean = (node.value * node.visits + propagated) / (node.visits + 1)
            node.value = (mean + best) / 2
            node.visits += 1
            # The released code passes the leaf's value to all ancestors.
            if not self._released:
                propagated = node.value

    def discard(self, leaf: TreeNode) -> None:
        """Remove an unanswered branch."""
        self._settle(leaf)
        for node in list(leaf.to_root()):  # a shared ancestor still has other children
            if node.parent is not None and not node.children:
                node.parent.children.remove(node)

    def best(self) -> TreeNode | None:
        """Return the answered leaf with the largest sum of values from the root.

        Of equals it is the first, as in the released code; the paper leaves this open.
        """
        leaves = [node for node in self.root.by_level() if node.answer and node.parent]
        return max(
            leaves, key=lambda leaf: sum(node.value for node in leaf.to_root()), default=None
        )

    def demonstrations(self, leaf: TreeNode) -> list[Candidate]:
        return [self._candidates[index] for index in leaf.path]

    def record(self, node: TreeNode) -> SearchNode:
        candidate = None if node.index is None else self._candidates[node.index]
        children = tuple(self.record(child) for child in node.children)
        parts = dict(node.reward.parts)
        return SearchNode(candidate, node.value, node.visits, children, node.answer, parts)

    def _is_open(self, node: TreeNode) -> bool:
        full = len(node.path) >= self.depth or len(node.children) >= self._width
        return not full and bool(self._valid(node))

    def _valid(self, node: TreeNode) -> list[int]:
        taken = set(node.path)
        if not self._released:
            taken.update(child.index for child in node.children if child.index is not None)
        return [index for index in range(len(self._candidates)) if index not in taken]

    def _grow(self, node: TreeNode, *, nearest: bool = False) -> TreeNode:
        """Add a branch below the node and return its leaf."""
        while len(node.path) < self.depth:
            valid = self._valid(node)
            if self._released:  # s_i of eq. 6
                weights = scaled([self._candidates[index].score for index in valid], LEAST_WEIGHT)
            else:
                weights = [self._weights[index] for index in valid]
            if nearest:
                index = valid[weights.index(max(weights))]
            else:
                index = self._random.choices(valid, weights)[0]
            child = TreeNode(index, node)
            node.children.append(child)
            node = child
        for above in node.to_root():
            above.pending += 1
        return node

    def _settle(self, leaf: TreeNode) -> None:
        for node in leaf.to_root():
            node.pending -= 1


T = TypeVar("T")

Ended = Literal["rollouts", "agreement", "exhausted", "budget"]


@dataclass(frozen=True)
class TreeSearch:
    """MCTS-HR, the re-ranking of RCTS (section 3.4, appendix A).

    The search selects demonstrations and their order: `generator` answers with them, and `reward`
    scores the answers.

    It first answers without demonstrations, with the nearest candidates, and with a sampled branch.
    If the three answers agree and `early_stop` is set, it returns that of the nearest candidates,
    without a reward. Otherwise it answers and scores `rollouts` branches, these two included (10 in
    the paper; the released settings have 8 without the first two). The result is the answer of the
    branch with the largest sum of values. `children` is the width of the tree; `MonteCarloTree`
    describes the two variants. A branch shows its demonstrations in the order of their selection.

    `zero_shot_prompt` replaces `prompt` for the answer without demonstrations, for example where
    `prompt` asks for a rationale and the zero-shot prompt of a benchmark does not.

    `parallel` branches are selected in sequence, answered and scored concurrently, and added to the
    tree in the order of their selection. The result depends on the seed and on the replies, never
    on their order. 1 is the paper's order.

    A search requests at most `max_calls` completions and `max_tokens` tokens, see
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
        root, budgeted = self.tree.root, self.budgeted
        best = self.tree.best() or root
        if best.answer is None:
            raise SettingError(
                "the budget of the search does not allow a single answer",
                hint="raise max_calls or max_tokens, or lower sampling.max_tokens",
            )
        prompt, reply = self.replies[best]
        record, shown = self.tree.record(root), tuple(self.tree.demonstrations(best))
        tree = SearchTree(
            record, best.steps, ended, budgeted.requests, budgeted.calls, budgeted.usage
        )
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
        prices = self.price.values()
        price = ReservedCost(sum(one.calls for one in prices), sum(one.tokens for one in prices))
        size = min(limit, self.how.parallel, max(1, self.budgeted.room(price)))
        chosen = [self.tree.sample() for _ in range(int(size))]
        return [leaf for leaf in chosen if leaf is not None]

    async def _answer(self, nodes: Sequence[TreeNode]) -> list[TreeNode]:
        """Answer the nodes; return those that the budget allowed and discard the others."""

        async def ask(node: TreeNode) -> tuple[Prompt, Reply]:
            build = self.how.prompt
            if node is self.tree.root:
                build = self.how.zero_shot_prompt or build
            prompt = build(self.query, self.tree.demonstrations(node))
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

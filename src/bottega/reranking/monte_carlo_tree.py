"""Tree of demonstrations (RCTS, section 3.4): selection, expansion and propagation of rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from bottega.errors import check_count
from bottega.protocols import Candidates
from bottega.reranking.rewards import RewardValue, RewardVariant
from bottega.reranking.selection import LEAST_WEIGHT, check_exploration, scaled
from bottega.types import Answer, Candidate, SearchNode

EPSILON = 1e-10


@dataclass(eq=False)
class TreeNode:
    """Node of the tree. `index` is its candidate's; `value` is the paper's Q and `visits` its N.

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
        variant: RewardVariant = "paper",
        random: Random,
    ) -> None:
        check_count("width", width)
        check_exploration(exploration)
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
            chosen = max(ready, key=self.uct)  # among equals, the one nearest the root
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
        self._end_pending(leaf)
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
        self._end_pending(leaf)
        for node in list(leaf.to_root()):  # a shared ancestor still has other children
            if node.parent is not None and not node.children:
                node.parent.children.remove(node)

    def best(self) -> TreeNode | None:
        """Return the answered leaf with the largest sum of values on the path from the root.

        Ties go to the first leaf, as in the released code; the paper does not specify them.
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

    def _end_pending(self, leaf: TreeNode) -> None:
        for node in leaf.to_root():
            node.pending -= 1

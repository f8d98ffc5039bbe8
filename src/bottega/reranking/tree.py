"""The tree of MCTS-HR (RCTS, section 3.4 and appendix A), without anything that asks a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from bottega.errors import SettingError
from bottega.reranking.rewards import RewardValue, Variant, check_at_least_one
from bottega.reranking.selection import LEAST_WEIGHT, scaled
from bottega.types import Answer, Candidate, SearchNode

EPSILON = 1e-10


@dataclass(eq=False)
class TreeNode:
    """`place` is that of its candidate among all. `value` is Q, `visits` N; `pending` counts the
    branches through it that are under way."""

    place: int | None = None
    parent: TreeNode | None = None
    value: float = 0.0
    visits: int = 0
    pending: int = 0
    children: list[TreeNode] = field(default_factory=list)
    answer: Answer | None = None
    worth: RewardValue = field(default_factory=RewardValue)

    def up(self) -> Iterator[TreeNode]:
        """This node and all above it, the root last."""
        node: TreeNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def down(self) -> Iterator[TreeNode]:
        """This node and all below it, level by level."""
        level = [self]
        while level:
            yield from level
            level = [child for node in level for child in node.children]

    @property
    def steps(self) -> tuple[int, ...]:
        """The place of each node among its siblings, from the root to here."""
        steps = [node.parent.children.index(node) for node in self.up() if node.parent is not None]
        return tuple(steps[::-1])

    @property
    def path(self) -> list[int]:
        """The places of the candidates from the root to here."""
        return [node.place for node in self.up() if node.place is not None][::-1]


class Tree:
    """Branches are ordered sequences of `depth` candidates; a node has at most `width` children.

    Where the paper and the authors' released code differ, `variant` decides:

    - Eq. 6, s_i: `paper` scales the scores to 0..1 over all candidates (as eq. 5 defines s_i),
      `released` anew for each draw over the candidates that are not on the path.
    - Eq. 6, A_valid: `paper` also leaves out what the parent's other children have, so that the
      search ends when all sequences are traversed (appendix A); `released` may draw it again.
    - Eq. 10, Q(c): `paper` hands the new value of each node on to its parent, `released` hands the
      leaf's value to all nodes above it.
    - Eq. 11, numerator: `paper` has ln N(father) + 1, as printed, `released` ln(N(father) + 1).
    - Node expansion (appendix A, by eq. 11): `paper` takes the node of the highest UCT, `released`
      draws one with the UCTs as weights.

    The root has no father for eq. 11: both expand it to its full width first, as released. A branch
    under way counts as a visit without a reward to eq. 11 (virtual loss) until it is finished.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        depth: int,
        *,
        width: int = 3,
        exploration: float = 0.5,
        variant: Variant = "paper",
        random: Random,
    ) -> None:
        check_at_least_one("width", width)
        if not (math.isfinite(exploration) and exploration >= 0):
            raise SettingError(f"exploration is {exploration}", hint="set it to 0 or more")
        self.root = TreeNode()
        self.depth = min(depth, len(candidates))
        self._candidates = candidates
        self._width = width
        self._exploration = exploration
        self._released = variant == "released"
        self._random = random
        self._weights = scaled([one.score for one in candidates])

    def greedy(self) -> TreeNode | None:
        """The leaf of the branch with the nearest candidates; None if it cannot grow."""
        return self._grown(self.root, nearest=True) if self._is_open(self.root) else None

    def sampled(self) -> TreeNode | None:
        """The leaf of a new branch below the node that is to be expanded; None when all sequences
        that the width allows are there. It is pending until it is finished or given up."""
        ready = [node for node in self.root.down() if self._is_open(node)]
        if not ready:
            return None
        if self._released and ready[0] is not self.root:
            weights = [self.uct(node) for node in ready]
            [chosen] = self._random.choices(ready, weights if any(weights) else None)
        else:
            chosen = max(ready, key=self.uct)  # the one nearer to the root of two equals
        return self._grown(chosen)

    def uct(self, node: TreeNode) -> float:
        """Equation 11."""
        if node.parent is None:
            return math.inf
        visits, above = node.visits + node.pending, node.parent.visits + node.parent.pending
        value = node.value * node.visits / visits if node.pending else node.value
        numerator = math.log(above + 1) if self._released else math.log(above) + 1
        return value + self._exploration * math.sqrt(numerator / (visits + EPSILON))

    def finish(self, leaf: TreeNode, worth: RewardValue) -> None:
        """Equation 10, from the leaf up."""
        self._settle(leaf)
        leaf.worth, leaf.value, leaf.visits = worth, worth.value, 1
        handed = leaf.value
        for node in list(leaf.up())[1:]:
            best = max(child.value for child in node.children if child.visits)
            mean = (node.value * node.visits + handed) / (node.visits + 1)
            node.value = (mean + best) / 2
            node.visits += 1
            if not self._released:
                handed = node.value

    def give_up(self, leaf: TreeNode) -> None:
        """The branch was not answered, and goes."""
        self._settle(leaf)
        for node in list(leaf.up()):
            if node.parent is not None and not node.children:
                node.parent.children.remove(node)

    def best(self) -> TreeNode | None:
        """The answered leaf with the largest sum of values from the root, the first of equals (as
        released; the paper leaves it open)."""
        leaves = [node for node in self.root.down() if node.answer and node.parent]
        return max(leaves, key=lambda leaf: sum(node.value for node in leaf.up()), default=None)

    def shown(self, leaf: TreeNode) -> list[Candidate]:
        return [self._candidates[place] for place in leaf.path]

    def frozen(self, node: TreeNode) -> SearchNode:
        candidate = None if node.place is None else self._candidates[node.place]
        children = tuple(self.frozen(child) for child in node.children)
        parts = dict(node.worth.parts)
        return SearchNode(candidate, node.value, node.visits, children, node.answer, parts)

    def _is_open(self, node: TreeNode) -> bool:
        if len(node.path) >= self.depth or len(node.children) >= self._width:
            return False
        return bool(self._valid(node))

    def _valid(self, node: TreeNode) -> list[int]:
        taken = set(node.path)
        if not self._released:
            taken.update(child.place for child in node.children if child.place is not None)
        return [place for place in range(len(self._candidates)) if place not in taken]

    def _grown(self, node: TreeNode, *, nearest: bool = False) -> TreeNode:
        """The leaf of a new branch below the node."""
        while len(node.path) < self.depth:
            valid = self._valid(node)
            weights = self._weights_of(valid)
            if nearest:
                place = valid[weights.index(max(weights))]
            else:
                place = self._random.choices(valid, weights)[0]
            child = TreeNode(place, node)
            node.children.append(child)
            node = child
        for above in node.up():
            above.pending += 1
        return node

    def _weights_of(self, valid: Sequence[int]) -> list[float]:
        """The s_i of equation 6."""
        if not self._released:
            return [self._weights[place] for place in valid]
        return scaled([self._candidates[place].score for place in valid], LEAST_WEIGHT)

    def _settle(self, leaf: TreeNode) -> None:
        for node in leaf.up():
            node.pending -= 1

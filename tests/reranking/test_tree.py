from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction as F
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.reranking.monte_carlo_tree import MonteCarloTree, TreeNode
from bottega.reranking.rewards import RewardValue, RewardVariant
from bottega.types import Answer, Candidate
from tests.builders import example

LEAST = F(1, 1000)


class ScriptedRandom(Random):
    """Random state with given samples that records the weights of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.next: list[Any] = []
        self.weights: list[list[float]] = []

    def choices(self, population: Any, weights: Any = None, **_: Any) -> list[Any]:
        wanted = self.next.pop(0)
        self.weights.append(list(weights))
        return [next(one for one in population if wanted in (one, getattr(one, "index", None)))]


def found(*scores: float) -> list[Candidate]:
    return [Candidate(example("abcdefgh"[i], i), score) for i, score in enumerate(scores)]


class HandTree:
    """Three candidates a, b, c with the scores 3, 2, 1; K=2, width 3, c=1/2."""

    def __init__(self, variant: RewardVariant) -> None:
        self.given = ScriptedRandom()
        self.tree = MonteCarloTree(found(3, 2, 1), 2, variant=variant, random=self.given)

    def branch(self, draws: str, weights: Sequence[Sequence[float | F]], path: str) -> TreeNode:
        self.given.next = ["abc".index(letter) for letter in draws]
        self.given.weights = []
        leaf = self.tree.sample()
        assert leaf is not None
        assert self.given.next == []
        assert [len(one) for one in self.given.weights] == [len(one) for one in weights]
        for requested, expected in zip(self.given.weights, weights, strict=True):
            assert requested == pytest.approx([float(one) for one in expected])
        assert letters(leaf) == path
        return leaf

    def finish(self, leaf: TreeNode, reward: F) -> None:
        self.tree.finish(leaf, RewardValue(float(reward)))

    def check(self, expected: dict[str, tuple[F, int]]) -> None:
        """Each node's Q and N, by the letters of its path (several may have the same)."""
        nodes = list(self.tree.root.by_level())
        assert sorted(letters(node) for node in nodes) == sorted(name[:2] for name in expected)
        seen: dict[str, int] = {}
        for node in nodes:
            name = letters(node)
            seen[name] = seen.get(name, 0) + 1
            value, visits = expected[name + "'" * (seen[name] - 1)]
            assert node.value == pytest.approx(float(value)), name
            assert node.visits == visits, name

    def check_uct(self, numerator: Callable[[int], float]) -> None:
        for node in self.tree.root.by_level():
            if node.parent is None:
                assert self.tree.uct(node) == math.inf
            else:
                explored = math.sqrt(numerator(node.parent.visits) / node.visits)
                assert self.tree.uct(node) == pytest.approx(node.value + explored / 2)


def letters(node: TreeNode) -> str:
    return "".join("abc"[place] for place in node.path)


def test_the_papers_tree_by_hand() -> None:
    hand = HandTree("paper")
    # s over all candidates: a (3-1)/2 = 1, b 1/2, c 0, each + 1/1000.
    a, b, c = 1 + LEAST, F(1, 2) + LEAST, LEAST

    # The greedy branch and the first sampled one, which may not begin with a, are in flight
    # together. After b, everything but b is valid.
    first = hand.tree.greedy()
    assert first is not None
    assert letters(first) == "ab"
    second = hand.branch("ba", [[b, c], [a, c]], "ba")
    # ab: its leaf has 3/5; a = (3/5 + 3/5)/2 = 3/5; root = (3/5 + 3/5)/2 = 3/5.
    hand.finish(first, F(3, 5))
    hand.finish(second, F(1, 5))
    # ba: b = 1/5; root: mean (3/5*1 + 1/5)/2 = 2/5, best child 3/5, so (2/5 + 3/5)/2 = 1/2.
    tree = {"": (F(1, 2), 2), "a": (F(3, 5), 1), "ab": (F(3, 5), 1)}
    tree |= {"b": (F(1, 5), 1), "ba": (F(1, 5), 1)}
    hand.check(tree)
    hand.check_uct(lambda above: math.log(above) + 1)

    # The root has two of three children: it comes first. Only c is left there.
    hand.finish(hand.branch("cb", [[c], [a, b]], "cb"), F(1))
    # c = 1; root: mean (1/2*2 + 1)/3 = 2/3, best 1, so 5/6.
    tree |= {"": (F(5, 6), 3), "c": (F(1), 1), "cb": (F(1), 1)}
    hand.check(tree)

    # All of a, b, c have N=1 below N=3: the highest Q decides, which is c. Only a is left there.
    hand.check_uct(lambda above: math.log(above) + 1)
    hand.finish(hand.branch("a", [[a]], "ca"), F(0))
    # c: mean (1*1 + 0)/2 = 1/2, best 1, so 3/4. It hands on 3/4:
    # root: mean (5/6*3 + 3/4)/4 = 13/16, best 3/4 = 12/16, so 25/32.
    tree |= {"": (F(25, 32), 4), "c": (F(3, 4), 2), "ca": (F(0), 1)}
    hand.check(tree)

    # c has all children. a (3/5) precedes b (1/5).
    hand.finish(hand.branch("c", [[c]], "ac"), F(4, 5))
    # a: mean (3/5 + 4/5)/2 = 7/10, best 4/5, so 3/4.
    # root: mean (25/32*4 + 3/4)/5 = (25/8 + 6/8)/5 = 31/40, best 3/4 = 30/40, so 61/80.
    tree |= {"": (F(61, 80), 5), "a": (F(3, 4), 2), "ac": (F(4, 5), 1)}
    hand.check(tree)

    hand.finish(hand.branch("c", [[c]], "bc"), F(1))
    # b: mean (1/5 + 1)/2 = 3/5, best 1, so 4/5.
    # root: mean (61/80*5 + 4/5)/6 = (305 + 64)/480 = 369/480, best 4/5 = 384/480, so 753/960.
    tree |= {"": (F(753, 960), 6), "b": (F(4, 5), 2), "bc": (F(1), 1)}
    hand.check(tree)
    hand.check_uct(lambda above: math.log(above) + 1)

    # Nothing is left. Below the root the branches have ab 3/4 + 3/5, ac 3/4 + 4/5, ba 4/5 + 1/5,
    # bc 4/5 + 1 = 9/5, cb 3/4 + 1 = 7/4, ca 3/4.
    assert hand.tree.sample() is None
    for leaf in hand.tree.root.by_level():
        leaf.answer = Answer("yes") if len(leaf.path) == 2 else None
    best = hand.tree.best()
    assert best is not None
    assert letters(best) == "bc"


def test_the_released_tree_by_hand() -> None:
    hand = HandTree("released")

    def log(above: int) -> float:
        return math.log(above + 1)

    def sampled(*scores: int) -> list[F]:
        """Return s over the candidates off the path: (x - least)/(span + 1/1000) + 1/1000."""
        least, span = min(scores), max(scores) - min(scores)
        return [(score - least) / (span + LEAST) + LEAST for score in scores]

    def ucts(**q_and_n: tuple[F, int]) -> list[float]:
        above = hand.tree.root.visits
        return [float(q) + math.sqrt(log(above) / n) / 2 for q, n in q_and_n.values()]

    first = hand.tree.greedy()
    assert first is not None
    second = hand.branch("ba", [sampled(3, 2, 1), sampled(3, 1)], "ba")
    hand.finish(first, F(3, 5))
    hand.finish(second, F(1, 5))
    # As in the paper: each child has one branch, hence Q(child) is Q(leaf).
    tree = {"": (F(1, 2), 2), "a": (F(3, 5), 1), "ab": (F(3, 5), 1)}
    tree |= {"b": (F(1, 5), 1), "ba": (F(1, 5), 1)}
    hand.check(tree)
    hand.check_uct(log)

    hand.finish(hand.branch("cb", [sampled(3, 2, 1), sampled(3, 2)], "cb"), F(1))
    tree |= {"": (F(5, 6), 3), "c": (F(1), 1), "cb": (F(1), 1)}
    hand.check(tree)

    # Sampled from a, b and c by their UCT, and below c from all but c.
    weights = ucts(a=(F(3, 5), 1), b=(F(1, 5), 1), c=(F(1), 1))
    hand.finish(hand.branch("ca", [weights, sampled(3, 2)], "ca"), F(0))
    # c: mean (1*1 + 0)/2 = 1/2, best 1, so 3/4. The root is handed the leaf's 0:
    # mean (5/6*3 + 0)/4 = 5/8, best 3/4 = 6/8, so 11/16.
    tree |= {"": (F(11, 16), 4), "c": (F(3, 4), 2), "ca": (F(0), 1)}
    hand.check(tree)
    hand.check_uct(log)

    weights = ucts(a=(F(3, 5), 1), b=(F(1, 5), 1), c=(F(3, 4), 2))
    hand.finish(hand.branch("ac", [weights, sampled(2, 1)], "ac"), F(4, 5))
    # a: mean 7/10, best 4/5, so 3/4. root: mean (11/16*4 + 4/5)/5 = (55 + 16)/100 = 71/100,
    # best 3/4 = 75/100, so 73/100.
    tree |= {"": (F(73, 100), 5), "a": (F(3, 4), 2), "ac": (F(4, 5), 1)}
    hand.check(tree)

    # c has two of three children and may be given another b.
    weights = ucts(a=(F(3, 4), 2), b=(F(1, 5), 1), c=(F(3, 4), 2))
    hand.finish(hand.branch("cb", [weights, sampled(3, 2)], "cb"), F(1))
    # c: mean (3/4*2 + 1)/3 = 5/6, best 1, so 11/12.
    # root: mean (73/100*5 + 1)/6 = (73 + 20)/120 = 93/120, best 11/12 = 110/120, so 203/240.
    tree |= {"": (F(203, 240), 6), "c": (F(11, 12), 3), "cb'": (F(1), 1)}
    hand.check(tree)
    hand.check_uct(log)


def test_pending_branch_counts_as_visit_without_reward() -> None:
    hand = HandTree("paper")
    for draws, reward in (("ab", F(3, 5)), ("ba", F(1, 5)), ("cb", F(1))):
        hand.given.next = ["abc".index(letter) for letter in draws]
        leaf = hand.tree.sample()
        assert leaf is not None
        hand.finish(leaf, reward)
    hand.given.next = [0]
    in_flight = hand.tree.sample()
    assert in_flight is not None
    assert letters(in_flight) == "ca"
    node = in_flight.parent
    assert node is not None
    # c: Q 1*1/2, N 1 + 1, below a root of 3 + 1.
    assert hand.tree.uct(node) == pytest.approx(1 / 2 + math.sqrt((math.log(4) + 1) / 2) / 2)
    assert (node.value, node.visits) == (1, 1)
    hand.tree.discard(in_flight)
    assert hand.tree.uct(node) == pytest.approx(1 + math.sqrt(math.log(3) + 1) / 2)
    assert [letters(child) for child in node.children] == ["cb"]


def test_discarded_branch_keeps_shared_nodes() -> None:
    tree = MonteCarloTree(found(3, 2, 1), 3, width=2, random=Random(0))
    leaves = [tree.greedy(), *(tree.sample() for _ in range(3))]
    for leaf in leaves[1:]:
        assert leaf is not None
        tree.discard(leaf)
    assert [node for node in tree.root.by_level() if not node.children] == leaves[:1]
    assert {node.pending for node in tree.root.by_level()} == {1}


@pytest.mark.parametrize("depth", [0, 2])
def test_tree_without_open_nodes(depth: int) -> None:
    tree = MonteCarloTree(found() if depth else found(1), depth, random=Random(0))
    assert tree.greedy() is None
    assert tree.sample() is None
    assert tree.best() is None


def test_settings_that_cannot_work_are_refused() -> None:
    for wrong in ({"width": 0}, {"exploration": -1.0}, {"exploration": math.nan}):
        with pytest.raises(SettingError) as raised:
            MonteCarloTree(found(1), 1, random=Random(0), **wrong)
        assert raised.value.hint


REWARDS = st.lists(st.floats(0, 1), min_size=1, max_size=30)
SCORES = st.lists(st.floats(-100, 100), min_size=1, max_size=8)
VARIANTS: list[RewardVariant] = ["paper", "released"]
SHAPES = {
    "scores": SCORES,
    "depth": st.integers(1, 4),
    "width": st.integers(1, 4),
    "variant": st.sampled_from(VARIANTS),
    "rewards": REWARDS,
    "parallel": st.integers(1, 4),
    "exploration": st.sampled_from([0.0, 0.5, 2.0]),
}


def grown(
    scores: Sequence[float],
    depth: int,
    width: int,
    variant: RewardVariant,
    rewards: Sequence[float],
    parallel: int,
    exploration: float,
) -> MonteCarloTree:
    """A search with these rewards, the first branch of which is greedy."""
    settings: dict[str, Any] = {"width": width, "exploration": exploration, "variant": variant}
    tree = MonteCarloTree(found(*scores), depth, random=Random(7), **settings)
    left = list(rewards)
    batch = [tree.greedy()]
    while left:
        batch += [tree.sample() for _ in range(min(parallel, len(left)) - len(batch))]
        leaves = [leaf for leaf in batch if leaf is not None]
        if not leaves:
            break
        for leaf in leaves:
            tree.finish(leaf, RewardValue(left.pop(0)))
            leaf.answer = Answer(letters_of(leaf))
        batch = []
    return tree


def letters_of(node: TreeNode) -> str:
    return "".join("abcdefgh"[place] for place in node.path)


def leaves_below(node: TreeNode) -> list[TreeNode]:
    return [one for one in node.by_level() if not one.children]


@given(**SHAPES)
def test_tree_invariants(**shape: Any) -> None:
    tree = grown(**shape)
    for node in tree.root.by_level():
        below = leaves_below(node)
        assert node.visits == len(below)
        assert node.pending == 0
        rewards = [leaf.reward.value for leaf in below]
        assert min(rewards) - 1e-9 <= node.value <= max(rewards) + 1e-9
        assert len(set(node.path)) == len(node.path) <= tree.depth
        assert len(node.children) <= shape["width"]
        assert bool(node.children) == (len(node.path) < tree.depth)
        if shape["variant"] == "paper":
            assert len({child.index for child in node.children}) == len(node.children)
    ended = len(leaves_below(tree.root)) < len(shape["rewards"])
    assert (tree.sample() is None) or not ended


@given(**SHAPES)
def test_the_same_seed_grows_the_same_tree(**shape: Any) -> None:
    one, other = grown(**shape), grown(**shape)
    assert one.record(one.root) == other.record(other.root)


@given(**SHAPES)
def test_the_best_branch_has_the_largest_sum(**shape: Any) -> None:
    tree = grown(**shape)
    best = tree.best()
    assert best is not None
    sums = [sum(node.value for node in leaf.to_root()) for leaf in leaves_below(tree.root)]
    assert sum(node.value for node in best.to_root()) == max(sums)
    assert [one.example.answer for one in tree.demonstrations(best)] == list(letters_of(best))


@pytest.mark.parametrize("variant", VARIANTS)
def test_nearer_candidates_are_sampled_more_often(variant: RewardVariant) -> None:
    sampled = [0, 0, 0, 0]
    for seed in range(400):
        tree = MonteCarloTree(found(4, 3, 2, 1), 1, variant=variant, random=Random(seed))
        leaf = tree.sample()
        assert leaf is not None
        sampled[leaf.path[0]] += 1
    # s is 1, 2/3, 1/3 and 0, and 0.001 more: a has about a half of 400, b a third, c a sixth.
    assert sampled == sorted(sampled, reverse=True)
    assert 170 < sampled[0] < 230
    assert sampled[3] < 10

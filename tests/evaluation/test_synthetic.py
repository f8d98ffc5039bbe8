from __future__ import annotations

import sys
from collections import Counter

import pytest

from bottega.errors import MissingDependencyError, SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import check_benchmark_fit, default_methods
from bottega.evaluation.methods.specifications import LABEL_METHODS
from bottega.tasks import glyphs
from bottega.tasks.rules import RULES

RULES_SPEC = "rules:episodes=5,examples=6,queries=4"


@pytest.fixture(scope="module")
def rules() -> Benchmark:
    return load_benchmark(RULES_SPEC, seed=0, limit=10)


def test_synthetic_task_becomes_a_benchmark_with_episodes(rules: Benchmark) -> None:
    assert (len(rules.knowledge), len(rules.items), rules.labels) == (30, 10, ())
    assert rules.name == RULES_SPEC
    assert all(rules.episode_of[str(e.query.id)] == e.tags["episode"] for e in rules.knowledge)
    assert load_benchmark(RULES_SPEC, seed=0, limit=10) == rules


def test_limit_spreads_items_over_episodes(rules: Benchmark) -> None:
    assert len({item.tags["episode"] for item in rules.items}) > 3


@pytest.fixture
def few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate fewer characters: 500 take a second or two."""
    monkeypatch.setattr(glyphs, "MIN_EPISODES", 2)
    monkeypatch.setattr(glyphs, "MIN_QUERIES", 12)


@pytest.mark.usefixtures("few_characters")
def test_per_class_limits_each_episode() -> None:
    data = load_benchmark("glyphs:ways=20,shots=2", seed=0, per_class=1)
    kept = Counter((e.tags["episode"], e.answer) for e in data.knowledge)
    assert (len(kept), set(kept.values())) == (40, {1})


def test_noise_share_counts_only_remaining_examples() -> None:
    spec = "attributes:examples=60,queries=5"
    right, noisy = (
        {e.id: e.answer for e in load_benchmark(spec, seed=0, per_class=1, label_noise=p).knowledge}
        for p in (0.0, 0.5)
    )
    complete = {e.id: e.answer for e in load_benchmark(spec, seed=0).knowledge}
    assert len(noisy) < len(complete)
    assert right.items() <= complete.items()
    wrong = load_benchmark(spec, seed=0, per_class=1, label_noise=0.5).corrupted_count
    assert wrong == sum(answer != complete[id] for id, answer in noisy.items())


def test_per_class_keeps_all_passages() -> None:
    complete, limited = (load_benchmark("facts:episodes=1", seed=0, per_class=p) for p in (None, 1))
    assert len(complete.knowledge) == len(limited.knowledge)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_rule_noise_applies_another_rule(rules: Benchmark, share: float) -> None:
    noisy = load_benchmark(RULES_SPEC, seed=0, limit=10, label_noise=share)
    assert noisy.items == rules.items
    changed = [(a, b) for a, b in zip(rules.knowledge, noisy.knowledge, strict=True) if a != b]
    ambiguous = sum(len(_results(str(e.rationale))) == 1 for e in rules.knowledge)
    assert len(changed) == min(round(share * 30), 30 - ambiguous)
    assert noisy.corrupted_count == (len(changed) if share else None)
    for right, wrong in changed:
        assert right.answer != wrong.answer
        rule, left, other = str(wrong.rationale).split()
        assert str(RULES[rule](int(left), int(other))) == wrong.answer


def test_attribute_noise_stays_within_the_topic() -> None:
    spec = "attributes:examples=60,queries=5"
    right, noisy = (load_benchmark(spec, seed=0, label_noise=p) for p in (0, 0.5))
    changed = [a for a, b in zip(right.knowledge, noisy.knowledge, strict=True) if a != b]
    assert len(changed) == 30
    topics = {word: e.tags["topic"] for e in right.knowledge for word in (e.answer,)}
    assert all(topics[e.answer] == e.tags["topic"] for e in noisy.knowledge)


@pytest.mark.parametrize(
    "spec",
    [
        "glyphs:way=5",
        "glyphs:ways=many",
        "glyphs:ways=-1",
        "facts:ways",
        "glyphs:",
        "digits:",
        "glyphs:ways=5,",
        "glyphs:ways=5, ,shots=2",
        "glyphs:ways=5,ways=10",
        "digits:half=first,half=first",
        "rules:examples=²",
        f"glyphs:ways={'9' * 5000}",
        "glyphs:ways=9999999999",
        "digits:x",
        "digits:half=second,quarter=2",
    ],
)
def test_unknown_option_lists_valid_options(spec: str) -> None:
    with pytest.raises(SettingError) as raised:
        load_benchmark(spec, seed=0)
    assert "options of" in raised.value.hint


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("glyphs:", "an option is empty in 'glyphs:'"),
        ("rules:examples=9,,queries=2", "an option is empty in 'rules:examples=9,,queries=2'"),
        ("glyphs:ways=5,ways=10", "ways is set twice"),
    ],
)
def test_missing_or_duplicate_option_is_named(spec: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        load_benchmark(spec, seed=0)


@pytest.mark.parametrize(
    ("spec", "requested", "bound"),
    [
        ("glyphs:ways=100,shots=50", "127,500", "20,000"),
        ("rules:episodes=500,examples=200", "110,000", "20,000"),
        ("facts:episodes=500,queries=500", "250,000", "20,000"),
        ("attributes:examples=20000", "examples must be 1 to 1200, got 20000", "1200"),
        ("attributes:queries=1201", "queries must be 1 to 1200, got 1201", "1200"),
    ],
)
def test_too_many_images_are_rejected(spec: str, requested: str, bound: str) -> None:
    with pytest.raises(SettingError, match=requested) as raised:
        load_benchmark(spec, seed=0)
    assert bound in str(raised.value)


def test_noise_on_passages_raises() -> None:
    with pytest.raises(SettingError, match="got passages only"):
        load_benchmark("facts:episodes=1,queries=2", seed=0, label_noise=0.2)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_invalid_noise_raises(share: float) -> None:
    with pytest.raises(SettingError, match="label noise"):
        load_benchmark(RULES_SPEC, seed=0, label_noise=share)


def test_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("bottega.tasks.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match="torch"):
        load_benchmark("glyphs", seed=0)


def _results(rationale: str) -> set[int]:
    _, left, right = rationale.split()
    return {work(int(left), int(right)) for work in RULES.values()}


@pytest.mark.usefixtures("few_characters")
def test_glyphs_support_label_methods() -> None:
    data = load_benchmark("glyphs:ways=3", seed=0, limit=3)
    assert default_methods(data) == LABEL_METHODS
    check_benchmark_fit(RunConfig(methods=["vote", "balanced"]), data)

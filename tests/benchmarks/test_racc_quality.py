"""The variants of RACC's quality benchmark, and the difference of two of them over seeds."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.racc_quality import METHODS, VARIANTS, compare
from bottega.compression import CompressorConfig
from bottega.evaluation.compressor_plan import load_plan
from bottega.kv_prefix import Geometry
from training.compressor import TRAINING

PLAN = 'preset = "paper"\nbenchmark = "facts"\nout = "o"\n[training]\nsteps = 2\n'


def test_the_paper_variant_has_the_settings_of_the_preset(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(PLAN)
    plan, variant = load_plan(tmp_path / "c.toml"), VARIANTS["as in the paper"]
    settings = plan.settings
    assert replace(TRAINING, steps=2, **variant.training) == replace(
        plan.training, checkpoint_every=TRAINING.checkpoint_every
    )
    shape = CompressorConfig(8, Geometry(1, 1, 8), **variant.compressor)
    assert asdict(shape) == asdict(replace(plan.compressor, width=8, geometry=Geometry(1, 1, 8)))
    assert (variant.layer, variant.batch, variant.calibrated) == (settings.layer, 2, False)
    assert settings.pipe and variant.steps >= 2000


def test_seeds_are_compared_by_question(tmp_path: Path) -> None:
    correct = {("a b", 0): (1, 1, 1, 0), ("a b", 2): (1, 1, 0, 0), ("c", 0): (1, 0, 0, 0)}
    correct |= {("c", 1): (0, 0, 0, 0), ("c", 2): (1, 1, 0, 0)}  # seed 1 has no partner
    for (name, seed), values in correct.items():
        rows = [{"method": method, "correct": list(map(bool, values))} for method in METHODS]
        file = tmp_path / f"{name.replace(' ', '-')}-seed-{seed}.json"
        file.write_text(json.dumps({"rows": rows}))
    compared = [row for row in compare(tmp_path, "a b", "c") if row["method"] == "racc"]
    assert [row["seed"] for row in compared] == [0, 2, "all"]
    assert [row["value"] for row in compared] == [0.5, 0.0, 0.25]
    low, high = compared[2]["low"], compared[2]["high"]
    assert isinstance(low, float) and isinstance(high, float)
    assert 0 <= low < 0.25 < high <= 0.5

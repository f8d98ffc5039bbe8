from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks import racc
from benchmarks.racc import CACHED, CANDIDATES, CONCAT, ONLINE, STORED


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racc, "DECODER", {"num_hidden_layers": 1, "hidden_size": 32})
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setattr(racc, "HEADS", heads)
    monkeypatch.setattr(racc, "VOCABULARY", 1152)
    monkeypatch.setattr(racc, "LENGTH", 24)
    monkeypatch.setattr(racc, "TOKENS", 3)


@pytest.mark.usefixtures("small")
def test_racc_variants_agree(tmp_path: Path) -> None:
    bench = racc.build_bench(tmp_path)

    answers = {name: config().tolist() for name, config in bench.methods.items()}

    assert all(len(one[0]) == 3 for one in answers.values())
    assert answers[ONLINE] == answers[STORED] == answers[CACHED]
    assert bench.sizes["prompts, fp16"] == 16 * 32 * 2
    assert bench.sizes["prompts, int8"] == 16 * 32 + 16 * 4


@pytest.mark.usefixtures("small")
@pytest.mark.slow
def test_missed_threshold_is_reported_and_sets_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["racc.py", "--quick", "--json", str(file)])
    monkeypatch.setattr(racc, "BARS", {(CONCAT, STORED): 0.0, (CANDIDATES, CACHED): 1e6})

    with pytest.raises(SystemExit) as left:
        racc.main()

    assert left.value.code == 1
    shown = capsys.readouterr().out
    assert shown.count(": met") == shown.count(": MISSED") == 1
    assert [bar["met"] for bar in json.loads(file.read_text())["bars"]] == [
        True,
        False,
    ]


def test_ratios_are_taken_within_a_round() -> None:
    measured = {
        CONCAT: [4.0, 40.0, 4.0],
        CANDIDATES: [4.0, 4.0, 4.0],
        STORED: [0.8, 8.0, 0.8],
        CACHED: [1.0, 10.0, 1.0],
    }

    values = {bar["name"]: (bar["value"], bar["met"]) for bar in racc.verdicts(measured)}

    assert values == {
        f"{CONCAT} / {STORED}": (5.0, True),  # at least 4.3
        f"{CONCAT} / {CACHED}": (4.0, False),  # at least 5.0
        f"{CANDIDATES} / {CACHED}": (4.0, True),  # at least 4.0
    }


def test_operations_of_attention_are_counted_too() -> None:
    one = torch.randn(1, 2, 5, 8)

    assert racc.operations(lambda: one[0, 0] @ one[0, 0].T) == 2 * 5 * 8 * 5
    attended = racc.operations(lambda: F.scaled_dot_product_attention(one, one, one))
    assert attended == 2 * (2 * 2 * 5 * 8 * 5)

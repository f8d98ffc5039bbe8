"""Compressors and checkpoints written by commit fd291dc load, and training resumes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from bottega.compression import RaccModel, load, save
from bottega.compression.persistence import RENAMED
from bottega.compression.training import CHECKPOINT
from tests.compression.test_training import config_of, losses, ready, training_examples
from tests.compression.tiny_models import hyper, model, racc
from tests.paths import ROOT

STORED = ROOT / "tests" / "data" / "fd291dc" / "compressor"
EXPECTED = json.loads((STORED / "expected.json").read_text())
CONFIG = config_of(steps=4, initial_rate=0.0, hide_scores=0.5, distill=True, validate_every=1)


def resumed_losses(compressor: RaccModel, folder: Path) -> list[float]:
    return losses(compressor, CONFIG, folder, held_out=training_examples(998))


def test_compressor_loads_with_the_same_digest() -> None:
    saved = load(STORED)
    assert (saved.layer, saved.racc.config.blocks) == (1, 1)
    assert saved.digest == EXPECTED["digest"]  # stores of compressed passages name it
    assert saved.open(model().model, model().model).layer == 1


def test_saved_copy_has_current_names_and_the_same_digest(tmp_path: Path) -> None:
    saved = load(STORED)
    save(saved.racc, tmp_path, hyper=hyper(saved.layer), base=model().model)
    settings = json.loads((tmp_path / "compressor.json").read_text())
    assert not {*settings, *settings["compressor"]} & set(RENAMED)
    assert load(tmp_path).digest == EXPECTED["digest"]


def test_training_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    data = gzip.decompress((STORED / f"{CHECKPOINT}.gz").read_bytes())
    (tmp_path / CHECKPOINT).write_bytes(data)
    resumed, whole = racc(blocks=1), ready(blocks=1)
    assert resumed_losses(resumed, tmp_path) == pytest.approx(EXPECTED["losses"][2:], rel=1e-3)
    resumed_losses(whole, tmp_path / "whole")
    for name, weight in whole.state_dict().items():  # both keep the best weights
        torch.testing.assert_close(resumed.state_dict()[name], weight, atol=1e-3, rtol=1e-3)

"""Script that wrote the files of this folder with commit fd291dc; see README.md."""
# mypy: ignore-errors

import gzip
import json
import sys
from pathlib import Path

from bottega.compression.saving import load, save
from bottega.compression.training.checkpoints import NAME

from bottega.compression.training import train
from tests.compression import spoken
from tests.compression.test_training import course, lessons, losses, teaching


def calibrated():
    racc = spoken.racc(blocks=1)
    teaching().calibrate(racc, lessons(999, 40))
    return racc


class KilledError(Exception):
    pass


def kill(progress):
    if progress.step == 3:
        raise KilledError


out = Path(sys.argv[1])
settings = course(steps=4, first_rate=0.0, flat=0.5, taught=True, validate_every=1)
racc = calibrated()
expected = {"losses": losses(racc, settings, held_out=lessons(998))}
save(racc, out, hyper=spoken.hyper(1), base=spoken.model().model)
expected["digest"] = load(out).digest
(out / "expected.json").write_text(json.dumps(expected) + "\n")
try:
    train(
        calibrated(), teaching(), lessons, settings, folder=out, held_out=lessons(998), report=kill
    )
except KilledError:
    (out / f"{NAME}.gz").write_bytes(gzip.compress((out / NAME).read_bytes(), mtime=0))
    (out / NAME).unlink()

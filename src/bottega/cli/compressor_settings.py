"""What `bottega compress train` reads: one TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from bottega.errors import SettingError
from bottega.evaluation.searching import RETRIEVE
from bottega.gateway.config.reading import Place, Table, as_table, check_known, one_of, read, within
from bottega.naming import BUNDLED, check_torch

if TYPE_CHECKING:
    from bottega.compression import Shape
    from bottega.compression.training import Course

EXAMPLE = "docs/compression.md shows a whole file"


@dataclass(frozen=True)
class Settings:
    """`hyper` compresses for `model`, which does it itself without. `layer` is the one of `hyper`
    whose states are read. `calibrate` lessons are looked at before the first step, 0: none."""

    benchmark: str
    out: Path
    model: str = BUNDLED
    hyper: str | None = None
    layer: int = -1
    seed: int = within(0, 0, 2**63 - 1)
    passages: str | None = None
    retrieve: str = one_of("hybrid", *RETRIEVE)
    embed: str = BUNDLED
    shots: int = within(5, 1)
    hard: float = within(0.5, 0, 1)
    batch: int = within(2, 1)
    calibrate: int = within(256, 0)
    validate: int = within(0, 0)


@dataclass(frozen=True)
class Plan:
    """The shape's width and geometry are still to be told by the two models."""

    settings: Settings
    shape: Shape
    course: Course


def load_plan(file: Path) -> Plan:
    """Raises `SettingError` for all that can be seen before a model is loaded."""
    check_torch()
    from bottega.compression import Shape
    from bottega.compression.training import Course
    from bottega.prefixing import Geometry

    document, at = _parsed(file), Place(str(file))
    names = [one.name for one in fields(Settings)]
    check_known(document, [*names, "shape", "course"], at)
    top = {name: value for name, value in document.items() if name in names}
    _check_given(Settings, top, at)
    course = as_table(document.get("course", {}), at / "course")
    _check_given(Course, course, at / "course")
    told = {"width": 0, "geometry": Geometry(0, 0, 0)}
    plan = Plan(
        read(Settings, top, at),
        read(Shape, document.get("shape", {}), at / "shape", **told),
        read(Course, course, at / "course"),
    )
    _check_out(plan.settings.out, str(top["out"]), at / "out")
    _check_pairs(plan, at)
    return plan


def _parsed(file: Path) -> Table:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"{file} cannot be read: {reason}", hint=EXAMPLE) from error
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{file} is not TOML: {error}", hint=EXAMPLE) from error


def _check_given(kind: type[Settings] | type[Course], table: Table, at: Place) -> None:
    for one in fields(kind):
        if one.default is MISSING and one.name not in table:
            raise (at / one.name).error("is missing", hint=EXAMPLE)


def _check_out(out: Path, written: str, at: Place) -> None:
    if not written.strip():
        raise at.error("is empty", hint='name a folder: out = "compressor"')
    if out.exists() and not out.is_dir():
        raise at.error("is a file", hint='name a folder: out = "compressor"')


def _check_pairs(plan: Plan, at: Place) -> None:
    """Settings that make no sense without another."""
    if plan.settings.validate and not plan.course.validate_every:
        raise (at / "validate").error(
            "sets questions aside, and nobody asks them", hint="[course] validate_every = 100"
        )
    if plan.course.validate_every and not plan.settings.validate:
        raise (at / "course" / "validate_every").error(
            "needs questions that are set aside", hint="validate = 50"
        )

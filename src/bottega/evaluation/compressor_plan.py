"""Plan of a compressor's training: a TOML file, a preset and changes to both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from bottega._util.settings import (
    FilePath,
    SettingPath,
    check_names,
    one_of,
    parse_toml,
    read_settings,
    read_toml,
)
from bottega.errors import SettingError
from bottega.evaluation.config import Relevance
from bottega.knowledge.embedders.names import BUNDLED
from bottega.naming import check_torch
from bottega.recipes.cache_retrieval import BY_DRAFT
from bottega.recipes.cache_retrieval import RETRIEVE as ALL_RETRIEVE

if TYPE_CHECKING:
    from bottega.compression import CompressorConfig
    from bottega.compression.objective import TrainingConfig


RETRIEVE = tuple(name for name in ALL_RETRIEVE if name not in BY_DRAFT)
HELP = "see docs/compression.md for a complete file"
# The settings that the paper prints, with annotated answers and a random start. It prints no number
# of steps.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {
        "layer": -1,
        "shots": 5,
        "batch": 2,
        "calibrate": 0,
        "pipe": True,
        "compressor": {
            "document_prompts": 16,
            "query_prompts": 12,
            "prompting": "appended",
            "blocks": 3,
            "dcvq": True,
            "rgca": True,
            "start": "random",
        },
        "training": {
            "initial_rate": 1e-5,
            "learning_rate": 1e-4,
            "warmup_steps": 1000,
            "answer_weight": 1.0,
            "cache_weight": 0.0,
            "distill": False,
            "prdb": True,
            "hide_scores": 0.0,
        },
    }
}


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training, whose folder is `out`. `seed` seeds every random choice.

    `hyper` is the model that compresses, `model` by default; `layer` is the layer of `hyper` whose
    states are read. `batch` training examples are read at once, with `shots` passages each, found
    by `retrieve` and `embed`; if questions name their passages, these are from the same episode,
    and in the share `hard_negatives` similar to the right one. `validate` questions are held out.
    `calibrate` training examples set the scales and fit the start before the first step; 0 disables
    it. `relevance` replaces the benchmark's rule for relevant passages. With `pipe`, appended
    prompts start as the embeddings of a sentence, else they are random. `answer_tokens` is the
    maximum length of an answer; `preset` replaces defaults.
    """

    benchmark: str
    out: FilePath
    model: str = BUNDLED
    hyper: str | None = None
    layer: int = -1
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    passages: str | None = None
    relevance: Relevance | None = None
    retrieve: Annotated[str, one_of(*RETRIEVE)] = "hybrid"
    embed: str = BUNDLED
    shots: PositiveInt = 5
    hard_negatives: Annotated[float, Field(ge=0, le=1)] = 0.5
    batch: PositiveInt = 2
    calibrate: NonNegativeInt = 256
    validate: NonNegativeInt = 0
    pipe: bool = True
    answer_tokens: PositiveInt = 16
    preset: Literal["paper"] | None = None


@dataclass(frozen=True)
class Plan:
    """Settings, architecture and optimizer of a training. The models set the architecture's width
    and geometry later."""

    settings: TrainingSettings
    compressor: CompressorConfig
    training: TrainingConfig


def load_plan(
    file: Path, changes: Sequence[str] = (), options: Mapping[str, object | None] | None = None
) -> Plan:
    """Read the TOML file. `changes` (NAME=VALUE) override its settings, and `options` other than
    None override both. Raises `SettingError` for errors visible before a model is loaded."""
    document = read_toml(file, hint=HELP)
    for change in changes:
        document = _merged(document, _parsed(change))
    document |= {name: value for name, value in (options or {}).items() if value is not None}
    return read_plan(document, str(file))


def read_plan(document: Mapping[str, Any], name: str = "plan") -> Plan:
    """Return the plan with these settings, as in a TOML file. Errors call it `name`. Raises
    `SettingError` for errors visible before a model is loaded."""
    check_torch()
    from bottega.compression import CompressorConfig
    from bottega.compression.objective import TrainingConfig
    from bottega.kv_prefix import Geometry

    path, preset = SettingPath(name), document.get("preset")
    if isinstance(preset, str) and preset in PRESETS:
        document = _merged(PRESETS[preset], document)
    names = [one.name for one in fields(TrainingSettings)]
    check_names(document, [*names, "compressor", "training"], path)
    top = {name: value for name, value in document.items() if name in names}
    plan = Plan(
        read_settings(TrainingSettings, top, path, missing=HELP),
        training=read_settings(
            TrainingConfig,
            document.get("training", {}),
            path / "training",
            missing=HELP,
        ),
        compressor=read_settings(
            CompressorConfig,
            document.get("compressor", {}),
            path / "compressor",
            width=0,
            geometry=Geometry(0, 0, 0),
        ),
    )
    out, validate_every = plan.settings.out, plan.training.validate_every
    if not str(top["out"]).strip() or (out.exists() and not out.is_dir()):
        problem = "must be a folder, got a file" if out.is_file() else "is empty"
        raise (path / "out").error(problem, hint='name a folder: out = "compressor"')
    if plan.settings.validate and not validate_every:
        raise (path / "validate").error(
            "needs validate_every in [training]",
            hint="set validate_every = 100 in [training]",
        )
    if validate_every and not plan.settings.validate:
        raise (path / "training" / "validate_every").error(
            "needs validation questions", hint="set validate = 50"
        )
    if plan.compressor.prompting == "reading" and not plan.settings.pipe:
        raise (path / "pipe").error(
            "applies to appended prompts, got prompting 'reading'",
            hint='remove pipe, or set prompting = "appended"',
        )
    return plan


def _parsed(change: str) -> dict[str, Any]:
    """Return the table of a change such as training.prdb=false. Other values are text."""
    name, equals, value = change.partition("=")
    hint = "set e.g. --set training.prdb=false"
    if not (equals and name.strip()):
        raise SettingError(f"--set must be NAME=VALUE, got {change!r}", hint=hint)
    try:
        return parse_toml(f"{name} = {value}", "--set", hint=hint)
    except SettingError:
        quoted = value.strip().replace("\\", "\\\\").replace('"', '\\"')
        return parse_toml(f'{name} = "{quoted}"', f"--set {change}", hint=hint)


def _merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with the changes, also in tables within it."""
    merged = dict(table)
    for name, value in changes.items():
        below = merged.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = _merged(below, value)
        merged[name] = value
    return merged

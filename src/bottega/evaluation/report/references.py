"""Published results of the four papers, with other models, splits and prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

VISUAL_RAG, RCTS = "Visual RAG", "RCTS"
COT, RACC = "Cache-of-Thought", "RACC"
GEMINI = "Gemini 1.5 Pro"
FOLDERS = ("manyicl", "image-folder", "vl-icl")
# Default options of mmmu.
DEFAULTS = {"split": "dev", "images": "any"}
RCTS_METHODS = (
    ("zero-shot", 0, ("zero-shot",)),
    ("ICL, random retrieval", 3, ("random",)),
    ("vanilla RAG, top retrieval", 3, ("top-k",)),
    ("RCTS", 3, ("rcts",)),
)


@dataclass(frozen=True)
class Reference:
    """Published result; `value` is in percent, as printed.

    `method` is the paper's name, `ours` the corresponding methods here. `shots` None means the best
    of several numbers, or an unstated one. `options` are the required benchmark options, `metrics`
    the equivalent metrics here.
    """

    benchmark: str
    method: str
    shots: int | None
    model: str
    value: float
    paper: str
    table: str
    ours: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def column(self) -> str:
        return f"{self.model} ({self.paper}, {self.table})"


def references(spec: str, metrics: Sequence[str]) -> list[Reference]:
    """Return the published results for a benchmark specification and its metrics."""
    name, options = _named(spec)
    requested = DEFAULTS | options
    return [
        one
        for one in PUBLISHED
        if one.benchmark == name
        and not set(one.metrics).isdisjoint(metrics)
        and all(requested.get(option) == value for option, value in one.options.items())
    ]


def _named(spec: str) -> tuple[str, dict[str, str]]:
    """Parse a specification; for folders of images, the last part of the path is the name."""
    kind, _, rest = spec.partition(":")
    options = dict(re.findall(r"(\w+)\s*=\s*([\w-]+)", rest))
    if kind not in FOLDERS:
        return kind, options
    return re.sub(r"[^a-z0-9]", "", PurePath(rest.partition(",")[0]).name.lower()), options


def _visual_rag() -> Iterator[Reference]:
    columns = (
        ("zero-shot", 0, ("zero-shot",), GEMINI),
        ("many-shot ICL, random", None, ("random",), GEMINI),
        ("Visual RAG", None, ("visual-rag", "top-k"), GEMINI),
        ("retriever only", None, ("vote-strict",), "no model"),
        ("supervised", None, (), "best supervised"),
    )
    rows: dict[str, tuple[float | None, ...]] = {
        "ham10000": (33.33, 56.46, 56.67, 44.29, 96.49),
        "fives": (25.83, 55.00, 64.17, 45.83, 74.40),
        "chexpert": (22.16, 42.23, 42.43, None, 50.44),
        "terraincognita": (59.63, 66.67, 66.42, 41.04, 69.60),
        "ucmerced": (91.19, 98.57, 99.29, 86.51, 100.00),
        "eurosat": (36.24, 74.16, 83.22, 73.78, 99.24),
        "oxfordpets": (85.29, 97.43, 97.14, 80.40, 97.40),
        "dtd": (69.89, 83.19, 84.26, 61.70, 90.00),
    }
    for name, values in rows.items():
        metrics = ("macro_f1",) if name == "chexpert" else ("accuracy",)
        for (method, shots, ours, model), value in zip(columns, values, strict=True):
            if value is not None:
                yield Reference(
                    name, method, shots, model, value, VISUAL_RAG, "Table 2", ours, metrics
                )


def _rcts() -> Iterator[Reference]:
    models = ("Qwen2-VL 2B", "Qwen2-VL 7B", "InternVL2 8B")
    sets: dict[str, tuple[tuple[float, ...], ...]] = {
        "scienceqa": (
            (67.18, 80.33, 93.00),
            (70.10, 81.63, 93.14),
            (71.94, 86.68, 92.78),
            (78.99, 91.44, 94.20),
        ),
        "mmmu": (
            (44.00, 51.33, 48.00),
            (41.33, 47.33, 47.33),
            (42.67, 50.00, 46.67),
            (44.00, 53.33, 51.33),
        ),
        "mathvision": (
            (18.75, 22.04, 21.71),
            (17.76, 23.35, 21.05),
            (20.39, 24.67, 18.42),
            (22.04, 28.95, 24.01),
        ),
    }
    for name, rows in sets.items():
        options = {"split": "dev", "images": "any"} if name == "mmmu" else {}
        for (method, shots, ours), values in zip(RCTS_METHODS, rows, strict=True):
            for model, value in zip(models, values, strict=True):
                metrics = ("accuracy", f"{name}_accuracy", f"{name}_accuracy_official")
                yield Reference(
                    name, method, shots, model, value, RCTS, "Table 2", ours, metrics, options
                )
    for name, metric, column in (
        ("vizwiz", "vizwiz_accuracy", (66.49, 69.01, 69.89, 71.50)),
        ("vsr-mc", "accuracy", (51.22, 52.32, 52.92, 55.97)),
    ):
        for (method, shots, ours), value in zip(RCTS_METHODS, column, strict=True):
            yield Reference(
                name, method, shots, "Qwen2-VL 7B", value, RCTS, "Table 3", ours, (metric,)
            )


def _cache_of_thought() -> Iterator[Reference]:
    rows = (
        ("no in-context examples", 0, "Qwen2-VL 7B", (24.66, 34.42), ("zero-shot",)),
        ("image to image, full cache", None, "Qwen2-VL 7B", (37.67, 37.92), ("top-k",)),
        ("hierarchical clusters", None, "Qwen2-VL 7B", (39.04, 39.44), ()),
        ("alone", 0, "GPT-4o", (58.90, 64.87), ("zero-shot",)),
    )
    for method, shots, model, values, ours in rows:
        for split, value in zip(("dev", "validation"), values, strict=True):
            options = {"split": split, "images": "one"}
            metrics = ("mmmu_accuracy", "accuracy")
            yield Reference(
                "mmmu", method, shots, model, value, COT, "Table 1", ours, metrics, options
            )


def _vl_icl() -> Iterator[Reference]:
    for name, zero, most in (("clevr", 7.50, 28.00), ("textocr", 0.00, 6.50)):
        for method, shots, value, ours in (
            ("no in-context examples", 0, zero, ("zero-shot",)),
            ("best dense retrieval", None, most, ("top-k",)),
        ):
            yield Reference(
                name,
                method,
                shots,
                "OpenFlamingo 3B",
                value,
                COT,
                "Tables 2 and 3",
                ours,
                ("containment",),
            )


def _racc() -> Iterator[Reference]:
    vqa = ("vqa_accuracy_original", "vqa_accuracy_always-normalised")
    for method, model, value in (
        ("RACC-homo, WIT", "BLIP2-FlanT5XL", 55.07),
        ("RACC-homo, WIT", "InstructBLIP-FlanT5XL", 59.17),
        ("RACC-homo, GS", "BLIP2-FlanT5XL", 55.26),
        ("RACC-homo, GS", "InstructBLIP-FlanT5XL", 59.49),
        ("RACC-hetero, GS", "BLIP2-Vicuna7B", 60.67),
        ("RACC-hetero, GS", "InstructBLIP-Vicuna7B", 62.91),
    ):
        yield Reference("okvqa", method, 5, model, value, RACC, "Table 1", (), vqa)
    model = "InstructBLIP-FlanT5XL"
    yield Reference("okvqa", "RAVQA-v2, WIT", 5, model, 58.77, RACC, "Table 3", (), vqa)
    direct = ("direct_answer_original", "direct_answer_always-normalised")
    yield Reference(
        "aokvqa",
        "RACC-homo, GS (validation)",
        5,
        model,
        62.1,
        RACC,
        "Table 2",
        (),
        direct,
    )


PUBLISHED: tuple[Reference, ...] = (
    *_visual_rag(),
    *_rcts(),
    *_cache_of_thought(),
    *_vl_icl(),
    *_racc(),
)

"""Measure an exported model folder the way its users meet it: processor, template, `generate`."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, AutoProcessor

from training.pictures import held_out
from training.tower import EMBEDDING, HELD_OUT_SEED

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FIGURES = tuple("0123456789")
Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
BATCH = 25


def wilson(right: int, n: int) -> tuple[float, float]:
    """95 % interval of a share."""
    z, p = 1.96, right / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - half, middle + half


def line(name: str, right: int, n: int) -> str:
    low, high = wilson(right, n)
    return f"| {name} | {n} | {right / n:.3f} | {low:.3f}-{high:.3f} |"


@dataclass
class Demonstration:
    picture: Image.Image
    label: str


class Apprentice:
    """The exported model behind three calls."""

    def __init__(self, folder: Path) -> None:
        processors: Any = AutoProcessor  # untyped
        models: Any = AutoModelForImageTextToText
        self.processor = processors.from_pretrained(folder)
        self.model = models.from_pretrained(folder)

    @torch.no_grad()
    def embed(self, pictures: Sequence[Image.Image]) -> Floats:
        parts = []
        for start in range(0, len(pictures), 200):
            inputs = self.processor.image_processor(
                images=list(pictures[start : start + 200]), return_tensors="pt"
            )
            features = self.model.get_image_features(pixel_values=inputs["pixel_values"])
            parts.append(F.normalize(features.pooler_output[:, 0, :EMBEDDING], dim=-1))
        return torch.cat(parts).numpy()

    @torch.no_grad()
    def answer(self, conversations: list[list[dict[str, Any]]]) -> list[str]:
        inputs = self.processor.apply_chat_template(
            conversations,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
            processor_kwargs={"padding": True},
        )
        out = self.model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
        answers: list[str] = self.processor.batch_decode(out, skip_special_tokens=True)
        return answers

    def right(self, tasks: list[tuple[list[Demonstration], Image.Image]], gold: list[str]) -> int:
        """How many answers equal the gold label to the letter."""
        count = 0
        for start in range(0, len(tasks), BATCH):
            part = [conversation(*task) for task in tasks[start : start + BATCH]]
            wanted = gold[start : start + BATCH]
            count += sum(a == b for a, b in zip(self.answer(part), wanted, strict=True))
        return count


def conversation(
    demonstrations: list[Demonstration], query: Image.Image, question: str = ""
) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for shown in demonstrations:
        turns.append(_ask(shown.picture, question))
        turns.append({"role": "assistant", "content": [{"type": "text", "text": shown.label}]})
    return [*turns, _ask(query, question)]


def _ask(picture: Image.Image, question: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "image", "image": picture}]
    if question:
        content.append({"type": "text", "text": question})
    return {"role": "user", "content": content}


@dataclass
class Digits:
    """scikit-learn's 8 x 8 digits: 500 queries, the other 1297 are the knowledge base."""

    pictures: list[Image.Image]
    label: Indices
    unit: Floats
    queries: Indices
    base: Indices

    @classmethod
    def load(cls, apprentice: Apprentice, queries: int = 500) -> "Digits":
        data = load_digits()
        grey = (data.images * 255 / 16).round().astype(np.uint8)
        pictures = [Image.fromarray(image) for image in grey]
        order = np.random.default_rng(0).permutation(len(pictures))
        unit = apprentice.embed(pictures)
        return cls(pictures, data.target, unit, order[:queries], order[queries:])

    def nearest(self, query: int, k: int) -> Indices:
        """The k nearest of the base, the nearest last."""
        return self.base[np.argsort(self.unit[self.base] @ self.unit[query])[-k:]]


Chooser = Callable[[int, np.random.Generator], Indices]


def digit_settings(digits: Digits) -> dict[str, Chooser]:
    base, label = digits.base, digits.label
    by_class = [base[label[base] == c] for c in range(10)]
    return {
        "zero-shot": lambda q, rng: base[:0],
        "random 20": lambda q, rng: rng.choice(base, 20, replace=False),
        "balanced 10": lambda q, rng: rng.permutation([rng.choice(c) for c in by_class]),
        "retrieved 5": lambda q, rng: digits.nearest(q, 5),
        "retrieved 20": lambda q, rng: digits.nearest(q, 20),
    }


def evaluate_digits(apprentice: Apprentice, names: Sequence[str], question: str = "") -> list[str]:
    digits, rows = Digits.load(apprentice), []
    for setting, choose in digit_settings(digits).items():
        rng = np.random.default_rng(1)
        shown = [choose(int(q), rng) for q in digits.queries]
        tasks = [
            ([Demonstration(digits.pictures[i], names[digits.label[i]]) for i in chosen],
             digits.pictures[q])
            for q, chosen in zip(digits.queries, shown, strict=True)
        ]  # fmt: skip
        gold = [names[digits.label[q]] for q in digits.queries]
        n = len(tasks)
        rows.append(line(f"digits, {setting}", apprentice.right(tasks, gold), n))
        if shown[0].size:
            rows += _digit_baselines(digits, setting, shown)
    return rows


def _digit_baselines(digits: Digits, setting: str, shown: list[Indices]) -> list[str]:
    votes = nearest = 0
    for q, chosen in zip(digits.queries, shown, strict=True):
        labels = digits.label[chosen]
        votes += int(Counter(labels[::-1].tolist()).most_common(1)[0][0] == digits.label[q])
        closest = chosen[np.argmax(digits.unit[chosen] @ digits.unit[q])]
        nearest += int(digits.label[closest] == digits.label[q])
    n = len(shown)
    return [
        line(f"- majority vote of the same {setting}", votes, n),
        line(f"- nearest of the same {setting}", nearest, n),
    ]


def evaluate_held_out(apprentice: Apprentice) -> list[str]:
    """20-way one-shot on procedural classes that training never drew."""
    rows, judge = [], held_out(HELD_OUT_SEED)
    for name, tasks in vars(judge).items():
        rng, right, nearest, n = np.random.default_rng(0), 0, 0, 0
        for task in tasks:
            views = [[_picture(view) for view in klass] for klass in task]
            shown, asked = [v[0] for v in views], [v[1] for v in views]
            similarity = apprentice.embed(asked) @ apprentice.embed(shown).T
            nearest += int((similarity.argmax(1) == np.arange(len(views))).sum())
            labels = [f"kind {i}" for i in rng.permutation(len(views))]
            order = rng.permutation(len(views))
            known = [Demonstration(shown[i], labels[i]) for i in order]
            right += apprentice.right([(known, query) for query in asked], labels)
            n += len(views)
        rows.append(line(f"held-out {name}, 20-way one-shot", right, n))
        rows.append(line("- nearest of the same", nearest, n))
    return rows


def _picture(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def evaluate_speed(apprentice: Apprentice) -> list[str]:
    digits = Digits.load(apprentice)
    known = [Demonstration(digits.pictures[i], WORDS[digits.label[i]]) for i in digits.base[:10]]
    asked = [conversation(known, digits.pictures[q]) for q in digits.queries[:60]]
    apprentice.answer(asked[:2])
    one = min(_seconds(lambda a=a: apprentice.answer([a])) for a in asked[:20])  # type: ignore[misc]
    many = min(_seconds(lambda: apprentice.answer(asked)) for _ in range(3)) / len(asked)
    embedding = _seconds(lambda: apprentice.embed(digits.pictures))
    return [
        f"- one prompt with 10 demonstrations: {one * 1000:.0f} ms",
        f"- in a batch of {len(asked)}: {many * 1000:.1f} ms a query",
        f"- {len(digits.pictures)} digits embedded: {embedding:.1f} s",
    ]


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def evaluate(folder: Path) -> str:
    """Every figure of the model card, as Markdown."""
    apprentice = Apprentice(folder)
    head = ["| setting | n | accuracy | 95 % interval |", "|---|---|---|---|"]
    words = evaluate_digits(apprentice, WORDS, "Which digit is this?")
    figures = evaluate_digits(apprentice, FIGURES)
    return "\n".join(
        [
            *("Labels zero to nine, question before each picture:", "", *head, *words, ""),
            *("Labels 0 to 9, no question:", "", *head, *figures, ""),
            *("Procedural classes never drawn in training:", "", *head),
            *(*evaluate_held_out(apprentice), ""),
            *("Speed on one CPU thread, processor included:", "", *evaluate_speed(apprentice)),
        ]
    )

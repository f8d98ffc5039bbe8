"""VQA accuracy: what ten people answered, and how many of them say what the model says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from bottega.errors import SettingError
from bottega.evaluation.metrics.intervals import Estimate, mean
from bottega.evaluation.metrics.metric import Judged
from bottega.evaluation.metrics.vqa_text import normalised, one_line
from bottega.types import Answer, Example

# Query id to the annotators' answers.
References = Mapping[str, Sequence[str]]
Variant = Literal["original", "always-normalised"]
# So many annotators make an answer entirely right.
ENOUGH = 3


class Agreement(Protocol):
    def __call__(self, said: str, golds: Sequence[str], /) -> float: ...


class Annotated:
    """How far an answer agrees with its annotators', of whom each item has one at least."""

    def __init__(self, name: str, references: References, agreement: Agreement) -> None:
        self.name = name
        self._references = references
        self._agreement = agreement

    def annotators(self, item: Example) -> Sequence[str]:
        """What they said, empty for an item that nobody is known to have answered."""
        return self._references.get(item.query.id or "", ())

    def score(self, item: Example, answer: Answer, /) -> float:
        golds = self.annotators(item)
        if not golds:
            raise SettingError(
                f"{self.name} knows no annotators of {item.query.id!r}",
                hint="give it the references by the items' query ids",
            )
        return self._agreement(answer.text, golds) if answer.valid else 0.0

    def estimate(self, judged: Sequence[Judged], /, *, seed: int) -> Estimate:
        return mean([one.score for one in judged], seed=seed)


def vqa_accuracy(references: References, variant: Variant = "original") -> Annotated:
    """The mean over the annotators of min(1, others who say the same / 3).

    `original` is the VQA challenge's code, which normalises (`vqa_text`) only if the annotators
    differ: where all wrote "red", "Red" and "red." are wrong. `always-normalised` is what lmms-eval
    and most papers on large models do.
    """
    return Annotated(f"vqa_accuracy_{variant}", references, _VQA[variant])


def direct_answer(references: References, variant: Variant = "original") -> Annotated:
    """A-OKVQA's: min(1, annotators who say exactly the same / 3), nobody left out.

    The `original` compares the very characters.
    """
    return Annotated(f"direct_answer_{variant}", references, _DIRECT[variant])


def leave_one_out(matches: int, annotators: int) -> float:
    """Annotators are told apart by their place: told apart by what they said, as some code does,
    those who said the same with the same certainty would all be left out together."""
    by_those = matches * min(1.0, (matches - 1) / ENOUGH)
    by_the_others = (annotators - matches) * min(1.0, matches / ENOUGH)
    return (by_those + by_the_others) / annotators


def _original(said: str, golds: Sequence[str], /) -> float:
    said, golds = one_line(said), [one_line(gold) for gold in golds]
    if len(set(golds)) > 1:
        return _always_normalised(said, golds)
    return leave_one_out(golds.count(said), len(golds))


def _always_normalised(said: str, golds: Sequence[str], /) -> float:
    matches = [normalised(gold) for gold in golds].count(normalised(said))
    return leave_one_out(matches, len(golds))


def _exactly(said: str, golds: Sequence[str], /) -> float:
    return min(1.0, list(golds).count(said) / ENOUGH)


def _exactly_normalised(said: str, golds: Sequence[str], /) -> float:
    return _exactly(normalised(said), [normalised(gold) for gold in golds])


_VQA: Mapping[Variant, Agreement] = {
    "original": _original,
    "always-normalised": _always_normalised,
}
_DIRECT: Mapping[Variant, Agreement] = {
    "original": _exactly,
    "always-normalised": _exactly_normalised,
}

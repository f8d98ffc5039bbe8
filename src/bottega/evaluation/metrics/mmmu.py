"""MMMU's accuracy, over multiple-choice and open questions alike, and by subject."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from bottega.evaluation.metrics.intervals import Estimate, mean
from bottega.evaluation.metrics.metric import Judged
from bottega.parsing import open_candidates
from bottega.parsing.choices import open_forms
from bottega.types import Answer, Example

SUBJECT = "subject"


class MMMUAccuracy:
    """The official judgement. A choice must be the right option. An open answer is right if one of
    its candidates (`open_candidates`) is the gold number to two decimals, or holds a gold text:
    "30" is not in "300", but "gas" is in "gasoline".

    `golds` are all right answers of an item, by its query's id, where there is more than one.
    `drawn` only says in the name that unparsable replies were drawn, as the official code does;
    else they are wrong, as in Cache-of-Thought.
    """

    def __init__(self, golds: Mapping[str, Sequence[str]] | None = None, *, drawn: bool = False):
        self.name = "mmmu_accuracy_drawn" if drawn else "mmmu_accuracy"
        self._golds = golds or {}

    def score(self, item: Example, answer: Answer, /) -> float:
        if not answer.valid:
            return 0.0
        golds = self._golds.get(item.query.id or "", (item.answer,))
        if item.query.choices:
            return float(answer.text in golds)
        return float(_is_open_match(answer.text, golds))

    def estimate(self, judged: Sequence[Judged], /, *, seed: int) -> Estimate:
        return mean([one.score for one in judged], seed=seed)


def by_subject(judged: Sequence[Judged], *, seed: int) -> dict[str, Estimate]:
    """The mean score of each subject (the tag of that name), the subjects in their order."""
    scores: dict[str, list[float]] = defaultdict(list)
    for one in judged:
        scores[one.item.tags.get(SUBJECT, "")].append(one.score)
    return {subject: mean(scores[subject], seed=seed) for subject in sorted(scores)}


def _is_open_match(reply: str, golds: Sequence[str]) -> bool:
    right = [form for gold in golds for form in open_forms(gold)]
    texts = [form for form in right if isinstance(form, str)]
    return any(
        any(gold in said for gold in texts) if isinstance(said, str) else said in right
        for said in open_candidates(reply)
    )

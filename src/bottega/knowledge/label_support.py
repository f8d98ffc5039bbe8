"""Search for labels with which the other examples disagree."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from bottega.errors import SettingError
from bottega.knowledge.fitted_vote import VoteRule, leave_one_out, plain_leave_one_out
from bottega.knowledge.metric import MEAN_COUNT, Scatter
from bottega.knowledge.stores import RowStore, labels_by_id

MAX_EXAMPLES = 2000
# Of all rules tried on planted wrong labels, this one found most of them.
SHRINKAGE, NEIGHBOURS = 0.9, 50


@dataclass(frozen=True)
class LabelSupport:
    """Result of the vote of the other examples on one example: `support` is the share of its own
    `labels`, `likely_support` the largest share, which the labels `likely` have."""

    id: str
    labels: tuple[str, ...]
    support: float
    likely: tuple[str, ...]
    likely_support: float


def label_supports(rows: RowStore, *, seed: int = 0) -> list[LabelSupport]:
    """Return the examples whose own labels do not win the vote of the others, the smallest share
    first. A random sample of at most `MAX_EXAMPLES` labelled examples is compared.

    The only example of a label is left out: no other could support it. Examples that share an image
    do not vote for each other. The metric of each vote is fitted
    without the example. Raises `SettingError` without vectors, and with fewer than two labels.
    """
    labelled = labels_by_id(rows)
    view = next(iter(rows.views().values()), None)
    if view is None or len(set(labelled.values())) < 2:
        raise SettingError(
            f"labels are compared with each other, got fewer than two in {rows.name}",
            hint="add examples of another label",
        )
    ids = random.Random(seed).sample(list(labelled), min(MAX_EXAMPLES, len(labelled)))
    keys = rows.keys(ids)
    vectors = rows.vectors(keys.values(), view.number)
    ids = [id for id in ids if keys.get(id) in vectors]
    names = list(dict.fromkeys(labelled[id] for id in ids))
    number = {one: index for index, one in enumerate(names)}
    classes = np.array([number[labelled[id]] for id in ids])
    numbers = np.stack([vectors[keys[id]] for id in ids])
    scatter = Scatter.of(numbers, classes)
    row = {keys[id]: index for index, id in enumerate(ids)}
    excluded = np.zeros((len(ids), len(ids)), bool)
    for key, others in rows.same_image_keys(list(row)).items():
        excluded[row[key], [row[one] for one in others if one in row]] = True
    if scatter.has_no_scatter:
        found = plain_leave_one_out(numbers, classes, excluded)
    else:
        found = leave_one_out(scatter, SHRINKAGE, excluded)
    # Nothing supports the only example of a label, right or wrong.
    same = (classes[:, None] == classes) & ~excluded
    np.fill_diagonal(same, False)
    is_judged = same.any(axis=1)
    means = 0 if scatter.has_no_scatter else MEAN_COUNT
    shares = found.shares(classes, VoteRule(SHRINKAGE, NEIGHBOURS, means))
    own, best = shares[np.arange(len(ids)), classes], shares.argmax(axis=1)
    supports = [
        LabelSupport(id, names[mine], float(share), names[most], float(shares[index, most]))
        for index, (id, mine, share, most) in enumerate(zip(ids, classes, own, best, strict=True))
        if mine != most and is_judged[index]
    ]
    return sorted(supports, key=lambda one: one.support)

"""Chance that follows from what is asked, so that an order of questions changes nothing."""

from __future__ import annotations

import random

from bottega.types import Query


def lots_for(query: Query, seed: object) -> random.Random:
    hashes = ":".join(image.sha256 for image in query.images)
    return random.Random(f"{seed}:{query.text}:{hashes}")

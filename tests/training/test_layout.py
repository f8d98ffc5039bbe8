"""Slices of the hidden vector that embedders read."""

from __future__ import annotations

import numpy as np

from bottega.bundled import CLASS_FEATURES, TOKEN_CONCEPTS, TOKEN_IDENTITY, bundled_folder
from bottega.knowledge import TokenEmbedder
from bottega.types import Query
from training import architecture


def test_embedders_read_the_slices_of_the_architecture() -> None:
    assert CLASS_FEATURES == architecture.KEY
    assert architecture.TOKEN == TOKEN_IDENTITY
    assert TOKEN_CONCEPTS[0] == architecture.NAMED
    assert TOKEN_CONCEPTS[1] == slice(architecture.TOPIC.start, architecture.RULE.stop)


def test_bundled_words_include_paraphrases_and_names() -> None:
    words = TokenEmbedder(bundled_folder())
    texts = ("What shape is it?", "Tell me the outline.", "Tell me the hue.", "the home of babra")
    shape, outline, hue, home = words.embed([Query(text) for text in texts])
    paraphrase = words.embed([Query("We read that the dwelling of babra is named zapun")])[0]
    assert shape @ outline > 0.5 > shape @ hue
    assert home @ paraphrase > 0.5
    assert np.isfinite(paraphrase).all()

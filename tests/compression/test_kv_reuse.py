"""KV reuse equals the model's own keys and values of each passage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bottega.compression.hyper_model import ProcessorInputs, rows
from bottega.compression.prefixes import KVReuse
from bottega.errors import SettingError
from bottega.kv_prefix import KeyValues, forward, read
from bottega.prompting import AppendixAPrompter, InterleavedPrompter
from bottega.protocols import Prompter
from bottega.types import Candidate, Example, Prefix, Prompt, Query
from tests.builders import solid_image
from tests.compression.tiny_models import passages, word_encoder
from tests.kv_prefix.tiny_models import DECODERS, ENCODER_DECODERS, END, Tiny, tiny

QUERY = Query("where is the home of number 2")
IMAGE_QUERY = replace(QUERY, images=(solid_image(1),))


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def candidates(*numbers: int) -> list[Candidate]:
    texts = passages(10)
    # Different lengths: a wrong position would change the result.
    longer = [Query(texts[n].query.text + " indeed" * n) for n in numbers]
    return [Candidate(Example(one, "", id=one.text), 0.0) for one in longer]


def reuse(model: Tiny, prompt: Prompter | None = None, keep_mb: int = 1) -> KVReuse:
    ends = frozenset({END})
    return KVReuse(
        model.model, word_encoder(model), ends, prompt or InterleavedPrompter(), keep_mb=keep_mb
    )


def stacked(prefix: Prefix) -> KeyValues:
    return KeyValues(
        tuple((torch.tensor(k)[None], torch.tensor(v)[None]) for k, v in prefix.layers)
    )


def prompt_inputs(model: Tiny, query: Query, shown: Sequence[Candidate]) -> ProcessorInputs:
    return word_encoder(model)([InterleavedPrompter()(query, shown)])


def after_prefix(model: Tiny, prefix: Prefix, query: Query = QUERY) -> Tensor:
    """Return the logits of the question, without those of the opening."""
    inputs = dict(prompt_inputs(model, query, ()))
    inputs["attention_mask"] = inputs["attention_mask"].clone()
    inputs["attention_mask"][:, : prefix.opening] = 0
    return forward(model.model, stacked(prefix), inputs).logits[:, prefix.opening :]


@pytest.mark.parametrize("name", DECODERS)
def test_single_passage_prefix_equals_the_models_own(name: str) -> None:
    model, shown = tiny(name), candidates(3)

    prefix = reuse(model).prefix(QUERY, shown)

    whole = prompt_inputs(model, QUERY, shown)
    own = read(model.model, whole)
    for (keys, values), (own_keys, own_values) in zip(
        stacked(prefix).layers, own.layers, strict=True
    ):
        assert_close(keys, own_keys[:, :, : prefix.length])
        assert_close(values, own_values[:, :, : prefix.length])
    logits = forward(model.model, KeyValues.none(own.geometry, 1), whole).logits
    assert_close(after_prefix(model, prefix), logits[:, prefix.length :])


def test_reuse_equals_concatenation_without_cross_passage_attention() -> None:
    model, shown = tiny("llava"), candidates(2, 0, 5)
    prefix = reuse(model).prefix(QUERY, shown)

    ids = prompt_inputs(model, QUERY, shown)["input_ids"]
    blind, whole = (
        model.model(input_ids=ids, attention_mask=one).logits[:, prefix.length :]
        for one in masks(model, shown, ids.shape[1])
    )
    assert_close(after_prefix(model, prefix), blind)
    assert not torch.allclose(after_prefix(model, prefix), whole, atol=1e-2)


def masks(model: Tiny, shown: Sequence[Candidate], length: int) -> tuple[Tensor, Tensor]:
    """Return attention masks without and with attention to earlier passages."""
    every = torch.ones(length, length, dtype=torch.bool).tril()
    sees, start = every.clone(), 1  # <s>
    alone = len(rows(prompt_inputs(model, QUERY, ()))[0])
    for one in shown:
        stop = start + len(rows(prompt_inputs(model, QUERY, [one]))[0]) - alone
        sees[start:stop, 1:start] = False
        start = stop
    return tuple(  # type: ignore[return-value]
        torch.zeros(1, 1, length, length).masked_fill(~one, -torch.inf) for one in (sees, every)
    )


def test_passages_keep_their_order() -> None:
    model = tiny("llava")
    one, other = candidates(1, 4)
    lengths = [reuse(model).prefix(QUERY, [each]).length - 1 for each in (one, other)]

    first, second = (reuse(model).prefix(QUERY, some) for some in ([one, other], [other, one]))

    alone = reuse(model).prefix(QUERY, [one])
    values = [torch.tensor(prefix.layers[0][1]) for prefix in (alone, first, second)]
    keys = [torch.tensor(prefix.layers[0][0]) for prefix in (alone, first, second)]
    own = slice(1, 1 + lengths[0])
    later = slice(1 + lengths[1], 1 + sum(lengths))
    torch.testing.assert_close(keys[1][:, own], keys[0][:, own])
    # In the first layer, keys depend on the position and values do not.
    assert_close(values[2][:, later], values[0][:, own])
    assert not torch.allclose(keys[2][:, later], keys[0][:, own], atol=1e-2)


def test_passage_is_read_once_per_position() -> None:
    model = tiny("llava")
    reads: list[int] = []
    hook = model.model.register_forward_hook(lambda *_: reads.append(1))
    try:
        again = reuse(model)
        first = again.prefix(QUERY, candidates(1, 2))
        second = again.prefix(Query("another question"), candidates(1, 2))
        assert len(reads) == 2
        third = again.prefix(QUERY, candidates(2, 1))
        assert len(reads) == 4
        uncached = reuse(model, keep_mb=0)
        for _ in range(2):
            uncached.prefix(QUERY, candidates(1, 2))
        assert len(reads) == 8
    finally:
        hook.remove()
    assert (first.layers[1][0] == second.layers[1][0]).all()
    assert first.length == third.length


def test_kv_cache_is_bounded() -> None:
    cached = reuse(tiny("llava"))
    for number in range(200):
        cached.prefix(Query("where"), candidates(number % 10, (number * 7 + number // 10) % 10))

    held = sum(one.nbytes for one in cached._cache.values())
    assert 0 < held == cached._cache.size <= 1024 * 1024


@pytest.mark.parametrize("name", ["llava", "smolvlm", "qwen2_5_vl"])
def test_question_follows_its_image(name: str) -> None:
    model, shown = tiny(name), candidates(3)
    prefix = reuse(model).prefix(IMAGE_QUERY, shown)

    logits = model.model(**prompt_inputs(model, IMAGE_QUERY, shown)).logits[:, prefix.length :]
    assert_close(after_prefix(model, prefix, IMAGE_QUERY), logits)


def test_passages_are_read_with_their_images() -> None:
    model = tiny("llava")
    described = Query("this is number 3", (solid_image(4),))
    shown = [Candidate(Example(described, ""), 0.0)]
    prefix = reuse(model).prefix(QUERY, shown)

    logits = model.model(**prompt_inputs(model, QUERY, shown)).logits[:, prefix.length :]
    assert_close(after_prefix(model, prefix), logits)


@pytest.mark.parametrize("prompt", [InterleavedPrompter(), AppendixAPrompter()])
def test_demonstrations_include_their_answers(prompt: Prompter) -> None:
    model = tiny("llava")
    cached = [
        Candidate(Example(Query(f"what is number {n}", choices=QUERY.choices), "three"), 0.0)
        for n in range(2)
    ]

    prefix = reuse(model, prompt).prefix(QUERY, cached)

    with_passages, without = (
        rows(word_encoder(model)([prompt(QUERY, some)]))[0] for some in (cached, [])
    )
    assert prefix.length - prefix.opening == len(with_passages) - len(without)


def test_prompt_with_other_passage_rendering_is_an_error() -> None:
    def numbered(query: Query, shown: Sequence[Candidate]) -> Prompt:
        named = [
            replace(one, example=replace(one.example, query=Query(f"{index}: a passage")))
            for index, one in enumerate(shown)
        ]
        return InterleavedPrompter()(query, named)

    with pytest.raises(SettingError, match="each passage identically") as refused:
        reuse(tiny("llava"), numbered).prefix(QUERY, candidates(1, 2))
    assert "interleaved" in refused.value.hint


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_models_cannot_reuse_kv(name: str) -> None:
    with pytest.raises(SettingError, match="needs a decoder-only model, got"):
        reuse(tiny(name))

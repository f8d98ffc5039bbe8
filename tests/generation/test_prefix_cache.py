from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bottega.generation.kv_caches import TOKEN_BYTES, IntArray, PrefixCache
from bottega.generation.tokenization import TokenizedPrompt

LAYERS, HEADS, WIDTH = 2, 2, 3
A_TOKEN = 2 * LAYERS * HEADS * WIDTH * 4 + TOKEN_BYTES
WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


def states(tokens: list[int]) -> torch.Tensor:
    """Of each token what follows from all up to it."""
    seen = [float(hash(tuple(tokens[: end + 1])) % 10_007) for end in range(len(tokens))]
    return torch.tensor(seen)[None, None, :, None].repeat(2 * LAYERS, HEADS, 1, WIDTH)


def numbers(tokens: list[int]) -> IntArray:
    return np.array(tokens, np.int64)


def add(prefixes: PrefixCache, tokens: list[int]) -> None:
    cached = prefixes.longest(numbers(tokens))
    after = np.arange(1, len(tokens) + 1)
    prefixes.add(numbers(tokens), states(tokens)[:, :, cached:].clone(), after[cached:])


def distinct(sequences: list[list[int]]) -> int:
    return len({tuple(one[:end]) for one in sequences for end in range(1, len(one) + 1)})


@given(st.lists(WORDS, max_size=8), WORDS)
def test_added_tokens_are_found(sequences: list[list[int]], query: list[int]) -> None:
    prefixes = PrefixCache(1 << 20)
    for one in sequences:
        add(prefixes, one)
    for one in [*sequences, query]:
        length = prefixes.longest(numbers(one))
        starts = {tuple(other[:length]) for other in sequences}
        assert not length or tuple(one[:length]) in starts
        assert length == len(one) or tuple(one[: length + 1]) not in {
            tuple(other[: length + 1]) for other in sequences
        }
        for end in range(length + 1):
            parts, after = prefixes.states(numbers(one[:end]))
            assert after == end
            assert torch.equal(torch.cat([states([]), *parts], dim=2), states(one[:end]))
    assert prefixes.nbytes == distinct(sequences) * A_TOKEN


@given(st.lists(WORDS, min_size=1, max_size=10), st.integers(0, 12))
def test_memory_is_bounded_and_the_latest_entry_stays(
    sequences: list[list[int]], room: int
) -> None:
    prefixes = PrefixCache(room * A_TOKEN)
    assert prefixes.capacity(A_TOKEN - TOKEN_BYTES) == room
    for one in sequences:
        add(prefixes, one)
        prefixes.trim()
        assert prefixes.nbytes <= room * A_TOKEN
        if len(one) <= room:
            assert prefixes.longest(numbers(one)) == len(one)
    cached = [one[: prefixes.longest(numbers(one))] for one in sequences]
    assert prefixes.nbytes == distinct(cached) * A_TOKEN


def test_recently_used_nodes_are_dropped_last() -> None:
    prefixes = PrefixCache(6 * A_TOKEN)
    for one in ([1, 1], [2, 2], [3, 3]):
        add(prefixes, one)
    prefixes.states(numbers([1, 1]))
    add(prefixes, [4])
    prefixes.trim()
    assert [prefixes.longest(numbers(one)) for one in ([1, 1], [2, 2], [3, 3], [4])] == [2, 0, 2, 1]


def test_dropping_frees_memory() -> None:
    prefixes = PrefixCache(4 * A_TOKEN)
    add(prefixes, [1, 2, 3, 4])
    add(prefixes, [1, 2, 5])
    prefixes.trim()
    parts, _ = prefixes.states(numbers([1, 2, 5]))
    assert (
        prefixes.nbytes == sum(part.untyped_storage().nbytes() for part in parts) + 3 * TOKEN_BYTES
    )


def tokenized(text: str) -> TokenizedPrompt:
    """An image is a capital, written once for each of its tokens."""
    ids = numbers([ord(one) for one in text])
    positions = np.flatnonzero([one.isupper() for one in text])
    images = tuple(dict.fromkeys(one for one in text if one.isupper()))
    ends = tuple(np.cumsum([text.count(one) for one in images]).tolist())
    return TokenizedPrompt(ids, ids, positions, images, ends)


@pytest.mark.parametrize(
    ("text", "cuts"),
    [("abc", [0, 1, 2, 2]), ("aBBBc", [0, 1, 1, 1, 4, 4]), ("BBtEECa", [0, 0, 2, 3, 3, 5, 6, 6]),
     ("BtBa", [0, 0, 0, 3, 3])],
)  # fmt: skip
def test_cuts_split_no_image_and_leave_a_token(text: str, cuts: list[int]) -> None:
    assert [tokenized(text).cut(length) for length in range(len(text) + 1)] == cuts


PARTS = st.lists(st.sampled_from(["a", "bc", "C", "DD", "EEE", "FtF"]), unique=True, min_size=1)


@given(PARTS.map("".join), st.integers(0, 12))
def test_every_image_is_on_one_side_of_a_cut(text: str, length: int) -> None:
    row = tokenized(text)
    cut = row.cut(length)
    assert (*row.until(cut).images, *row.images_from(cut)) == row.images
    assert len(row.until(cut)) == cut <= length

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.generation.sampling import GumbelSampler, SampleRow, StopCriterion, to_completion
from bottega.types import Sampling

CPU = torch.device("cpu")
LOGITS = torch.tensor([1.0, 0.0, 2.0, -1.0])


def choose(rows: list[SampleRow]) -> tuple[list[int], list[list[float]]]:
    sampler = GumbelSampler(rows, CPU)
    prompt = torch.zeros((len(rows), 3), dtype=torch.long)
    chosen = sampler(prompt, LOGITS.repeat(len(rows), 1)).argmax(dim=-1)
    return chosen.tolist(), sampler.logprobs(chosen)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_models_distribution(temperature: float) -> None:
    rows = [SampleRow(Sampling(temperature, seed=5), index) for index in range(4000)]
    chosen, _ = choose(rows)
    frequencies = torch.bincount(torch.tensor(chosen), minlength=4) / len(rows)
    expected = torch.softmax(LOGITS / temperature, dim=-1)
    assert torch.allclose(frequencies, expected, atol=0.035)


def test_rows_do_not_disturb_each_other() -> None:
    seeded = SampleRow(Sampling(1.0, seed=3), 1)
    alone, _ = choose([seeded])
    together, logprobs = choose(
        [SampleRow(Sampling()), SampleRow(Sampling(0.7)), seeded, SampleRow(Sampling(9.0))]
    )
    assert (together[0], together[2]) == (2, alone[0])
    for token, (logprob,) in zip(together, logprobs, strict=True):
        assert logprob == pytest.approx(float(torch.log_softmax(LOGITS, -1)[token]), abs=1e-5)


@given(st.none() | st.integers(-(2**70), 2**70), st.integers(0, 50))
def test_any_integer_is_a_valid_seed(seed: int | None, index: int) -> None:
    generator = SampleRow(Sampling(1.0, seed=seed), index).noise(CPU)
    assert generator is not None


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.integers(1, 9),
    st.lists(st.sampled_from(["a", "b", "cd", "e"]), max_size=2).map(tuple),
)
def test_end_tokens_limits_and_stops_cut_the_text(
    tokens: list[int], limit: int, stop: tuple[str, ...]
) -> None:
    row = SampleRow(Sampling(max_tokens=limit, stop=stop))
    logprobs = [-1.0] * len(tokens)
    completion, count = to_completion(
        tokens, logprobs, frozenset([0]), row, lambda made: "".join("xabcde"[i] for i in made)
    )
    assert "x" not in completion.text  # token 0 is the end
    assert not any(word in completion.text for word in stop)
    assert count <= min(limit, len(tokens))
    assert completion.logprob == -count
    assert len(completion.text) <= count


def test_a_stopped_row_keeps_its_number_of_tokens() -> None:
    rows = [SampleRow(Sampling(max_tokens=3, stop=("b",))), SampleRow(Sampling(max_tokens=3))]
    criterion = StopCriterion(rows, 1, lambda made: "".join("xab"[i] for i in made))
    ids = torch.tensor([[9, 1, 2, 0], [9, 1, 1, 1]])  # the first row is padded with 0
    for length in (2, 3, 4):
        criterion(ids[:, :length], None)
    assert criterion.counts == [2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": -1},
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
    ],
)
def test_impossible_sampling_settings_raise(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(wrong))) as caught:
        Sampling(**wrong)
    assert "or more" in f"{caught.value} {caught.value.hint}"

from __future__ import annotations

import pytest

from bottega.gateway.config.overrides import Overrides, read_overrides
from bottega.openai_api.errors import ApiError

TIERS = {"bottega": "", "bottega/apprentice": "apprentice", "bottega/master": "master", "gpt": ""}


@pytest.mark.parametrize(
    ("model", "headers", "expected"),
    [
        ("bottega", {}, Overrides()),
        ("gpt", {}, Overrides()),
        ("bottega/master", {}, Overrides(tier="master")),
        ("bottega:shots=0,no-store", {}, Overrides(shots=0, store=False)),
        ("bottega/master:no-replay", {}, Overrides(tier="master", replay=False)),
        ("bottega", {"x-bottega-route": "apprentice"}, Overrides(tier="apprentice")),
        ("bottega", {"x-bottega-master-rate": "0.25"}, Overrides(master_rate=0.25)),
        ("bottega:shots=2", {"x-bottega-shots": "5"}, Overrides(shots=5)),
        ("bottega", {"x-bottega-namespace": "a/b"}, Overrides(namespace="a/b")),
        (
            "bottega",
            {"x-bottega-cache": "no-store, no-retrieve,no-replay"},
            Overrides(store=False, retrieve=False, replay=False),
        ),
    ],
)
def test_overrides_by_suffix_and_header(
    model: str, headers: dict[str, str], expected: Overrides
) -> None:
    assert read_overrides(model, headers, TIERS) == expected


@pytest.mark.parametrize(
    ("model", "headers", "code"),
    [
        ("gpt-9", {}, "model_not_found"),
        ("bottega/nobody", {}, "model_not_found"),
        ("bottega:shots=many", {}, "invalid_override"),
        ("bottega:shots=-1", {}, "invalid_override"),
        ("bottega:shots=1000", {}, "invalid_override"),
        ("bottega:storing", {}, "invalid_override"),
        ("bottega", {"x-bottega-master-rate": "1.5"}, "invalid_override"),
        ("bottega", {"x-bottega-master-rate": "nan"}, "invalid_override"),
        ("bottega", {"x-bottega-route": "nobody"}, "invalid_override"),
        ("bottega", {"x-bottega-namespace": ""}, "invalid_override"),
        ("bottega", {"x-bottega-upstream": "http://evil"}, "invalid_override"),
    ],
)
def test_invalid_override_is_rejected(model: str, headers: dict[str, str], code: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_overrides(model, headers, TIERS)
    assert refused.value.code == code
    assert refused.value.hint


def test_model_name_may_contain_a_colon() -> None:
    assert read_overrides("qwen2.5vl:7b", {}, {"qwen2.5vl:7b": ""}) == Overrides()

from __future__ import annotations

from typing import Any

import pytest

from bottega.errors import SettingError
from bottega.types import Sampling


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
    assert "or more" in caught.value.hint

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, PositiveInt

from bottega._util.settings import (
    FilePath,
    SettingPath,
    TextList,
    check_settings,
    one_of,
    read_settings,
    read_toml,
)
from bottega.errors import SettingError

PATH = SettingPath("a.toml", "oven")


@dataclass(frozen=True)
class Oven:
    name: str
    trays: PositiveInt = 2
    heat: Annotated[float, Field(gt=0, le=300)] = 180.0
    mode: Literal["fan", "grill"] = "fan"
    fuel: Annotated[str, one_of("gas", "wood")] = "gas"
    tags: TextList = ()
    log: FilePath | None = None
    more: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self)


def rejected(**values: object) -> tuple[str, str]:
    with pytest.raises(SettingError) as caught:
        read_settings(Oven, {"name": "x", **values}, PATH)
    return str(caught.value), caught.value.hint


def test_values_of_a_table_become_fields() -> None:
    table = {"name": "x", "heat": 200, "tags": ["a"], "log": "~/log", "fuel": "wood"}
    oven = read_settings(Oven, table, PATH)
    assert oven == Oven("x", 2, 200.0, "fan", "wood", ("a",), Path("~/log").expanduser())
    assert isinstance(oven.heat, float)


def test_defaults_apply_without_a_table() -> None:
    assert read_settings(Oven, {}, PATH, name="x") == Oven("x")


def test_a_table_cannot_set_fixed_fields() -> None:
    with pytest.raises(SettingError, match=r"oven\.name is not a setting"):
        read_settings(Oven, {"name": "x"}, PATH, name="y")


def test_a_required_field_is_reported_with_the_hint() -> None:
    with pytest.raises(SettingError, match=r"a\.toml: oven\.name is missing") as caught:
        read_settings(Oven, {}, PATH, missing="see the manual")
    assert caught.value.hint == "see the manual"


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"tray": 1}, "tray is not a setting", "did you mean trays?"),
        ({"trays": 0}, "trays must be at least 1, got 0", "write trays = 1"),
        ({"trays": 1.5}, "trays must be a whole number, got 1.5", "write trays = 1"),
        ({"trays": False}, "trays must be a whole number, got false", "write trays = 1"),
        ({"heat": 0.0}, "heat must be more than 0, got 0.0", "set heat above 0"),
        ({"heat": 301}, "heat must be at most 300, got 301", "write heat = 300"),
        ({"heat": float("inf")}, "heat must be a finite number, got inf", "write heat = 1.0"),
        ({"mode": "gril"}, "mode must be one of fan, grill, got 'gril'", "did you mean grill?"),
        ({"mode": 3}, "mode must be one of fan, grill, got 3", "use one of fan, grill"),
        ({"fuel": "god"}, "fuel must be one of gas, wood, got 'god'", "use one of gas, wood"),
        ({"tags": "a"}, "tags must be a list, got text", "write tags = [...]"),
        ({"tags": ["a", 1]}, "tags item 2 must be text, got 1", 'write tags = ["..."]'),
        ({"log": 3}, "log must be text, got 3", 'write log = "..."'),
        ({"more": [1]}, "more must be a table, got a list", "write more = { ... }"),
        ({"name": []}, "name must be text, got a list", 'write name = "..."'),
    ],
)
def test_errors_name_key_value_and_allowed_values(
    values: dict[str, object], message: str, hint: str
) -> None:
    assert rejected(**values) == (f"a.toml: oven.{message}", hint)


def test_text_of_the_wrong_type_is_not_shown() -> None:
    for name in ("trays", "heat", "tags", "more"):
        message, hint = rejected(**{name: "hunter2"})
        assert "hunter2" not in message + hint


def test_objects_made_in_python_are_checked() -> None:
    with pytest.raises(SettingError, match=r"^trays must be at least 1, got 0\n"):
        Oven("x", trays=0)
    with pytest.raises(SettingError, match=r"^mode must be one of fan, grill, got 'steam'\n"):
        Oven("x", mode="steam")  # type: ignore[arg-type]


def test_the_table_itself_must_be_a_table() -> None:
    with pytest.raises(SettingError, match=r"a\.toml: oven must be a table, got 3"):
        read_settings(Oven, 3, PATH)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("x = 1", encoding="utf-8-sig")
    assert read_toml(tmp_path / "a.toml", hint="") == {"x": 1}

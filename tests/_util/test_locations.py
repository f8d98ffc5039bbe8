from __future__ import annotations

from pathlib import Path

import pytest

from bottega._util.locations import StoreLocation
from bottega.errors import SettingError


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@h:5433/d", "postgresql://me@h:5433/d"),
        ("postgresql://me:sec%40ret@h/d?sslmode=require", "postgresql://me@h/d?sslmode=require"),
        ("postgresql://:secret@h/d", "postgresql://h/d"),
        ("postgresql://h/d?password=secret", "postgresql://h/d"),
        ("postgresql://h/d?pass%77ord=secret&user=me", "postgresql://h/d?user=me"),
        ("postgres://h/d?sslpassword=secret", "postgres://h/d"),
        ("postgresql://me:a:b@[::1]:5433/d", "postgresql://me@[::1]:5433/d"),
    ],
)
def test_passwords_are_refused_as_arguments_and_hidden(url: str, shown: str) -> None:
    location = StoreLocation(url)
    assert str(location) == shown and location.target == url
    assert repr(location) == f"StoreLocation({shown!r})"
    with pytest.raises(SettingError, match="password") as caught:
        StoreLocation.from_argument(url)
    assert shown in str(caught.value) and "PGPASSWORD" in caught.value.hint
    assert "secret" not in str(caught.value)
    assert StoreLocation.from_argument(shown).target == shown


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://[::1/d",
        "postgresql://h:port/d",
        "postgresql://me:p[secret@h/d",
        "postgresql://me:p@a/secret@h/d",
        "postgresql://me:p?secret@h/d",
        "postgresql://me:p#secret@h/d",
        "postgresql+psycopg2://me:secret@h/d",
        "mysql://me:secret@h/d",
    ],
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(SettingError) as caught:
        StoreLocation.from_argument(url)
    assert "secret" not in str(caught.value) + caught.value.hint
    assert "postgresql://user@host" in caught.value.hint


def test_files(tmp_path: Path) -> None:
    location = StoreLocation.from_argument(str(tmp_path / "k.db"))
    assert location.file == tmp_path / "k.db"
    assert not location.exists() and not location.may_hold_examples()
    location.file.touch()
    assert location.exists() and not location.may_hold_examples()
    location.file.write_text("x")
    assert location.may_hold_examples()

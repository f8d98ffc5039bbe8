"""Measurements of made-up sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from meters.source import measure, read


def lines_of(text: str) -> int:
    return read("a.py", text).lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ("x = 1\n\n# comment\ny = 2  # comment\n", 2),
        ('"""Docstring\nof two lines."""\nx = 1\n', 1),
        ('x = """a\n\nb"""\n', 2),
        ('class A:\n    """Doc."""\n\n    def f(self):\n        """Doc."""\n        return 1\n', 3),
        ('try:\n    x()\nexcept E:\n    def f():\n        "Doc."\n', 4),
    ],
)
def test_blank_lines_comments_and_docstrings_are_not_code(text: str, lines: int) -> None:
    assert lines_of(text) == lines


def test_functions_have_code_lines_and_parameters() -> None:
    text = (
        "class A:\n"
        "    async def f(self, a, /, b, *rest, c=1, **more):\n"
        '        """Doc.\n'
        '        """\n'
        "        # comment\n"
        "        return [\n"
        "            a,\n"
        "        ]\n"
        "def g(a, b): return a\n"
    )
    functions = read("b/a.py", text).functions
    assert functions == (("b/a.py:2 f", 4, 3), ("b/a.py:9 g", 1, 2))


def test_types_are_classes_and_aliases_at_the_top() -> None:
    text = (
        "class A:\n    class Inner: ...\n"
        "class URL: ...\n"
        "Alias = dict[str, int]\n"
        "_Item: TypeAlias = int\n"
        "LIMIT = 1\n"
        "T = TypeVar('T')\n"
        "app = App()\n"
        "def f():\n    class Local: ...\n"
    )
    assert read("a.py", text).types == ("A", "URL", "Alias", "_Item")


@pytest.mark.parametrize(
    ("text", "late"),
    [
        ("LIMIT = 1\nclass A: ...\n", ()),
        ("class A: ...\nLIMIT = 1\n_B, C2 = 1, 2\n", ("LIMIT", "_B", "C2")),
        ("class A: ...\nlog = logging.getLogger(__name__)\n", ("log",)),
        ("class A: ...\nNONE = A()\nALL: list[int] = [NONE]\n", ()),
        ("class A: ...\ndef f(): ...\nTABLE = {1: f}\n", ()),
        ("def f(): ...\nclass A: ...\nTABLE = {1: f}\n", ("TABLE",)),
        ("class A: ...\nAlias = list[int]\nT = TypeVar('T')\nstate = []\nX: int\n", ()),
    ],
)
def test_constants_below_a_class_that_do_not_need_it_are_late(
    text: str, late: tuple[str, ...]
) -> None:
    assert read("a.py", text).late_constants == late


def test_a_folder(tmp_path: Path) -> None:
    long = "".join(f"    x = {n}\n" for n in range(69))
    wide = ", ".join(f"a{n}" for n in range(9))
    files = {
        "one/__init__.py": "",
        "one/store.py": "class Reply: ...\nclass Other: ...\nLIMIT = 1\n",
        "one/postgres/__init__.py": "",
        "one/postgres/store.py": f"def f():\n{long}",
        "one/tables.py": f"Reply = str\ndef g({wide}): ...\n",
        "two/tables.py": "",
        "two/page.html": "<p>\n\n</p>\n",
        "two/model.json": "{}\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    measured = measure(tmp_path)
    assert {name: one.value for name, one in measured.items()} == {
        "Python files": 6,
        "Python code lines": 75,
        "files in other languages": 1,
        "lines in other languages": 2,
        "type names with several meanings": 1,
        "module names used several times": 1,
        "functions over 60 lines": 1,
        "lines beyond 60 of a function": 10,
        "functions over 8 parameters": 1,
        "files with constants below a class": 1,
    }
    assert {entry for one in measured.values() for entry in one.entries} == {
        "two/page.html",
        "Reply: one/store.py, one/tables.py",
        "tables: one/tables.py, two/tables.py",
        "one/postgres/store.py:1 f: 70",
        "one/tables.py:2 g: 9",
        "one/store.py: LIMIT",
    }

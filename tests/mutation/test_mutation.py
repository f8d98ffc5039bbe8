"""Mutation script: operators, skipped code, and the result of a mutant."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.mutation.__main__ import LISTED, ROOT, ListError, listed_mutants, sampled_mutants
from tests.mutation.operators import edits
from tests.mutation.sandbox import BaselineError, Sandbox, verdict
from tests.mutation.targets import SOURCES, TARGETS, files_for, modules


def mutated(source: str) -> list[str]:
    """The mutants of one function body, without their common first line."""
    whole = f"def f(a, b):\n    {source}\n"
    return [edit.apply(whole).partition("\n    ")[2].rstrip("\n") for edit in edits(whole)]


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("return a < b", ["return None", "return a <= b"]),
        ("return (a) not in (b)", ["return None", "return (a) in (b)"]),
        ("x = a and b or a", ["x = a or b or a", "x = a and b and a"]),
        ("x = not a", ["x = (a)"]),
        ("x = a[-1:]", ["x = a[(1):]", "x = a[-2:]", "x = a[-(0):]"]),
        (
            "x = 0.5 if a else True",
            ["x = True if a else 0.5", "x = 0.75 if a else True", "x = 0.5 if a else False"],
        ),
        ("a.b = b", ["pass"]),
        ("x = rng.random(a) < b", ["x = rng.random(a) <= b"]),
        ("a += b", ["pass"]),
        ("await a(b)", ["pass"]),
        (
            "x = a(b, a, 'ö' + b, b * a)",
            ["x = a(a, b, 'ö' + b, b * a)", "x = a(b, a, 'ö' + b, b / a)"],
        ),
        ("x = max(b, a)", ["x = min(b, a)"]),
        ("for c in a: continue", ["for c in a: pass"]),
        ("if a: raise b(1 + 2)", ["if not a: raise b(1 + 2)", "if a: pass"]),
    ],
)
def test_operators_cover_these_edits(source: str, mutants: list[str]) -> None:
    assert sorted(mutated(source)) == sorted(mutants)


@pytest.mark.parametrize(
    "source",
    [
        '"""Not 1 < 2."""',
        "assert a < b",
        "log.warning('%d', a + b)",
        "x: a[1] = b",
        "x = zip(a, strict=True)",
        "x = f'{a + 1}'",
        "x = same_words(a, b)",
        "faiss.omp_set_num_threads(max(1, a // 2))",
        "x = rng.random() < a",
        "x = np.maximum(a, b)",
        "return None",
        "return False",
    ],
)
def test_some_code_is_not_mutated(source: str) -> None:
    assert [text for text in mutated(source) if text != "return True"] == []


def test_module_constants_decorators_and_defaults_are_settings() -> None:
    source = "N = 3\n@d(x=1, y=True)\nclass C:\n    n: int = 2 + 3\n    def f(self, k=4): ...\n"
    assert edits(source) == []
    assert [edit.text for edit in edits("def f(safe: bool = True): ...")] == ["False"]


def test_every_edit_is_another_program() -> None:
    source = (ROOT / SOURCES / "gateway/accounting/access.py").read_text(encoding="utf-8")
    program = ast.dump(ast.parse(source))
    assert all(ast.dump(ast.parse(edit.apply(source))) != program for edit in edits(source))


def test_every_module_has_tests_and_begins_with_its_own() -> None:
    for path in modules(ROOT):
        assert files_for(ROOT, path)
    path = f"{SOURCES}/gateway/accounting/access.py"
    assert files_for(ROOT, path)[0] == "tests/gateway/test_access.py"


def test_all_targets_name_existing_files() -> None:
    for target in TARGETS:
        for folder, names in ((ROOT / SOURCES, target.modules), (ROOT / "tests", target.tests)):
            assert all(list(folder.glob(f"{name}.py")) for name in names.split()), target


def test_a_seed_draws_the_same_mutants() -> None:
    first, again, other = (sampled_mutants(ROOT, 5, seed, "parsing") for seed in (1, 1, 2))
    assert first == again != other
    assert len({(one.path, one.source) for one in first}) == 5


def test_missing_listed_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    entry = {"path": "a.py", "original": "y = 2", "mutated": "y = 3"}
    file = tmp_path / "known.json"
    file.write_text(json.dumps([entry]))
    [mutant] = listed_mutants(tmp_path, file)
    assert (mutant.line, mutant.source) == (2, "x = 1\ny = 3\n")
    for wrong in ({"original": "z"}, {"original": " = "}, {"path": "b.py"}):
        file.write_text(json.dumps([entry | wrong]))
        with pytest.raises(ListError, match="update known"):
            listed_mutants(tmp_path, file)


def test_every_listed_mutant_fits_the_source() -> None:
    mutants = listed_mutants(ROOT, LISTED)
    assert all(files_for(ROOT, mutant.path) for mutant in mutants)
    assert len(mutants) > 50


def test_only_failed_tests_kill() -> None:
    assert [verdict(status, "") for status in (0, 1, 2)] == ["survived", "killed", "killed"]
    for status in (4, 5):  # a wrong path, and nothing collected
        with pytest.raises(BaselineError, match="no test"):
            verdict(status, "")


@pytest.mark.slow
def test_a_mutant_is_tested_in_a_copy(tmp_path: Path) -> None:
    root, original = tmp_path / "root", "def double(n):\n    return 2 * n\n"
    (root / "src").mkdir(parents=True)
    (root / "src" / "m.py").write_text(original)
    (root / "conftest.py").write_text(
        "from hypothesis import settings\n\nsettings.register_profile('mutation')\n"
    )
    (root / "test_m.py").write_text("import m\n\ndef test_double():\n    assert m.double(2) == 4\n")
    sandbox = Sandbox(root, tmp_path / "copy")
    for changed, expected in (("3 * n", "killed"), ("n + n", "survived"), ("?", "killed")):
        run = sandbox.test_mutant(
            "src/m.py", original.replace("2 * n", changed), ["test_m.py"], 9.0
        )
        assert run.verdict == expected
        assert (sandbox.root / "src" / "m.py").read_text() == original
    (sandbox.root / "src" / "m.py").write_text("")
    with pytest.raises(BaselineError, match="without a mutation"):
        Sandbox(sandbox.root, tmp_path / "other").baseline(["test_m.py"])

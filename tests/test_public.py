from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import bottega
from bottega import errors

# Libraries that take a tenth of a second to import, or more.
HEAVY = "aiohttp faiss jinja2 numpy PIL pydantic starlette uvicorn"
HEAVIER = "datasets matplotlib pandas scipy sentence_transformers sklearn torch transformers"


def test_the_table_of_public_names_is_complete() -> None:
    """The names that type checkers see, those that are imported on use, and `__all__`."""
    source = Path(str(bottega.__file__)).read_text("utf-8")
    seen = {
        alias.name: str(node.module).split(".")[1]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("bottega.")
        for alias in node.names
    }
    lazy = bottega._MODULES
    assert lazy == seen
    assert sorted([*lazy, "__version__"]) == sorted(bottega.__all__)
    assert set(bottega.__all__) <= set(dir(bottega))
    for name, module in lazy.items():
        assert getattr(bottega, name) is getattr(getattr(bottega, module), name)


def test_packages_of_public_names_need_no_import_of_their_own() -> None:
    run_python("import bottega; bottega.knowledge.Eq, bottega.errors.BottegaError")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'bottega' has no attribute 'Nothing'"):
        bottega.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_loads_no_library() -> None:
    assert imported_by("import bottega", f"typer rich {HEAVY} {HEAVIER}") == []


def test_the_help_screen_imports_no_command() -> None:
    code = """
import contextlib, io, sys
from bottega.cli import main
sys.argv = ["bottega", "--help"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
"""
    assert imported_by(code, f"bottega.cli.answer bottega.types {HEAVY} {HEAVIER}") == []


def test_importing_the_commands_loads_no_heavy_library() -> None:
    assert imported_by(ALL_COMMANDS, f"aiohttp faiss starlette uvicorn {HEAVIER}") == []


def test_commands_load_without_the_serve_extra() -> None:
    code = """
import sys
for name in ("starlette", "uvicorn", "prometheus_client"):
    sys.modules[name] = None  # an import of it fails
"""
    run_python(code + ALL_COMMANDS)


ALL_COMMANDS = """
from bottega.cli.app import lazy_commands
for command in lazy_commands():
    command.load()
"""


def imported_by(code: str, modules: str) -> list[str]:
    """Return those of the modules that the code imports in a process of its own."""
    check = f"import sys; print(*[m for m in {modules.split()!r} if m in sys.modules])"
    return run_python(f"{code}\n{check}").split()


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_documented_error_tree_is_complete() -> None:
    classes = [
        c
        for _, c in inspect.getmembers(errors, inspect.isclass)
        if issubclass(c, errors.BottegaError)
    ]
    documented = str(errors.__doc__)
    depth = {
        line.lstrip("│├└─ ").split()[0]: (len(line) - len(line.lstrip("│├└─ "))) // 4
        for line in documented.splitlines()
        if "Error" in line and not line.startswith("The")
    }
    assert set(depth) == {c.__name__ for c in classes}
    for c in classes:
        assert depth[c.__name__] == len(c.__mro__) - len(errors.BottegaError.__mro__)
        marked = f"{c.__name__} " in documented and "(retryable)" in _line(documented, c.__name__)
        assert c.retryable == marked


def _line(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if name in line.split())


def test_importing_a_subpackage_replaces_no_public_name() -> None:
    """A package named like a lazily imported function would replace it."""
    code = """
import importlib, inspect, pkgutil, bottega
for module in pkgutil.iter_modules(bottega.__path__):
    if module.name in bottega.__all__:
        print(module.name)
        importlib.import_module(f"bottega.{module.name}")
        assert not inspect.ismodule(getattr(bottega, module.name))
"""
    assert run_python(code).split() == ["bundled"]

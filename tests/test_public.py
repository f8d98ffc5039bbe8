from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import bottega
from bottega import errors


def test_public_names_are_complete_and_importable() -> None:
    imported = {
        alias.name
        for node in ast.parse(Path(str(bottega.__file__)).read_text("utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert sorted(imported | {"__version__"}) == sorted(bottega.__all__)
    assert all(hasattr(bottega, name) for name in bottega.__all__)


def test_importing_the_commands_loads_no_heavy_library() -> None:
    heavy = "torch transformers sentence_transformers sklearn scipy datasets pandas matplotlib"
    code = f"import bottega.cli.app, sys; print([m for m in {heavy.split()!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_commands_load_without_the_serve_extra() -> None:
    code = """
import sys
for name in ("starlette", "uvicorn", "prometheus_client"):
    sys.modules[name] = None  # an import of it fails
import bottega.cli.app
"""
    subprocess.run([sys.executable, "-c", code], check=True)


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
    for module in pkgutil.iter_modules(bottega.__path__):
        if module.name in bottega.__all__:
            importlib.import_module(f"bottega.{module.name}")
            assert not inspect.ismodule(getattr(bottega, module.name))

"""Docstrings of public classes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.paths import ROOT

SOURCE = ROOT / "src" / "bottega"
FEW = 8  # fields that need no explanation each


def public_names() -> set[str]:
    """Return the names that packages export, and those in the document of the parts."""
    names = set(re.findall(r"\b[A-Z]\w+", (ROOT / "docs" / "parts.md").read_text("utf-8")))
    for path in SOURCE.rglob("__init__.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names.update(alias.name for alias in node.names)
    return names


def fields_of(node: ast.ClassDef) -> list[str]:
    """Return the fields of a data class, else the parameters of the constructor. The help text of
    an option explains its field."""
    annotated = [
        one.target for one in node.body if isinstance(one, ast.AnnAssign) and not _has_help(one)
    ]
    fields = [target.id for target in annotated if isinstance(target, ast.Name)]
    for one in [] if fields else node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            fields = [given.arg for given in (*one.args.args[1:], *one.args.kwonlyargs)]
    return [name for name in fields if name != "_"]


def _has_help(field: ast.AnnAssign) -> bool:
    value = "" if field.value is None else ast.unparse(field.value)
    return bool(re.match(r"option\(|field\(.*metadata=", value))


def unexplained() -> Iterator[str]:
    public = public_names()
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in public:
                fields, docstring = fields_of(node), ast.get_docstring(node) or ""
                missing = [one for one in fields if not re.search(rf"\b{one}\b", docstring)]
                if len(fields) > FEW and missing:
                    yield f"{node.name}: {', '.join(missing)}"


def test_public_classes_with_many_fields_explain_each() -> None:
    assert list(unexplained()) == []

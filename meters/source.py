"""Measurements of the source files in a folder, without importing them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MAX_LINES = 60
MAX_PARAMETERS = 8
OTHER_LANGUAGES = {".css", ".html", ".jinja", ".js", ".lua", ".sql", ".ts"}
# Packages that implement the modules of the package around them for another store.
TWINS = {"milvus", "postgres", "sqlite"}
SPECIAL_MODULES = {"__init__", "__main__"}
# Constants are in upper case, and so are type variables of one letter.
TYPE_NAME = re.compile(r"_*[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")


class Measurement(NamedTuple):
    """A number, and the names of what it counts."""

    value: int
    entries: tuple[str, ...] = ()


class Function(NamedTuple):
    """Function with its code lines and its parameters, without `self` and `cls`."""

    place: str
    lines: int
    parameters: int


class Module(NamedTuple):
    """Python file with the classes and type aliases at its top."""

    path: str
    lines: int
    types: tuple[str, ...]
    functions: tuple[Function, ...]
    late_constants: tuple[str, ...]


def measure(source: Path) -> dict[str, Measurement]:
    """Measure all source files in a folder. Raises `SyntaxError`."""
    modules = [
        read(path.relative_to(source).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(source.rglob("*.py"))
    ]
    others = [path for path in source.rglob("*") if path.suffix in OTHER_LANGUAGES]
    functions = [function for module in modules for function in module.functions]
    long = [function for function in functions if function.lines > MAX_LINES]
    wide = [function for function in functions if function.parameters > MAX_PARAMETERS]
    types = ((name, module.path) for module in modules for name in module.types)
    late = (module for module in modules if module.late_constants)
    return {
        "Python files": Measurement(len(modules)),
        "Python code lines": Measurement(sum(module.lines for module in modules)),
        "files in other languages": _listed(path.relative_to(source).as_posix() for path in others),
        "lines in other languages": Measurement(sum(map(_count_lines, others))),
        "type names with several meanings": _listed(_repeated(types)),
        "module names used several times": _listed(_repeated(_module_names(modules))),
        f"functions over {MAX_LINES} lines": _listed(f"{one.place}: {one.lines}" for one in long),
        f"lines beyond {MAX_LINES} of a function": Measurement(
            sum(one.lines - MAX_LINES for one in long)
        ),
        f"functions over {MAX_PARAMETERS} parameters": _listed(
            f"{one.place}: {one.parameters}" for one in wide
        ),
        "files with constants below a class": _listed(
            f"{module.path}: {', '.join(module.late_constants)}" for module in late
        ),
    }


def read(path: str, text: str) -> Module:
    """Measure a Python file. Blank lines, comments and docstrings are not code."""
    tree = ast.parse(text, path)
    definitions = [*_definitions(tree)]
    lines = [line.strip() for line in text.split("\n")]
    is_code = [bool(line) and not line.startswith("#") for line in lines]
    for node in (tree, *definitions):
        if ast.get_docstring(node, clean=False) is not None:
            first, last = _span(node.body[0])
            is_code[first - 1 : last] = [False] * (last - first + 1)
    totals = [*accumulate(is_code, initial=0)]  # code lines among the first n lines
    functions = []
    for node in definitions:
        if not isinstance(node, ast.ClassDef):
            first, last = _span(node)
            place = f"{path}:{first} {node.name}"
            count = totals[last] - totals[first - 1]
            functions.append(Function(place, count, _count_parameters(node.args)))
    late = tuple(_late_constants(tree))
    return Module(path, totals[-1], tuple(_types(tree)), tuple(functions), late)


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield all functions and classes. Expressions, which are most of the tree, contain none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _definitions(child)


def _span(node: ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None
    return node.lineno, node.end_lineno


def _count_parameters(given: ast.arguments) -> int:
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def _types(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from filter(TYPE_NAME.fullmatch, _targets(node))


def _late_constants(tree: ast.Module) -> Iterator[str]:
    """Yield the constants and loggers below the first class. A value that uses a name defined from
    that class on cannot be above it, so it is skipped."""
    defined: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            defined.add(node.name)
        elif not defined:
            continue
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            names = _targets(node)
            called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
            is_logger, is_type = called.endswith("getLogger"), called.endswith("TypeVar")
            if defined.isdisjoint(_names(node.value)) and not is_type:
                yield from (name for name in names if name.isupper() or is_logger)
            defined.update(names)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [name for target in targets for name in _names(target)]


def _names(node: ast.expr) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]


def _module_names(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """Yield the name of each module and its path without twin packages."""
    for module in modules:
        path = PurePosixPath(module.path)
        if path.stem not in SPECIAL_MODULES:
            yield path.stem, "/".join(part for part in path.parts if part not in TWINS)


def _repeated(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield each name that is in several places, with the places."""
    places: defaultdict[str, set[str]] = defaultdict(set)
    for name, place in found:
        places[name].add(place)
    return (f"{name}: {', '.join(sorted(all))}" for name, all in places.items() if len(all) > 1)


def _listed(entries: Iterable[str]) -> Measurement:
    found = tuple(sorted(entries))
    return Measurement(len(found), found)


def _count_lines(path: Path) -> int:
    """Return the number of lines that are not blank."""
    return sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").split("\n"))

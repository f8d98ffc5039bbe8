"""List the error messages of the package: `python -m docs.list_errors [WORD ...]`.

Each entry has the place, the class or factory function, the message with its placeholders, and the
hint. With words, only entries that contain one of them are listed. Read the list to find messages
that do not state the problem, the value and the next step.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parent.parent / "src" / "bottega"


class Message(NamedTuple):
    place: str
    error: str
    text: str
    hint: str


def messages(source: Path) -> Iterator[Message]:
    """Yield the message of each exception created with a literal text, by file and line."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in source.rglob("*.py")}
    factories = {name for tree in trees.values() for name in _factories(tree)}
    for path, tree in sorted(trees.items()):
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda call: call.lineno):
            name = ast.unparse(call.func).rsplit(".", 1)[-1]
            texts = [text for argument in call.args if (text := _text(argument))]
            if (name.endswith("Error") or name in factories) and texts:
                hints = [_text(keyword.value) for keyword in call.keywords if keyword.arg == "hint"]
                place = f"{path.relative_to(source)}:{call.lineno}"
                yield Message(place, name, max(texts, key=len), "".join(hints))


def _factories(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions that return an exception."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if function.returns is not None and ast.unparse(function.returns).endswith("Error"):
            yield function.name


def _text(node: ast.expr) -> str:
    """Return a literal's text with expressions as {placeholders}, "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else _text(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def main(words: list[str]) -> None:
    for message in messages(SOURCE):
        entry = f"{message.place} {message.error}: {message.text}"
        if message.hint:
            entry += f"\n    {message.hint}"
        if not words or any(word in entry for word in words):
            print(entry)


if __name__ == "__main__":
    main(sys.argv[1:])

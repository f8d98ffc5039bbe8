"""Renderer of the Helm templates in deploy/helm, for tests on machines without Helm.

It knows the constructs that these templates use and rejects all others. With Helm installed, a test
compares both.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
FUNCTIONS = {
    "quote": lambda value: json.dumps(str(value)),
    "sha256sum": lambda value: hashlib.sha256(str(value).encode()).hexdigest(),
}


def render(chart: Path, release: str, **changed: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return the objects of a chart. `changed` updates top-level sections of its values."""
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for name, section in changed.items():
        values[name] = {**values[name], **section} if isinstance(section, dict) else section
    context = {"Values": values, "Release": {"Name": release, "Namespace": "default"}}
    objects = list[dict[str, Any]]()
    for template in sorted((chart / "templates").glob("*.yaml")):
        found = yaml.safe_load_all(render_text(template.read_text(), context))
        objects += [one for one in found if one]
    return objects


def render_text(text: str, context: Mapping[str, Any]) -> str:
    """Render one template. Raises `ValueError` for an unknown construct."""
    out, shown, at = list[str](), list[bool](), 0
    for action in ACTION.finditer(text):
        before = text[at : action.start()]
        if all(shown):
            out.append(before.rstrip() if action[1] else before)
        at = action.end()
        if action[3]:
            raise ValueError(f"trimming on the right is not supported: {action[0]}")
        word, _, rest = action[2].partition(" ")
        if word == "if":
            negated = rest.startswith("not ")
            shown.append(bool(_value(rest.removeprefix("not "), context)) != negated)
        elif word == "end":
            shown.pop()
        elif all(shown):
            out.append(str(_value(action[2], context)))
    return "".join(out) + text[at:]


def _value(expression: str, context: Mapping[str, Any]) -> Any:
    first, *functions = (part.strip() for part in expression.split("|"))
    word, _, argument = first.partition(" ")
    value = _lookup(argument if word == "toYaml" else first, context)
    if word == "toYaml":
        value = yaml.safe_dump(value).rstrip()
    for function in functions:
        name, _, width = function.partition(" ")
        if name == "nindent":
            value = "\n" + "\n".join(
                " " * int(width) + line if line else line for line in str(value).split("\n")
            )
        elif name in FUNCTIONS:
            value = FUNCTIONS[name](value)
        else:
            raise ValueError(f"unknown function {name!r}")
    return value


def _lookup(path: str, context: Mapping[str, Any]) -> Any:
    if not path.startswith("."):
        raise ValueError(f"unknown expression {path!r}")
    found: Any = context
    for part in path[1:].split("."):
        found = found[part]  # a misspelt value fails here
    return found

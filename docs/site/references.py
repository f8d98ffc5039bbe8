"""Generated reference pages: the command line, the gateway's settings, the Python packages."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from inspect import cleandoc, getdoc
from pathlib import Path
from typing import Any

import typer
from pydantic import TypeAdapter

from bottega.cli.app import app
from bottega.gateway.config.config_file import SECTIONS, VARIANT_SECTIONS
from bottega.gateway.config.routing_settings import TierSettings, VariantSettings
from docs.site.pages import ROOT

PACKAGE = ROOT / "src" / "bottega"
# Packages with a list of public names, and modules whose classes and functions are public.
PACKAGES = (
    *("knowledge", "retrieval", "reranking", "routing", "prompting", "parsing", "generation"),
    *("recording", "recipes", "compression", "evaluation", "telemetry"),
)
MODULES = ("types", "image", "protocols", "pipeline", "errors", "rationales", "shadowing")
# The methods of a protocol are its content, with or without a docstring.
PROTOCOL_OPTIONS = """
    options:
      show_if_no_docstring: true
      filters: ["!^_(?!_call__)"]"""
EXAMPLE = ROOT / "examples" / "bottega.toml"
SECTION_NAMES = re.compile(r"\A(\[[^]]+\](, )?)+: ")
SETTING = re.compile(r"(?:# )?(\w+) = [^#\n]*(?:# (.*))?")
CONTINUED = re.compile(r"#?\s{8,}# (.*)")


def write_references(target: Path) -> None:
    """Write the pages of all references to the folder `target`."""
    pages = {"cli": cli_page(), "configuration": configuration_page(), **python_pages()}
    (target / "python").mkdir(parents=True)
    for name, text in pages.items():
        (target / f"{name}.md").write_text(text, encoding="utf-8")


def cli_page() -> str:
    """Return the page of all commands and their options, from the help texts."""
    application: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "The output of `bottega COMMAND --help`, of all commands. `bottega --install-completion` "
        "installs [completion for your shell](../installation.md#shell-completion).",
        *_command(application, ["bottega"]),
    ]
    return "\n\n".join(lines) + "\n"


def _command(command: Any, path: list[str], parent: Any = None) -> Iterator[str]:
    context = command.make_context(path[-1], [], parent=parent, resilient_parsing=True)
    command = context.command  # that of a lazy command
    yield f"{'#' * (len(path) if len(path) > 1 else 2)} {' '.join(path)}"
    yield _text(command.help or "")
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{' '.join(path)} {usage}\n```"
    records = [param.get_help_record(context) for param in command.params]
    yield _table(
        ("option", "meaning"), [(f"`{name}`", _text(text)) for name, text in filter(None, records)]
    )
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _command(inner, [*path, name], context)


def configuration_page() -> str:
    """Return all settings of the gateway: types, limits and defaults of the settings classes, and
    the descriptions in the example."""
    described = descriptions(EXAMPLE.read_text(encoding="utf-8"))
    lines = [
        "# Configuration of the gateway",
        "Every setting of `bottega serve --config bottega.toml`. [examples/bottega.toml]"
        "(../files/examples-bottega-toml.md) contains all of them; `--check` prints the effective "
        "values. What they mean together: [the gateway](../gateway.md) and [its reference]"
        "(../gateway-reference.md#the-configuration-by-section).",
    ]
    variant = {f"experiment.b.{name}": kind for name, kind in VARIANT_SECTIONS.items()}
    sections = {"tiers.NAME": TierSettings, **SECTIONS, "experiment.b": VariantSettings, **variant}
    for section, kind in sections.items():
        lines.append(f"## {section}")
        summary = SECTION_NAMES.sub("", cleandoc(getdoc(kind) or ""))
        lines.append(summary[:1].upper() + summary[1:])
        schema = TypeAdapter(kind).json_schema()
        described_as = section.removeprefix("experiment.b.").partition(".")[0]
        rows = [
            (
                f"`{name}`",
                _kind(value),
                _default(value),
                _text(described.get((described_as, name), "")),
            )
            for name, value in schema["properties"].items()
            if (section, name) != ("tiers.NAME", "name")
        ]
        lines.append(_table(("setting", "value", "default", "meaning"), rows))
    return "\n\n".join(lines) + "\n"


def descriptions(text: str) -> dict[tuple[str, str], str]:
    """Return the comment of each setting in a configuration file, by section and name. Of several
    tiers, the first comment of a setting counts."""
    found: dict[tuple[str, str], str] = {}
    section, last, first = "", None, False
    for line in text.splitlines():
        if line.startswith("["):
            section, last = line[1:].partition("]")[0].partition(".")[0], None
        elif match := SETTING.match(line):
            last = (section, match[1])
            first = last not in found
            if first:
                found[last] = match[2] or ""
        elif last is not None and first and (match := CONTINUED.match(line)):
            found[last] += f" {match[1]}"
    return found


def _kind(schema: dict[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words."""
    if "$ref" in schema:  # another section
        return "table, or text" if schema["$ref"].endswith("VariantSettings") else "table"
    if "anyOf" in schema:
        return ", or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f'`"{word}"`' for word in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    names = {"integer": "whole number", "string": "text", "boolean": "`true`, `false`"}
    name = "path" if schema.get("format") == "path" else names.get(schema["type"], schema["type"])
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f"{name} above {schema['exclusiveMinimum']}"
    if low is not None and high is not None:
        return f"{name}, {low} to {high}"
    return name if low is None else f"{name}, {low} or more"


def _default(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return ""
    if "default" not in schema:
        return "required" if schema.get("type") != "object" else "`{}`"
    return "" if schema["default"] is None else f"`{json.dumps(schema['default'])}`"


def python_pages() -> dict[str, str]:
    """Return a page for each public package and module."""
    pages = {"python/index": _names_page()}
    for name in PACKAGES + MODULES:
        path = PACKAGE / name / "__init__.py" if name in PACKAGES else PACKAGE / f"{name}.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines = [f"# bottega.{name}", _docstring(tree)]
        options = PROTOCOL_OPTIONS if name == "protocols" else ""
        lines += [f"::: bottega.{name}.{public}{options}" for public in _public(tree)]
        pages[f"python/{name}"] = "\n\n".join(lines) + "\n"
    return pages


def _docstring(tree: ast.Module) -> str:
    """Return a module's docstring; a paragraph with a tree of box characters is fenced."""
    paragraphs = (ast.get_docstring(tree) or "").split("\n\n")
    return "\n\n".join(f"```text\n{one}\n```" if "──" in one else one for one in paragraphs)


def _names_page() -> str:
    """Return the table of the names that `bottega` itself exports, with their pages."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    rows = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module[:8] == "bottega.":
            page = node.module.split(".")[1]
            for alias in node.names:
                link = f"[`{alias.name}`]({page}.md#bottega.{page}.{alias.name})"
                rows.append((link, f"`bottega.{page}`"))
    table = _table(("name", "also in"), sorted(rows))
    return f"# bottega\n\n{ast.get_docstring(tree)}\n\n{table}\n"


def _public(tree: ast.Module) -> list[str]:
    """Return the names of `__all__`, else the public classes and functions."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    defined = [node.name for node in tree.body if isinstance(node, kinds)]
    return [name for name in defined if not name.startswith("_")]


def _text(text: str) -> str:
    """Return plain text as Markdown: words like <path> and *.py are no markup."""
    return re.sub(r"([\\<>*_|\[\]])", r"\\\1", text)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

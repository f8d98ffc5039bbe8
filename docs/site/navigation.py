"""Navigation of the site: the globs of zensical.toml, expanded over the written pages."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOK_PAGE = "tutorials/notebook.md"
TEMPLATE = Path(__file__).with_name("zensical.toml")


def write_config(path: Path, pages: Path) -> None:
    """Write the configuration of the site. Raises `SystemExit` for pages that it does not list, and
    for entries without a page."""
    config = tomllib.loads(TEMPLATE.read_text(encoding="utf-8"))
    config["project"]["nav"] = [expanded(entry, pages) for entry in config["project"]["nav"]]
    listed = set(page_paths(config["project"]["nav"]))
    written = {page.relative_to(pages).as_posix() for page in pages.rglob("*.md")}
    if listed != written:
        raise SystemExit(
            f"docs/site/zensical.toml: no page for {sorted(listed - written)};"
            f" add to nav: {sorted(written - listed)}"
        )
    path.write_text(
        "".join(f"{name} = {toml(value)}\n" for name, value in config.items()), encoding="utf-8"
    )


def expanded(entry: Any, pages: Path) -> Any:
    if isinstance(entry, dict):
        return {title: expanded(inner, pages) for title, inner in entry.items()}
    if isinstance(entry, list):
        return [one for inner in entry for one in found(inner, pages)]
    return entry


def found(entry: Any, pages: Path) -> list[Any]:
    if not isinstance(entry, str):
        return [expanded(entry, pages)]
    paths = (path.relative_to(pages).as_posix() for path in pages.glob(entry))
    return sorted(paths, key=lambda path: (not path.endswith(("README.md", "index.md")), path))


def page_paths(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from page_paths(inner)


def toml(value: Any) -> str:
    """Return a value as inline TOML. Strings of JSON are strings of TOML."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(k)} = {toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value)

"""Pages of the site: the documents of the repository, with links that hold between pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Documents outside docs/, by the path of their page.
OUTSIDE_DOCS = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "models/apprentice.md": "src/bottega/bundled/apprentice/README.md",
    "models/compressor.md": "src/bottega/bundled/compressor/README.md",
    "models/master.md": "src/bottega/bundled/master/README.md",
    "models/photos.md": "src/bottega/bundled/photos/README.md",
    "models/photos-lite2.md": "src/bottega/bundled/photos-lite2/README.md",
    "models/photos-master.md": "src/bottega/bundled/photos-master/README.md",
}
INDEXES = {"README.md": "index.md", "docs/decisions": "decisions/README.md"}
ASSETS = (".png", ".svg")
LANGUAGES = {".toml": "toml", ".yaml": "yaml", ".conf": "nginx", ".service": "ini"}
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
FENCED = re.compile(r"(^ *(`{3,})[^\n]*\n.*?^ *\2 *$)", re.DOTALL | re.MULTILINE)
TARGET = re.compile(r"\]\(([^()\s]+)\)")
# Entries of the log are not on the site: of their links, only the texts remain.
LOG = re.compile(r"\[([^\]]*)\]\([^()\s]*benchmarks/log/[^()\s]*\)")
DIAGRAM = re.compile(r"!\[[^\]]*\]\([^()\s]*diagrams/([\w-]+\.svg)\)")


def stage(target: Path) -> None:
    """Write all documents as pages to the folder `target`, and each file to which they link."""
    page_paths = {path: page_path for page_path, path in sources()}
    linked: set[Path] = set()
    for path, page_path in page_paths.items():
        page = target / page_path
        page.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            page.write_text(page_text(path, page_path, page_paths, linked), encoding="utf-8")
        else:
            page.write_bytes(path.read_bytes())
    for path in linked:
        page = target / file_page_path(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(file_page(path), encoding="utf-8")


def sources() -> Iterator[tuple[str, Path]]:
    """Yield the path of each page and its document."""
    for path in sorted(DOCS.rglob("*")):
        if path.suffix in (".md", *ASSETS):
            yield path.relative_to(DOCS).as_posix(), path
    for page_path, name in OUTSIDE_DOCS.items():
        yield page_path, ROOT / name


def page_text(path: Path, page_path: str, page_paths: dict[Path, str], linked: set[Path]) -> str:
    """Return a document with its links to documents and files as links between pages. Other files
    are added to `linked`."""

    def link(match: re.Match[str]) -> str:
        target, sign, anchor = match[1].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        wanted = (path.parent / target).resolve()
        name = wanted.relative_to(ROOT).as_posix()
        found = INDEXES.get(name) or page_paths.get(wanted)
        if found is None and wanted.exists():
            linked.add(wanted)
            found = file_page_path(wanted)
        # A broken link is not changed, so the strict build reports it.
        return f"]({relpath(found, Path(page_path).parent)}{sign}{anchor})" if found else match[0]

    text = FRONT_MATTER.sub("", path.read_text(encoding="utf-8"))
    text = DIAGRAM.sub(inlined_diagram, LOG.sub(r"\1", text))
    parts = FENCED.split(text)
    # Each fenced block is followed by its own fence, the inner group.
    return "".join(
        TARGET.sub(link, part) if index % 3 == 0 else part
        for index, part in enumerate(parts)
        if index % 3 != 2
    )


def inlined_diagram(match: re.Match[str]) -> str:
    """Return a diagram as part of the page, where the site's style reaches it."""
    svg = (DOCS / "diagrams" / match[1]).read_text(encoding="utf-8")
    return f"<figure>{''.join(svg.splitlines())}</figure>"


def file_page_path(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"files/{name.replace('/', '-').replace('.', '-').lower()}.md"


def file_page(path: Path) -> str:
    """Return a page that shows a file, or all files of a folder."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    blocks = []
    for one in files:
        language = LANGUAGES.get(one.suffix, "text")
        heading = f"## {one.relative_to(path)}\n\n" if path.is_dir() else ""
        blocks.append(f"{heading}````{language}\n{one.read_text(encoding='utf-8')}````\n")
    return f"# {path.relative_to(ROOT).as_posix()}\n\n" + "\n".join(blocks)

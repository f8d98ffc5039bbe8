"""The documentation site: pages, links, references, diagrams."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from bottega.cli.app import app
from bottega.gateway.config.config_file import SECTIONS, VARIANT_SECTIONS
from bottega.gateway.config.routing_settings import TierSettings
from docs.site.diagrams import DIAGRAMS
from docs.site.navigation import NOTEBOOK_PAGE, write_config
from docs.site.pages import DOCS, FENCED, ROOT, page_text, sources, stage
from docs.site.references import (
    cli_page,
    configuration_page,
    descriptions,
    python_pages,
    write_references,
)

LOG = ROOT / "benchmarks" / "log"
RELATIVE = re.compile(r"\]\((?!https?:|#|mailto:)([^()\s#]+)")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    stage(folder)
    write_references(folder / "reference")
    (folder / NOTEBOOK_PAGE).write_text("# Notebook")  # executed in test_notebook.py
    return folder


def test_every_page_is_in_the_navigation(pages: Path, tmp_path: Path) -> None:
    write_config(tmp_path / "zensical.toml", pages)
    stray = pages / "stray.md"
    stray.write_text("# Stray")
    with pytest.raises(SystemExit, match=r"add to nav: \['stray.md'\]"):
        write_config(tmp_path / "zensical.toml", pages)
    stray.unlink()


def test_links_of_pages_lead_to_pages(pages: Path) -> None:
    broken = [
        f"{page.relative_to(pages)}: {target}"
        for page in pages.rglob("*.md")
        for target in RELATIVE.findall(FENCED.sub("", page.read_text(encoding="utf-8")))
        if not (page.parent / target).resolve().is_file()
    ]
    assert broken == []


def headings(path: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    found = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w]+", "-", one.lower()).strip("-") for one in found}


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(LOG.glob("*.md"))], ids=str)
def test_links_outside_the_site_lead_to_files_and_headings(path: Path) -> None:
    """README and log are no pages of the site, so the strict build does not check them."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    links = re.findall(r"(?:\]\(|src=\")((?!https?:)[^()\s\"]+)", text)
    assert len(links) > 20
    for link in links:
        name, _, anchor = link.partition("#")
        target = (path.parent / name) if name else path
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_links_to_the_log_lead_to_entries_and_are_only_text_on_the_site(pages: Path) -> None:
    texts = {path: path.read_text("utf-8") for path in DOCS.rglob("*.md")}
    links = [
        (path, link)
        for path, text in texts.items()
        for link in re.findall(r"\]\(([^()\s]*benchmarks/log/[^()\s]*)\)", text)
    ]
    assert len(links) > 20
    for path, link in links:
        name, _, anchor = link.partition("#")
        target = path.parent / name
        assert target.is_file(), link
        assert not anchor or anchor in headings(target), link
    staged = (page.read_text("utf-8") for page in pages.rglob("*.md"))
    assert not [text for text in staged if re.search(r"\]\([^()\s]*benchmarks/log", text)]


def test_links_out_of_the_documents_become_links_between_pages(tmp_path: Path) -> None:
    targets = {path: target for target, path in sources()}
    linked: set[Path] = set()
    page = DOCS / "experiments" / "racc.md"
    text = page_text(page, "experiments/racc.md", targets, linked)
    assert "](../models/compressor.md)" in text and not linked
    text = page_text(DOCS / "gateway.md", "gateway.md", targets, linked)
    assert "](files/examples-bottega-toml.md)" in text
    assert {path.name for path in linked} >= {"bottega.toml", "Dockerfile"}


def test_cli_reference_has_every_command_and_option() -> None:
    text = cli_page()
    command = typer.main.get_command(app)
    visible = {name: one for name, one in command.commands.items() if not one.hidden}  # type: ignore[attr-defined]
    assert {f"## bottega {name}" for name in visible} <= set(text.splitlines())
    assert "### bottega compress train" in text and "serve-worker" not in text
    for one in visible.values():
        for param in one.load().params:
            if param.param_type_name == "option" and not param.hidden:
                assert param.opts[0] in text


def test_packages_that_documents_import_have_a_page() -> None:
    pages = python_pages()
    texts = [path.read_text("utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")]]
    imported = {
        (package, name.strip())
        for text in texts
        for package, names in re.findall(r"^ *from bottega\.(\w+) import ([\w, ]+)$", text, re.M)
        for name in names.split(",")
    }
    assert ("telemetry", "instrument") in imported
    missing = [
        f"{package}.{name}"
        for package, name in imported
        if f"::: bottega.{package}.{name}" not in pages.get(f"python/{package}", "").splitlines()
    ]
    assert missing == []


def test_configuration_reference_has_every_setting_with_its_description() -> None:
    text = configuration_page()
    variant = {f"experiment.b.{name}": kind for name, kind in VARIANT_SECTIONS.items()}
    for section, kind in {"tiers.NAME": TierSettings, **SECTIONS, **variant}.items():
        body = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
        for one in fields(kind):
            assert one.name == "name" or f"| `{one.name}` |" in body, f"{section}.{one.name}"
    assert "| `port` | whole number, 0 to 65535 | `8000` |" in text
    assert "| `a` | table, or text |" in text
    retrieve = re.search(r"(?s)## experiment\.b\.cache\n.*?\| `retrieve` \| (.*)", text)
    assert retrieve and '`"bm25"`' in retrieve[1] and not retrieve[1].endswith("| |")


def test_descriptions_are_the_comments_of_the_example() -> None:
    text = (
        "# Head\n[cache]\n"
        'embed = "dual"   # an embedder,\n                 # by name\n# groups = 10\n'
        "[tiers.a]\nshots = 2  # demonstrations\n[tiers.b]\nshots = 1  # others\n"
    )
    assert descriptions(text) == {
        ("cache", "embed"): "an embedder, by name",
        ("cache", "groups"): "",
        ("tiers", "shots"): "demonstrations",
    }


def test_installation_lists_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", (DOCS / "installation.md").read_text(), re.M)
    assert sorted(listed) == sorted(project["optional-dependencies"])


def test_diagrams_of_the_documents_are_current() -> None:
    folder = DOCS / "diagrams"
    assert {path.stem for path in folder.iterdir()} == set(DIAGRAMS)
    for name, diagram in DIAGRAMS.items():
        assert (folder / f"{name}.svg").read_text(encoding="utf-8") == diagram.svg()

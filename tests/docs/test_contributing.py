"""The map and the paths of CONTRIBUTING.md are those of the tree."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.paths import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "bottega"
NOT_LISTED = {"__init__.py", "__main__.py"}


def mapped() -> Iterator[str]:
    """Yield the paths below src/bottega in the map, by their indentation."""
    [block] = re.findall(r"^src/bottega/\n((?:  .*\n)+)", TEXT, re.M)
    parents: list[str] = []
    for line in block.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth - 1 :] = [name]
        yield "".join(parents)


def test_the_map_names_every_package_and_top_level_module_once() -> None:
    packages = {
        f"{path.parent.relative_to(SOURCE).as_posix()}/"
        for path in SOURCE.rglob("__init__.py")
        if path.parent != SOURCE
    }
    modules = {path.name for path in SOURCE.glob("*.py")} - NOT_LISTED
    assert sorted(mapped()) == sorted(packages | modules)


def test_every_package_and_module_has_a_layer() -> None:
    [table] = re.findall(r"^\| layer \|.*\n((?:\|.*\n)+)", TEXT, re.M)
    cells = [row.split("|")[2] for row in table.splitlines()[1:]]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    top = {path.removesuffix("/").removesuffix(".py") for path in mapped() if path.count("/") < 2}
    assert sorted(named) == sorted(name for name in top if "/" not in name)


def test_paths_in_the_text_exist() -> None:
    paths = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", TEXT))
    assert len(paths) > 20
    assert [one for one in paths if not any((top / one).exists() for top in (ROOT, SOURCE))] == []

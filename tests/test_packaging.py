"""The distribution is called bottega-vlm: `bottega` on the public index is another project."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from bottega import __version__
from bottega.errors import DISTRIBUTION, MissingDependencyError, needs_extra, require_extra

ROOT = Path(__file__).parents[1]
FOREIGN = re.compile(r"pip3? install[^\n]*(?<![\w./-])bottega(?![\w/-])")


NAMING = ("needs_extra", "require_extra")


def documents() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file())
    for folder in ("src", "docs", "examples", "benchmarks", "training"):
        for kind in ("*.md", "*.py", "*.toml", "*.yaml"):
            yield from (ROOT / folder).rglob(kind)


def test_the_wheel_is_named_after_the_constant_and_keeps_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (project["name"], project["version"]) == (DISTRIBUTION, __version__)
    assert DISTRIBUTION == "bottega-vlm"
    assert project["scripts"] == {"bottega": "bottega.cli:main"}


def test_no_document_installs_the_other_project() -> None:
    other = DISTRIBUTION.removesuffix("-vlm")
    assert FOREIGN.search(f"pip install '{other}[local]'")
    assert not FOREIGN.search("pip install 'bottega-vlm[local]'")
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in documents()
        if (match := FOREIGN.search(path.read_text("utf-8", errors="replace")))
    }
    assert found == {}


def test_a_missing_extra_is_installed_from_our_distribution() -> None:
    assert MissingDependencyError("starlette", "serve").hint == "pip install 'bottega-vlm[serve]'"


def test_the_hint_for_torch_names_the_size_and_the_cpu_build() -> None:
    hint = MissingDependencyError("torch", "local").hint
    assert hint.startswith("pip install 'bottega-vlm[local]'")
    assert "GB" in hint and "PIP_EXTRA_INDEX_URL" in hint


def test_errors_for_missing_packages_name_extras_that_exist() -> None:
    """One implementation, `needs_extra` and `require_extra`, with extras of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named: set[str] = set()
    handlers: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in NAMING:
                named.add(str(ast.literal_eval(node.args[-1])))
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                handlers.add(f"{path.name}: {ast.unparse(node.type)}")
    extras = set(project["optional-dependencies"])
    assert named <= extras
    assert {"local", "serve", "shared", "milvus", "batch", "eval", "otel"} <= named
    # maxsim.py works without torch; naming.py imports modules of the user.
    found = {one.partition(":")[0] for one in handlers if "ModuleNotFoundError" in one}
    assert found == {"errors.py", "maxsim.py", "naming.py"}


def test_a_failed_import_of_a_package_names_its_extra() -> None:
    problem = "nowhere is required and not installed"
    with pytest.raises(MissingDependencyError, match=problem) as error, needs_extra("serve"):
        importlib.import_module("nowhere")
    assert error.value.hint == "pip install 'bottega-vlm[serve]'"
    with pytest.raises(MissingDependencyError, match=problem):
        require_extra("nowhere", "batch")
    with pytest.raises(ModuleNotFoundError), needs_extra("serve"):
        importlib.import_module("bottega.nowhere")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.network  # pip fetches the build backend
def test_the_wheel_runs_the_demonstration_outside_the_checkout(tmp_path: Path) -> None:
    """With four images, because `make demo` shows all of them: the wheel must hold the models, the
    page's template and the command. `.ci/run` prints the size."""

    def run(*command: str, **variables: str) -> None:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    run("-m", "pip", "wheel", "--no-deps", "--wheel-dir", "wheels", str(ROOT))
    [wheel] = (tmp_path / "wheels").iterdir()
    print(f"\n{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    assert wheel.stat().st_size <= 30_000_000
    assert wheel.name == f"bottega_vlm-{__version__}-py3-none-any.whl"
    run("-m", "pip", "install", "--no-deps", "--target", "installed", str(wheel))
    installed = str(tmp_path / "installed")
    code = f"import bottega; assert bottega.__file__.startswith({installed!r}), bottega.__file__"
    run("-c", code, PYTHONPATH=installed)
    for name, colour in (("ruby", "crimson"), ("leaf", "forestgreen")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            image = Image.new("RGB", (48 + i, 48), colour)
            image.save(tmp_path / "images" / name / f"{i}.png")
    run("-m", "bottega", "demo", "--folder", "images", PYTHONPATH=installed)
    assert (tmp_path / "bottega-demo.html").stat().st_size > 0

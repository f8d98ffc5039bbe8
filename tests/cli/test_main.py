from __future__ import annotations

import subprocess
import sys

import pytest

from bottega import __version__


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["eval", "glyphs:"], 2)])
def test_the_package_runs_as_the_command_does(arguments: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-m", "bottega", *arguments], capture_output=True)
    assert done.returncode == code
    assert f"bottega {__version__}".encode() in done.stdout or b"error: a knob" in done.stderr

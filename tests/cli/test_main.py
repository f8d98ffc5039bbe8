from __future__ import annotations

import subprocess
import sys


def test_the_package_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "bottega", "eval", "glyphs:"], capture_output=True)
    assert done.returncode == 2
    assert b"error: a knob" in done.stderr

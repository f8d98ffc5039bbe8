from __future__ import annotations

import subprocess
import sys


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "bottega", "stats", "no.db"], capture_output=True)
    assert done.returncode == 1
    assert b"error: knowledge base no.db does not exist" in done.stderr

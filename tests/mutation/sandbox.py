"""Copy of the repository that tests one mutant at a time."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["killed", "timeout", "survived"]
SKIPPED = shutil.ignore_patterns(
    ".git",
    ".venv",
    "venv",
    "dist",
    "build",
    "*.egg-info",
    ".*_cache",
    ".hypothesis",
    "node_modules",
)
HYPOTHESIS = ("--hypothesis-seed=0", "--hypothesis-profile=mutation")
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *HYPOTHESIS)
CONFIRM_SECONDS = 60
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


class BaselineError(Exception):
    """The unmodified tree fails its tests, so no verdict is possible."""


@dataclass(frozen=True)
class Run:
    """Outcome of one pytest process; `test` is the first one that failed."""

    verdict: Verdict
    seconds: float
    test: str = ""


class Sandbox:
    """A copy of `root` below `folder`. The checkout itself is never written."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "tree"
        # Copies keep their modification times: compiled originals stay valid, mutants never match.
        shutil.copytree(root, self.root, ignore=SKIPPED)
        # Each sandbox has its own: pytest sessions that share a temporary folder change its mode.
        self._temporary = folder / "temporary"
        self._temporary.mkdir()
        folder.chmod(0o755)  # one test drops root privileges

    def test_mutant(self, path: str, mutated: str, tests: list[str], baseline: float) -> Run:
        """Replace one file, run the tests, and put the file back. `baseline` is the seconds that
        the tests take without the mutation."""
        limit = 30 + 3 * baseline
        file = self.root / path
        original, status = file.read_bytes(), file.stat()
        try:
            file.write_text(mutated, encoding="utf-8")
            return self._confirmed(tests, limit)
        finally:
            file.write_bytes(original)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    def baseline(self, tests: list[str]) -> float:
        """Return the seconds that the tests take on the unmodified tree."""
        run = self._run(tests, limit=600)
        if run.verdict != "survived":
            raise BaselineError(f"{run.test or 'pytest'} fails without a mutation")
        return run.seconds

    def _confirmed(self, tests: list[str], limit: float) -> Run:
        """Run the tests, and again without those that fail once but not twice."""
        flaky: list[str] = []
        while True:
            run = self._run([*tests, *(f"--deselect={test}" for test in flaky)], limit)
            if run.verdict != "killed" or "::" not in run.test or run.test in flaky:
                return run
            again = self._run([run.test], CONFIRM_SECONDS)
            if again.verdict != "survived":
                return run
            flaky.append(run.test)

    def _run(self, arguments: list[str], limit: float) -> Run:
        environment = os.environ | {
            "PYTHONPATH": str(self.root / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTEST_DEBUG_TEMPROOT": str(self._temporary),
        }
        begun = time.monotonic()
        # Tests start processes of their own, and a timeout has to end those too.
        process = subprocess.Popen(
            [sys.executable, *PYTEST, *arguments],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return Run("timeout", time.monotonic() - begun)
        finally:
            _end(process)
        return Run(verdict(process.returncode, output), time.monotonic() - begun, _first(output))


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdict(status: int, output: str) -> Verdict:
    if status == 0:
        return "survived"
    if status in (4, 5):  # pytest's own: a wrong path, or nothing collected
        raise BaselineError(f"pytest ran no test:\n{output}")
    return "killed"


def _first(output: str) -> str:
    match = FAILED.search(output)
    return match.group(1) if match else ""

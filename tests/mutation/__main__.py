"""Mutation tests of the modules with the most expensive errors.

    python -m tests.mutation replay              test the listed mutants; all must be killed
    python -m tests.mutation draw 100 --seed 7   test new random mutations

Both commands test copies of the tree and never change the checkout. `draw` writes survivors to
survivors.json. `replay` reads known.json and finds each entry by its text.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from tests.mutation.operators import edits
from tests.mutation.sandbox import Run, Sandbox
from tests.mutation.targets import files_for, modules

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
T = TypeVar("T")
LISTED, SURVIVORS = FOLDER / "known.json", FOLDER / "survivors.json"


class ListError(Exception):
    """An entry of known.json does not fit the source."""


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    operator: str
    original: str
    mutated: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}"

    def entry(self) -> dict[str, object]:
        return {
            "path": self.path,
            "line": self.line,
            "operator": self.operator,
            "original": self.original,
            "mutated": self.mutated,
        }


def listed_mutants(root: Path, file: Path) -> list[Mutant]:
    """Return the listed mutants. Raise `ListError` unless each original text occurs once."""
    mutants, missing = [], []
    for entry in json.loads(file.read_text(encoding="utf-8")):
        path, original, mutated = entry["path"], entry["original"], entry["mutated"]
        source = (root / path).read_text(encoding="utf-8") if (root / path).exists() else ""
        if source.count(original) != 1:
            missing.append(f"{path}: text occurs {source.count(original)} times: {original!r}")
            continue
        line = source[: source.index(original)].count("\n") + 1
        changed = source.replace(original, mutated)
        mutants.append(Mutant(path, line, "listed", original, mutated, changed))
    if missing:
        raise ListError("\n".join(["update known.json:", *missing]))
    return mutants


def sampled_mutants(root: Path, count: int, seed: int, pattern: str) -> list[Mutant]:
    """Return `count` mutants in random order, each edit of each module being equally likely."""
    sources = {
        path: (root / path).read_text(encoding="utf-8")
        for path in modules(root)
        if re.search(pattern, path)
    }
    everything = [(path, edit) for path, source in sources.items() for edit in edits(source)]
    chosen = random.Random(seed).sample(everything, min(count, len(everything)))
    mutants = []
    for path, edit in chosen:
        source = sources[path]
        changed = edit.apply(source)
        number = source[: edit.start].count("\n")
        length = source[edit.start : edit.end].count("\n") + 1
        before = "\n".join(source.split("\n")[number : number + length])
        after_length = length + changed.count("\n") - source.count("\n")
        after = "\n".join(changed.split("\n")[number : number + after_length])
        mutants.append(Mutant(path, number + 1, edit.operator, before, after, changed))
    return mutants


def run(root: Path, mutants: Sequence[Mutant], workers: int) -> Iterator[tuple[Mutant, Run]]:
    """Test each mutant in one of the workers' copies, and yield the outcomes in order. Raise
    `BaselineError` before the first one if tests fail without any mutation."""
    tests = {mutant.path: files_for(root, mutant.path) for mutant in mutants}
    sets = sorted({tuple(sorted(files)) for files in tests.values()})
    with _sandboxes(root, workers) as free, ThreadPoolExecutor(workers) as pool:

        def with_sandbox(work: Callable[[Sandbox], T]) -> T:
            sandbox = free.get()
            try:
                return work(sandbox)
            finally:
                free.put(sandbox)

        def baseline(files: tuple[str, ...]) -> float:
            return with_sandbox(lambda sandbox: sandbox.baseline([*files]))

        baselines = dict(zip(sets, pool.map(baseline, sets), strict=True))

        def outcome(mutant: Mutant) -> Run:
            files = tests[mutant.path]
            seconds = baselines[tuple(sorted(files))]
            return with_sandbox(
                lambda sandbox: sandbox.test_mutant(mutant.path, mutant.source, files, seconds)
            )

        yield from zip(mutants, pool.map(outcome, mutants), strict=True)


@contextmanager
def _sandboxes(root: Path, count: int) -> Iterator[SimpleQueue[Sandbox]]:
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        Path(folder).chmod(0o755)
        free: SimpleQueue[Sandbox] = SimpleQueue()
        for number in range(count):
            free.put(Sandbox(root, Path(folder) / str(number)))
        yield free


def show(mutant: Mutant, result: Run) -> None:
    print(f"{result.verdict:9}{result.seconds:6.1f} s  {mutant.name:48}{mutant.operator}")
    if result.verdict == "survived":
        for sign, text in (("-", mutant.original), ("+", mutant.mutated)):
            print("".join(f"    {sign} {line.strip()}\n" for line in text.split("\n")), end="")
    else:
        print(f"    {result.test}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="mutate paths that match this pattern")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("replay", help="test the listed mutants")
    draw = commands.add_parser("draw", help="test random mutants")
    draw.add_argument("count", type=int)
    draw.add_argument("--seed", type=int, required=True)
    draw.add_argument("--least", type=float, default=0.9, help="share that must be killed")
    draw.add_argument("--output", type=Path, default=SURVIVORS)
    given = parser.parse_args()
    if given.command == "replay":
        mutants = [one for one in listed_mutants(ROOT, LISTED) if re.search(given.only, one.path)]
    else:
        mutants = sampled_mutants(ROOT, given.count, given.seed, given.only)
    survivors = []
    for mutant, result in run(ROOT, mutants, given.workers):
        show(mutant, result)
        if result.verdict == "survived":
            survivors.append(mutant)
    killed = len(mutants) - len(survivors)
    print(f"{killed} of {len(mutants)} mutants killed")
    if given.command == "replay":
        return 1 if survivors else 0
    report = {
        "seed": given.seed,
        "date": datetime.now(UTC).date().isoformat(),
        "mutants": len(mutants),
        "killed": killed,
        "survivors": [mutant.entry() for mutant in survivors],
    }
    given.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if killed >= given.least * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Compare measurements of the source with their limits: python -m meters

The limits in `meters/limits.json` are ratchets. A measurement above its limit fails. One below it
fails too, until `--lower` has written it as the new limit. Lines change with every commit, so they
may be up to 100 below their limit. `--root` measures another checkout, also one without meters.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from meters.source import MAX_LINES, MAX_PARAMETERS, Measurement, measure

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "meters" / "limits.json"
SLACK = {"Python code lines": 100, "lines in other languages": 100}
ON_THE_PATH = "merge or delete files on the path (python benchmarks/files_per_request.py --list)"
LONG_FUNCTIONS = f'split a function (python -m meters --list "functions over {MAX_LINES}")'
ADVICE = {
    "files per chat completion": ON_THE_PATH,
    "files per evaluated item": ON_THE_PATH,
    "files per pipeline query": ON_THE_PATH,
    "Python files": "merge or delete files",
    "Python code lines": "delete or simplify code",
    "files in other languages": "merge or delete files",
    "lines in other languages": "delete or simplify code",
    "type names with several meanings": 'rename a type (python -m meters --list "type names")',
    "module names used several times": 'rename a module (python -m meters --list "module names")',
    f"functions over {MAX_LINES} lines": LONG_FUNCTIONS,
    f"lines beyond {MAX_LINES} of a function": LONG_FUNCTIONS,
    f"functions over {MAX_PARAMETERS} parameters": (
        f'merge parameters (python -m meters --list "functions over {MAX_PARAMETERS}")'
    ),
    "files with constants below a class": (
        "move constants and loggers above the first class (python -m meters --list constants)"
    ),
}
REQUESTS = {name for name, advice in ADVICE.items() if advice == ON_THE_PATH}


def main() -> int:
    options = read_options()
    root: Path = options.root.resolve()
    names = [name for name in ADVICE if (options.list or "") in name]
    measured, errors = measure(root / "src"), []
    if not REQUESTS.isdisjoint(names):
        try:
            measured |= measure_requests(root)
        except RuntimeError as error:
            errors.append(str(error))
    measured = {name: measured[name] for name in names if name in measured}
    if options.list is not None:
        for name, one in measured.items():
            print(f"{name}: {one.value}", *one.entries, sep="\n  ")
    elif root != ROOT:
        print(*(f"{name}: {one.value}" for name, one in measured.items()), sep="\n")
    else:
        limits: dict[str, int] = json.loads(LIMITS.read_text(encoding="utf-8"))
        if options.lower:
            limits = lowered(limits, measured)
            LIMITS.write_text(json.dumps(limits, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        errors += failures(limits, measured)
    for line in errors:
        print(line)
    return 1 if errors else 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m meters", description=__doc__)
    add = parser.add_argument
    add(
        "--list",
        nargs="?",
        const="",
        metavar="WORDS",
        help="List the files and names behind each measurement whose name contains WORDS.",
    )
    add(
        "--lower", action="store_true", help="Replace limits that are too high by the measurements."
    )
    add("--root", type=Path, default=ROOT, metavar="DIR", help="Measure the checkout in DIR.")
    options = parser.parse_args()
    if not (options.root / "src" / "bottega").is_dir():
        parser.error(f"{options.root} has no folder src/bottega: name the root of a checkout")
    if options.lower and (options.list is not None or options.root.resolve() != ROOT):
        parser.error("--lower takes neither --list nor --root")
    if not any((options.list or "") in name for name in ADVICE):
        parser.error(f"no measurement contains {options.list!r}: run python -m meters --list")
    return options


def measure_requests(root: Path) -> dict[str, Measurement]:
    """Count the files per request of a checkout. Raises `RuntimeError` if its requests fail."""
    # A process of its own: it follows all functions, and imports the package of that checkout.
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "files_per_request.py", "--list"],
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(
            f"files per request: not measured, {reason};"
            " run python benchmarks/files_per_request.py and fix its error"
        )
    found = re.findall(r"^(\w.*): \d+\n((?:  .+\n)*)", done.stdout, re.MULTILINE)
    files = {f"files per {request}": tuple(listed.split()) for request, listed in found}
    return {name: Measurement(len(listed), listed) for name, listed in files.items()}


def failures(limits: Mapping[str, int], measured: Mapping[str, Measurement]) -> Iterator[str]:
    """Yield a line for each measurement that differs from its limit."""
    for name, (value, _) in measured.items():
        limit = limits.get(name, 0)
        if value > limit:
            yield (
                f"{name}: {value}, at most {limit}; {ADVICE[name]},"
                " or raise the limit in meters/limits.json with a decision in docs/decisions/"
            )
        elif value < limit - SLACK.get(name, 0):
            yield (
                f"{name}: {value}, below its limit {limit};"
                " run python -m meters --lower and commit meters/limits.json with this change"
            )


def lowered(limits: Mapping[str, int], measured: Mapping[str, Measurement]) -> dict[str, int]:
    """Return the limits, those that are too high replaced by their measurements."""
    return {
        name: measured[name].value
        if name in measured and measured[name].value < limit - SLACK.get(name, 0)
        else limit
        for name, limit in limits.items()
    }


if __name__ == "__main__":
    sys.exit(main())

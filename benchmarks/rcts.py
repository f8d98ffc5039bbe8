"""RCTS experiments with the bundled apprentice: python -m benchmarks.rcts

Runs tables 2 and 3 of the paper (methods), table 4 (search and rationales), table 5 (alpha) and
figure 5 (rewards, rollouts) on synthetic rules, scenes and digits, and on codes with a simulated
reader, each beside a baseline of equal cost without a tree. --replies stores replies by the content
of their prompts: a stopped run resumes, and a second run sends only the requests that it times.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import sys
import time
from dataclasses import replace
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.rcts_figures import SettingResults, draw, overrides, rows, tables
from benchmarks.rcts_plan import SEARCHES, SETTINGS, MethodConfig, Setting, methods
from benchmarks.rcts_searches import TaskSetup, model_of
from bottega.evaluation.config import RunConfig
from bottega.evaluation.runs.runner import evaluate

CONCURRENCY = 200
TIMED = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"some of {', '.join(SETTINGS)}")
    parser.add_argument("--limit", type=int, help="items per seed (default: 100)")
    parser.add_argument("--seeds", help="other seeds than the reported ones, e.g. 100,101")
    parser.add_argument("--replies", type=Path, default=Path("build/rcts"))
    parser.add_argument("--out", type=Path, default=Path("build/rcts"))
    parser.add_argument("--json", type=Path, help="write all figures and item scores to this file")
    parser.add_argument("--csv", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    for folder in (options.replies, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    names = options.only.split(",") if options.only else list(SETTINGS)
    all_rows = []
    for setting in (SETTINGS[name] for name in names):
        if options.limit:
            setting = replace(setting, items=options.limit)
        if options.seeds:
            setting = replace(setting, seeds=tuple(map(int, options.seeds.split(","))))
        start = time.perf_counter()
        measured = asyncio.run(measure(setting, options.replies / f"{setting.name}.jsonl"))
        (options.out / f"rcts_{setting.name}.md").write_text(tables(measured), "utf-8")
        if setting.deep:
            draw(measured, options.out / f"rcts_{setting.name}.png")
        print(tables(measured))
        print(f"{setting.name}: {time.perf_counter() - start:.0f} s", flush=True)
        all_rows += rows(measured)
    if options.json:
        options.json.write_bytes(orjson.dumps(all_rows, option=orjson.OPT_INDENT_2))
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, [name for name in all_rows[0] if name != "scores"])
            table.writeheader()
            table.writerows({k: v for k, v in row.items() if k != "scores"} for row in all_rows)


async def measure(setting: Setting, replies: Path) -> SettingResults:
    model = model_of(setting, replies)
    measured = SettingResults(setting)
    try:
        for seed in setting.seeds:
            task = TaskSetup(setting, seed, model)
            for config in methods(setting, first=seed == setting.seeds[0]):
                await _measure_method(measured, task, config)
            task.close()
    finally:
        await model.aclose()
    if setting.deep:
        measured.seconds = await time_methods(setting)
    return measured


async def _measure_method(measured: SettingResults, task: TaskSetup, config: MethodConfig) -> None:
    start = time.perf_counter()
    method = task.method(config)
    result, scored = await evaluate(
        task.data, method, RunConfig(concurrency=CONCURRENCY, seed=task.seed)
    )
    measured.keep(config, task.seed, scored)
    print(
        f"{task.setting.name}, seed {task.seed}, {overrides(config)}: {result.value:.3f},"
        f" {result.calls / result.n:.1f} calls, {time.perf_counter() - start:.1f} s",
        flush=True,
    )


async def time_methods(setting: Setting) -> dict[tuple[str, int], float]:
    """Return seconds per query with new requests, by method and concurrency."""
    seconds: dict[tuple[str, int], float] = {}
    model = model_of(setting, None)
    task = TaskSetup(replace(setting, items=TIMED), setting.seeds[0], model)
    for concurrency in (1, TIMED):
        for config in (
            MethodConfig("top-k"),
            *(MethodConfig(kind, setting.reward) for kind in SEARCHES[:2]),
        ):
            method = task.method(config)
            await method.answer(task.data.items[0].query)  # loads the model before the measurement
            result, _ = await evaluate(task.data, method, RunConfig(concurrency=concurrency))
            seconds[config.kind, concurrency] = result.seconds / result.n
    task.close()
    await model.aclose()
    return seconds


if __name__ == "__main__":
    main()

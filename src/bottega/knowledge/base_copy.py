"""Copy of a knowledge base to another store, with all ids, change numbers and vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bottega._util.identity import json_digest
from bottega._util.locations import StoreLocation
from bottega._util.postgres import postgres_url
from bottega._util.progress import Step
from bottega._util.sqlite import MEMORY
from bottega.errors import SettingError, StoreError
from bottega.knowledge.copy_store import END, CopyStore, LogEntry, RowDigests, StoredRow
from bottega.knowledge.records import StoredView
from bottega.knowledge.sqlite.copy import FileCopy, check_new
from bottega.knowledge.stores import check_finished

MAX_NAMED = 3


@dataclass(frozen=True)
class CopiedPart:
    """Part of the source: the number of its entries and a digest over all of them, in order."""

    name: str
    count: int
    digest: str


@dataclass(frozen=True)
class Comparison:
    """Result of a copy: parts of the source, differences of the target, and stored content that no
    copy contains (`uncopied`)."""

    parts: tuple[CopiedPart, ...]
    differences: tuple[str, ...]
    uncopied: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differences


@contextmanager
def open_copy(source: str | Path, target: str | Path) -> Iterator[BaseCopy]:
    """Open the source, a file or the URL of a database, and the target, a new file or the URL of an
    empty database.

    Raises `StoreError` if the target holds anything but an unfinished copy of the same source.
    """
    for location in (source, target):
        if str(location) == MEMORY:
            raise SettingError(
                "a knowledge base in memory cannot be copied",
                hint="set FROM and TO to a file or a postgresql:// URL",
            )
    if postgres_url(target) is None:
        check_new(target)  # before a lock file is created beside it
    with closing(_store(source)) as read:
        check_finished(read.rows)
        views = list(read.rows.views().values())
        if not (views or read.rows.sizes()[0] or read.notes()):
            raise StoreError(
                f"{read.name} contains no knowledge base", hint="check the path or the URL of FROM"
            )
        with _location(target).locked(), closing(_store(target, is_target=True)) as write:
            if read.location == write.location:
                raise SettingError(
                    f"{read.name} cannot be copied to itself",
                    hint="set TO to another file or database",
                )
            write.begin(read.location, views)
            yield BaseCopy(read, write, views)


class BaseCopy:
    """Copy in progress. `run` writes rows that are missing or differ, in durable batches, and
    resumes an interrupted run. `finish` compares everything and makes the target usable.

    Rows that other processes write to the source meanwhile may be missing."""

    def __init__(self, source: CopyStore, target: CopyStore, views: list[StoredView]) -> None:
        self._source, self._target, self._views = source, target, views
        self.source_name, self.target_name = source.name, target.name
        self.total = source.rows.sizes()[0]

    def run(self, progress: Step | None = None) -> int:
        """Copy all rows, changes and settings. Return the number of examples written."""
        written = 0
        for after, last, rows in self._row_ranges():
            for row in rows:
                if (damage := row.damage()) is not None:
                    raise StoreError(
                        f"example {row.example.id} of {self.source_name} is damaged: {damage}",
                        hint="run bottega verify --repair, or delete the example; then copy again",
                    )
            if _digests(rows) != self._stored(after, last):
                self._target.replace_rows(after, last, rows, self._views)
                written += len(rows)
            if progress is not None:
                progress(len(rows))
        for after, last, entries in self._source.log_batches():
            if entries != self._logged(after, last):
                self._target.replace_log(after, last, entries)
        notes, pruned = self._source.notes(), self._source.pruned_by_namespace()
        self._target.write_settings(notes, pruned)
        return written

    def finish(self, progress: Step | None = None) -> Comparison:
        """Compare the contents of both stores. If they are equal, make the target usable."""
        checks = [*self._check_rows(progress), self._check_log()]
        views, notes = _Check("views"), _Check("settings")
        # Read again: a reindex may have changed the views of the source.
        both = self._source.rows.views().values(), self._target.all_views()
        views.compare(*({one.name: list(vars(one).values()) for one in of} for of in both))
        notes.compare(self._source.notes(), self._target.notes())
        checks += [views, notes]
        compared = Comparison(
            tuple(check.part() for check in checks),
            tuple(check.difference() for check in checks if check.differs),
            tuple(self._source.uncopied()),
        )
        if compared.equal:
            self._target.publish()
        return compared

    def _row_ranges(self) -> Iterator[tuple[int, int, list[StoredRow]]]:
        """Yield key ranges that together cover all keys, with the rows of the source."""
        after = 0
        for last, rows in self._source.row_batches(self._views):
            yield after, last, rows
            after = last
        yield after, END, []

    def _stored(self, after: int, last: int) -> dict[int, RowDigests]:
        found = self._target.row_batches(self._views, after, last)
        return _digests(row for _, rows in found for row in rows)

    def _logged(self, after: int, last: int) -> list[LogEntry]:
        return [entry for entry in self._target.logged(after) if entry.seq <= last]

    def _check_rows(self, progress: Step | None) -> list[_Check]:
        checks = [_Check(part) for part in RowDigests._fields]
        for after, last, rows in self._row_ranges():
            ours, theirs = _digests(rows), self._stored(after, last)
            names = {row.key: f"{row.example.id} (row {row.key})" for row in rows}
            for index, check in enumerate(checks):
                check.compare(
                    {names[key]: digests[index] for key, digests in ours.items()},
                    {names.get(key, f"row {key}"): found[index] for key, found in theirs.items()},
                )
            if progress is not None:
                progress(len(rows))
        examples, images, vectors = checks
        images.count, vectors.count = self._source.count_images(), examples.count * len(self._views)
        return checks

    def _check_log(self) -> _Check:
        check = _Check("changes")
        for after, last, entries in self._source.log_batches():
            logged = self._logged(after, last)
            check.compare(*({str(one.seq): list(one) for one in of} for of in (entries, logged)))
        pruned = [store.pruned_by_namespace() for store in (self._source, self._target)]
        counted = check.count
        check.compare(*({f"pruned {name!r}": n for name, n in one.items()} for one in pruned))
        check.count = counted
        return check


class _Check:
    """Comparison of one part of both stores, entry by entry, in constant memory."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self._digest = hashlib.sha256()
        self._wrong = 0
        self._named: list[str] = []

    @property
    def differs(self) -> bool:
        return self._wrong > 0

    def compare(self, source: Mapping[str, object], target: Mapping[str, object]) -> None:
        """Compare the next entries by name."""
        self.count += len(source)
        for item in source.items():
            self._digest.update(json_digest(item).encode())
        for name in source.keys() | target.keys():
            if name not in source or name not in target or source[name] != target[name]:
                self._wrong += 1
                self._named = sorted([*self._named, name])[:MAX_NAMED]

    def part(self) -> CopiedPart:
        return CopiedPart(self.name, self.count, self._digest.hexdigest())

    def difference(self) -> str:
        more = f" and {self._wrong - MAX_NAMED} more" if self._wrong > MAX_NAMED else ""
        return f"{self.name} differ: {', '.join(self._named)}{more}"


def _location(path: str | Path) -> StoreLocation:
    return StoreLocation(postgres_url(path) or Path(path))


def _store(path: str | Path, *, is_target: bool = False) -> CopyStore:
    if (url := postgres_url(path)) is None:
        return FileCopy(str(path), is_target=is_target)
    from bottega.knowledge.postgres.copy import DatabaseCopy  # needs the extra [shared]

    return DatabaseCopy(url, is_target=is_target)


def _digests(rows: Iterable[StoredRow]) -> dict[int, RowDigests]:
    return {row.key: row.digests() for row in rows}

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bottega.knowledge.milvus import search
from bottega.knowledge.milvus.database import MilvusDatabase
from bottega.knowledge.milvus.search import CollectionState, MilvusSearch
from bottega.knowledge.records import StoredView
from tests.milvus import RunningMilvus


@pytest.fixture(params=["postgres", pytest.param("milvus", marks=pytest.mark.slow)])
def vectors(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, object]]:
    """Return the options that open a database with each kind of search. With Milvus, each search
    first copies all vectors to it and uses it for any number of rows."""
    if request.param == "postgres":
        yield {}
        return
    server: RunningMilvus = request.getfixturevalue("milvus")
    current = MilvusSearch._current

    def copied(self: MilvusSearch, view: StoredView) -> CollectionState:
        progress = current(self, view)
        self.wait_for_indexes()  # forgets the position
        progress.set(progress.copy.update())  # 0 while another thread copies
        return progress

    monkeypatch.setattr(MilvusSearch, "_current", copied)
    monkeypatch.setattr(search, "COMPARED_ABOVE", 0)  # filters use it, too
    monkeypatch.setattr(MilvusSearch, "_start_update", lambda self, progress: None)
    yield {"vectors": server.url(), "hnsw_above": 0}
    database = MilvusDatabase(server.url())
    for name in database.names("bottega_"):
        database.drop(name)
    database.close()


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Folder that other users can enter, unlike pytest's `tmp_path`."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "knowledge"
        folder.mkdir()
        Path(parent).chmod(0o755)
        yield folder
        folder.chmod(0o755)

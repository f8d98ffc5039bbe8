"""Recipes of RACC and of full KV reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bottega.bundled import bundled_compressor
from bottega.errors import LoadError, SettingError, StoreError
from bottega.generation import TransformersGenerator
from bottega.knowledge import KnowledgeBase
from bottega.parsing import LabelParser
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import InterleavedPrompter
from bottega.protocols import (
    Generator,
    Parser,
    Pricer,
    Prompter,
    Recorder,
    Retriever,
    Searcher,
    Tier,
)
from bottega.retrieval import DenseRetriever
from bottega.types import Candidate, Compression, Prefix, Query, Sampling

if TYPE_CHECKING:
    from bottega.compression import KVReuse, PassageCompressor, PassageStore
    from bottega.compression.persistence import SavedCompressor
    from bottega.generation.loaded import LoadedModel

T = TypeVar("T")
BUNDLED = "bundled:"
# Files of `compression.persistence` and `compression.store`, which need torch.
COMPRESSOR = ("compressor.json", "compressor.safetensors")
STORE = "manifest.json"


def kv_reuse_searcher(
    base: Generator, *, prompt: Prompter, parse: Parser, sampling: Sampling | None = None
) -> Searcher:
    """Return a pipeline's `search` that replaces shown passages with their keys and values,
    computed separately for each passage (`compression.KVReuse`).

    Raises `SettingError` for a base that is not in this process.
    """
    model = require_local(base)
    from bottega.compression import PrefixSearcher

    return PrefixSearcher(
        KVReuseLoader(model, prompt), model, prompt=prompt, parse=parse, sampling=sampling
    )


@dataclass
class KVReuseLoader:
    """KV reuse that is loaded at the first query, in the model's thread."""

    base: TransformersGenerator
    prompt: Prompter
    loaded: KVReuse | None = None

    async def __call__(self, query: Query, shown: Sequence[Candidate]) -> Prefix:
        return await self.base.run(lambda model: self._reuse(model).prefix(query, shown))

    def _reuse(self, model: LoadedModel) -> KVReuse:
        if self.loaded is None:
            from bottega.compression import KVReuse

            self.loaded = KVReuse(model.model, model.encode, model.ends, self.prompt)
        return self.loaded


def racc(
    knowledge: KnowledgeBase,
    compressor: str | Path | None,
    base: Generator,
    *,
    hyper: TransformersGenerator | None = None,
    store: str | Path | None = None,
    shots: int = 5,
    retrieve: Retriever | None = None,
    prompt: Prompter | None = None,
    parse: Parser | None = None,
    record: Recorder | None = None,
    price: Pricer | None = None,
    sampling: Sampling | None = None,
) -> Pipeline:
    """RACC (Weng et al.): compress `shots` retrieved passages into a KV prefix, guided by their
    retrieval scores, and answer with that prefix.

    `compressor` is a folder written by `bottega compress train`; None selects the bundled
    compressor. `hyper` is the model that compresses, `base` by default. `store` holds
    pre-compressed passages (`bottega compress build`). Raises `SettingError` for a base that is not
    in this process: keys and values cannot be sent over HTTP.
    """
    prompt, parse = prompt or InterleavedPrompter(), parse or LabelParser()
    sampling = sampling or Sampling(max_tokens=64)
    return Pipeline(
        route=FixedRouter(Tier(base.name, base, shots)),
        retrieve=retrieve or DenseRetriever(knowledge.search),
        prompt=prompt,
        parse=parse,
        search=compression_searcher(
            compressor or bundled_compressor_for(base),
            base,
            hyper=hyper,
            store=store,
            prompt=prompt,
            parse=parse,
            sampling=sampling,
        ),
        record=record,
        price=price,
        sampling=sampling,
    )


def bundled_compressor_for(base: Generator) -> Path:
    """Return the folder of the bundled compressor. Raises `SettingError` if there is none."""
    if not base.name.startswith(BUNDLED):
        raise SettingError(
            f"there is no bundled compressor for {base.name}",
            hint="train one with `bottega compress train` and pass its folder as compressor",
        )
    return bundled_compressor()


def compression_searcher(
    compressor: str | Path,
    base: Generator,
    *,
    hyper: TransformersGenerator | None = None,
    store: str | Path | None = None,
    prompt: Prompter,
    parse: Parser,
    sampling: Sampling,
) -> Searcher:
    """Return the `search` of `racc`, which replaces shown passages with a compressed prefix."""
    loader = compressor_loader(compressor, base, hyper=hyper, store=store)
    from bottega.compression import PrefixSearcher

    return PrefixSearcher(
        loader,
        loader.base,
        prompt=prompt,
        parse=parse,
        sampling=sampling,
        describe=loader.compression,
    )


def compressor_loader(
    compressor: str | Path,
    base: Generator,
    *,
    hyper: TransformersGenerator | None = None,
    store: str | Path | None = None,
) -> CompressorLoader:
    """Return the compressor, not loaded yet. Raises `LoadError`, `StoreError` for missing folders,
    and `SettingError` for a base that is not in this process."""
    check_compressor_files(compressor, store)
    model = require_local(base)
    return CompressorLoader(Path(compressor).expanduser(), model, hyper or model, store)


def check_compressor_files(compressor: str | Path | None, store: str | Path | None) -> None:
    """Raise `LoadError` without a compressor and `StoreError` without stored passages."""
    if compressor is not None:
        folder = Path(compressor).expanduser()
        missing = [one for one in COMPRESSOR if not (folder / one).is_file()]
        if missing:
            raise LoadError(
                f"there is no compressor in {compressor}: {missing[0]} is missing",
                hint="pass a folder written by `bottega compress train`; run an interrupted"
                " training again until it finishes",
            )
    if store is not None and not (Path(store).expanduser() / STORE).is_file():
        raise StoreError(
            f"there are no compressed passages in {store}",
            hint="run `bottega compress build` first",
        )


def require_local(base: Generator) -> TransformersGenerator:
    """Return the base. Raises `SettingError` for a model that is not in this process."""
    if not isinstance(base, TransformersGenerator):
        raise SettingError(
            f"{base.name} cannot use a KV prefix: a prefix cannot be sent over HTTP",
            hint="use a model in this process, such as TransformersGenerator(...) or bundled()",
        )
    return base


@dataclass
class CompressorLoader:
    """Compressor that is loaded at the first query, in the thread of the hyper model."""

    folder: Path
    base: TransformersGenerator
    hyper: TransformersGenerator
    store: str | Path | None = None
    loaded: PassageCompressor | None = None

    async def __call__(self, query: Query, shown: Sequence[Candidate]) -> Prefix:
        return await self._run(lambda compressor: compressor.prefix(query, shown))

    async def stored_prefix(
        self, query: Query, candidates: Sequence[Candidate], k: int
    ) -> tuple[list[Candidate], Prefix] | None:
        """Return up to `k` of the candidates that the store holds, with their prefix; None if it
        holds none."""

        def read(compressor: PassageCompressor) -> tuple[list[Candidate], Prefix] | None:
            shown = compressor.stored(candidates)[:k]
            return (shown, compressor.prefix(query, shown)) if shown else None

        return await self._run(read)

    async def open(self) -> None:
        """Load the models and the compressor. Raises `LoadError` for a compressor of other models,
        and `StoreError` for a store of another compressor."""
        self.check()  # before the models, whose loading may take minutes
        await self._run(lambda compressor: None)

    def check(self) -> None:
        """Raise `LoadError` for a damaged compressor, `StoreError` for a store of another one."""
        self._open_store(self._saved())

    def compression(self, prefix: Prefix) -> Compression:
        """Describe the compression for a trace."""
        bundled = self.base.name.startswith(BUNDLED) and self.folder == bundled_compressor()
        store = None if self.store is None else str(self.store)
        return Compression("bundled" if bundled else str(self.folder), store, prefix.length)

    def load(self, model: LoadedModel) -> PassageCompressor:
        if self.loaded is None:
            from bottega.compression import InputBuilder, PassageCompressor

            saved = self._saved()
            passages = self._open_store(saved)
            base = self.base.loaded
            hyper = saved.open(model.model, base.model)
            inputs = InputBuilder(model.encode, model.ends)
            saved.check_tokenizers(hyper=inputs, base=InputBuilder(base.encode, base.ends))
            self.loaded = PassageCompressor(saved.racc, hyper, inputs, passages)
        return self.loaded

    async def _run(self, work: Callable[[PassageCompressor], T]) -> T:
        if self.loaded is None:
            await self.base.load()
        return await self.hyper.run(lambda model: work(self.load(model)))

    def _saved(self) -> SavedCompressor:
        from bottega.compression import load

        return load(self.folder)

    def _open_store(self, saved: SavedCompressor) -> PassageStore | None:
        if self.store is None:
            return None
        from bottega.compression import PassageStore, StoreManifest

        config = saved.racc.config
        manifest = StoreManifest.for_store(
            self.store, saved.digest, config.document_prompts, config.width
        )
        return PassageStore(self.store, manifest)

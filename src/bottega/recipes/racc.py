"""RACC and the full reuse of keys and values as compositions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bottega.bundled import bundled_compressor
from bottega.errors import LoadError, SettingError, StoreError
from bottega.generation import TransformersGenerator
from bottega.knowledge import KnowledgeBase
from bottega.parsing import LabelParser
from bottega.pipeline import Pipeline
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
from bottega.routing import FixedRouter
from bottega.types import Candidate, Prefix, Query, Sampling

if TYPE_CHECKING:
    from bottega.compression import KVReuse, PassageCompressor
    from bottega.generation.loaded import LoadedModel


def kv_reuse_searcher(
    base: Generator, *, prompt: Prompter, parse: Parser, sampling: Sampling | None = None
) -> Searcher:
    """A pipeline's `search` in the place of showing passages: their keys and values, each read
    alone, stand before the question (`compression.KVReuse`). Raises `SettingError` for a base that
    is not in this process."""
    model = require_local(base)
    from bottega.compression import PrefixSearcher

    return PrefixSearcher(
        KVReuseLoader(model, prompt), model, prompt=prompt, parse=parse, sampling=sampling
    )


class KVReuseLoader:
    """Reads passages in the thread of the model."""

    def __init__(self, base: TransformersGenerator, prompt: Prompter) -> None:
        self._base, self._prompt = base, prompt
        self._made: KVReuse | None = None

    async def __call__(self, query: Query, shown: Sequence[Candidate]) -> Prefix:
        return await self._base.run(lambda model: self._reuse(model).prefix(query, shown))

    def _reuse(self, model: LoadedModel) -> KVReuse:
        if self._made is None:
            from bottega.compression import KVReuse

            self._made = KVReuse(model.model, model.encode, model.ends, self._prompt)
        return self._made


BUNDLED = "bundled:"
# Files of `compression.persistence` and `compression.store`, which need torch.
COMPRESSOR = ("compressor.json", "compressor.safetensors")
STORE = "manifest.json"


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
    """RACC (Weng et al.): `shots` retrieved passages are compressed into a prefix of keys and
    values, guided by their scores, and the model answers behind it.

    `compressor` is a folder that `bottega compress train` wrote, None the bundled model's own;
    `hyper` is the model that it was trained to compress with, `base` itself if that is the same.
    `store` holds passages that were compressed before (`bottega compress build`). Raises
    `SettingError` for a base that is not in this process: keys and values cannot be sent over HTTP.
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
    """The folder of its compressor. Raises `SettingError` where there is none."""
    if not base.name.startswith(BUNDLED):
        raise SettingError(
            f"there is no bundled compressor for {base.name}",
            hint="train one with `bottega compress train`, and name its folder as the compressor",
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
    """What `racc` puts in the place of showing passages."""
    check_compressor_files(compressor, store)
    model = require_local(base)
    from bottega.compression import PrefixSearcher

    condensing = CompressorLoader(Path(compressor), model, hyper or model, store)
    return PrefixSearcher(condensing, model, prompt=prompt, parse=parse, sampling=sampling)


def check_compressor_files(compressor: str | Path | None, store: str | Path | None) -> None:
    """Raises `LoadError` and `StoreError` where there is none."""
    if compressor is not None:
        folder = Path(compressor).expanduser()
        missing = [one for one in COMPRESSOR if not (folder / one).is_file()]
        if missing:
            raise LoadError(
                f"there is no compressor in {compressor}: {missing[0]} is missing",
                hint="give the folder that `bottega compress train` wrote; one that was stopped"
                " holds none until the same command has finished",
            )
    if store is not None and not (Path(store).expanduser() / STORE).is_file():
        raise StoreError(
            f"there are no compressed passages in {store}",
            hint="run `bottega compress build` first",
        )


def require_local(base: Generator) -> TransformersGenerator:
    """Raises `SettingError` for a model that cannot answer behind keys and values."""
    if not isinstance(base, TransformersGenerator):
        raise SettingError(
            f"{base.name} cannot answer behind passages: a prefix of keys and values does not"
            " travel over HTTP",
            hint="use a model in this process, such as TransformersGenerator(...) or bundled()",
        )
    return base


class CompressorLoader:
    """A condenser that is put together at the first query, in the thread of the hyper model."""

    def __init__(
        self,
        compressor: Path,
        base: TransformersGenerator,
        hyper: TransformersGenerator,
        store: str | Path | None = None,
    ) -> None:
        self._compressor, self._store = compressor, store
        self._base, self._hyper = base, hyper
        self._made: PassageCompressor | None = None

    async def __call__(self, query: Query, shown: Sequence[Candidate]) -> Prefix:
        if self._made is None:
            await self._base.load()
        return await self._hyper.run(lambda model: self.made(model).prefix(query, shown))

    def made(self, model: LoadedModel) -> PassageCompressor:
        if self._made is None:
            from bottega.compression import (
                InputBuilder,
                Manifest,
                PassageCompressor,
                PassageStore,
                load,
            )

            saved = load(self._compressor)
            shape = saved.racc.config
            kept = None
            if self._store is not None:
                manifest = Manifest.for_store(
                    self._store, saved.digest, shape.document_prompts, shape.width
                )
                kept = PassageStore(self._store, manifest)
            hyper = saved.open(model.model, self._base.loaded.model)
            self._made = PassageCompressor(
                saved.racc, hyper, InputBuilder(model.encode, model.ends), kept
            )
        return self._made

"""Searches of `bottega ask`: RCTS with a budget, and compressed passages (RACC)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from bottega.cli.output import note, waiting
from bottega.cli.shown_progress import progress
from bottega.errors import SettingError
from bottega.naming import check_torch
from bottega.pipeline import run_sync
from bottega.prompting import InterleavedPrompter, ReasoningPrompter
from bottega.protocols import Generator, Parser, Prompter, Reranker, Searcher, turns_only
from bottega.recipes import compression_searcher
from bottega.recipes.racc import bundled_compressor_for, compressor_loader, require_local
from bottega.recipes.rcts import FETCH, SECONDS, LimitedSearcher, SearchError, SearchLimits
from bottega.reranking import check_depth
from bottega.types import Sampling


@dataclass(frozen=True)
class SearchChoice:
    """Options of `bottega ask` that replace the nearest demonstrations."""

    search: Annotated[
        Literal["none", "rcts"],
        Option(
            metavar="none|rcts",
            help="rcts: select the demonstrations of --kb by a tree search, with many completions."
            " The prompt asks for reasons before the answer.",
        ),
    ] = "none"
    search_calls: Annotated[
        int | None,
        Option(
            min=1,
            help="Maximum number of completions of the search.",
            show_default="those of 10 rollouts",
        ),
    ] = None
    search_tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="Maximum tokens of the search, prompts and completions together.",
            show_default="no limit",
        ),
    ] = None
    search_seconds: Annotated[
        float | None,
        Option(
            help="Time limit of the search in seconds; afterwards the nearest examples are shown.",
            show_default=f"{SECONDS:g}",
        ),
    ] = None
    compressor: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Show the examples of --kb as a KV prefix (racc): a folder written by `bottega"
            " compress train`. The bundled apprentice has its own.",
        ),
    ] = None
    store: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Read the examples of --kb from a store of `bottega compress build` (racc)."
            " Default: compress on demand.",
        ),
    ] = None

    @property
    def compresses(self) -> bool:
        return self.compressor is not None or self.store is not None

    def fetch(self, shots: int) -> int:
        """Return the number of candidates to retrieve."""
        return shots if self.search == "none" else max(FETCH, shots)

    def prompter(self, generator: Generator) -> Prompter:
        """Return the prompt. A search asks for reasons, which its reward uses, unless the model
        reads brief turns only."""
        if self.search == "none" or turns_only(generator):
            return InterleavedPrompter(show_choices=False)
        return ReasoningPrompter()

    def check(self, has_knowledge: bool) -> None:
        """Raise `SettingError` for options that exclude or need each other."""
        seconds = self.search_seconds
        limits = {"calls": self.search_calls, "tokens": self.search_tokens, "seconds": seconds}
        given = next((name for name, value in limits.items() if value is not None), None)
        if self.search == "none" and given:
            raise SettingError(f"--search-{given} needs a search", hint="add --search rcts")
        if seconds is not None and not seconds > 0:
            raise SettingError(
                f"--search-seconds must be above 0, got {seconds:g}",
                hint=f"set e.g. --search-seconds {SECONDS:g}",
            )
        if self.search != "none" and self.compresses:
            raise SettingError(
                "--search cannot be used with --compressor or --store", hint="remove one of them"
            )
        if (self.search != "none" or self.compresses) and not has_knowledge:
            subject = "--compressor and --store need" if self.compresses else "--search needs"
            raise SettingError(f"{subject} a knowledge base", hint="add --kb K.db")

    def searcher(
        self,
        generator: Generator,
        *,
        shots: int,
        prompt: Prompter,
        parse: Parser,
        rerank: Reranker,
        sampling: Sampling,
    ) -> Searcher | None:
        """Return the search, None for the nearest demonstrations. Raises `SettingError` for a
        budget smaller than one rollout or for compressed passages with a model that is not local,
        `LoadError` and `StoreError` for a model and folders that do not match."""
        if self.compresses:
            check_torch()
            folder = self.compressor or bundled_compressor_for(require_local(generator))
            with waiting("loading the compressor"):  # before anything is retrieved
                run_sync(compressor_loader(folder, generator, store=self.store).open())
            return compression_searcher(
                folder, generator, store=self.store, prompt=prompt, parse=parse, sampling=sampling
            )
        if self.search == "none":
            return None
        check_depth(shots)
        limits = self._limits(generator)
        limits.check(lambda name: f"--search-{name}", sampling.max_tokens)
        tree = limits.tree_search(
            generator, prompt=prompt, parse=parse, shots=shots, sampling=sampling
        )
        return LimitedSearcher(tree, limits, rerank, on_error=_note_fallback)

    @contextmanager
    def progress(self, generator: Generator) -> Iterator[None]:
        """Show the progress of the answer: with a search, its completions and the time left."""
        if self.search == "none":
            with waiting("answering"):
                yield
            return
        with progress("searching", None, most_calls=self._limits(generator).max_calls):
            yield

    def _limits(self, generator: Generator) -> SearchLimits:
        calls, tokens = self.search_calls, self.search_tokens
        seconds = self.search_seconds or SECONDS
        return SearchLimits(calls, tokens, seconds, brief=turns_only(generator))


def _note_fallback(error: SearchError) -> None:
    note(f"{error}; the nearest examples are shown instead ({error.hint})")

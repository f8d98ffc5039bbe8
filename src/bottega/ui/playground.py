"""Playground: ask a question about an image, with one or two settings side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.recording import stored_trace
from bottega.types import Example, Query
from bottega.ui.bases import BaseOpener, open_for
from bottega.ui.gateway_client import CallOutcome, GatewayClient, QuestionOptions
from bottega.ui.pages import Page, PageResult, Visit, require

MAX_SHOTS = 64
MAX_IMAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class PlaygroundPage:
    """Handlers of the playground. `open_base` returns the knowledge base of a namespace; it is
    None if the gateway serves a pipeline of Python code."""

    client: GatewayClient
    open_base: BaseOpener | None

    def show(self, visit: Visit) -> Page:
        return self._page(visit)

    def submit(self, visit: Visit) -> PageResult:
        """Ask the question with one or two settings, or add it with its correct answer to the
        knowledge base."""
        text = visit.value("question").strip()
        files = visit.files("images")
        self.client.gateway.limits.check_size(sum(one.size or 0 for one in files))
        images = [
            Image.from_bytes(one.file.read(MAX_IMAGE_BYTES + 1), source=one.filename)
            for one in files
        ]
        if not (text or images):
            raise ApiError("the question is empty", hint="write a question or choose an image")
        if visit.value("action") == "add":
            return self._page(visit, added=self._add(visit, text, images))
        wanted = [_settings(visit, "a")]
        if visit.value("compare"):
            wanted.append(_settings(visit, "b"))
        namespace, loop = visit.namespace, visit.loop

        def ask(settings: QuestionOptions) -> CallOutcome:
            return self.client.ask(visit.user, namespace, text, images, settings, loop)

        with ThreadPoolExecutor(len(wanted)) as pool:
            outcomes = list(pool.map(ask, wanted))
        return self._page(visit, outcomes)

    def _add(self, visit: Visit, text: str, images: list[Image]) -> str:
        require(visit.user.can_store, "change the knowledge base")
        answer = visit.value("answer").strip()
        if not answer or self.open_base is None:
            raise ApiError("the correct answer is empty", hint="enter the correct answer")
        for image in images:
            image.check()
        tags = {"provenance": "human", "context": ""}
        source = f"console:{visit.user.name}"
        example = Example(Query(text, tuple(images)), answer, tags=tags, source=source)
        check = self.client.gateway.access.check_namespace
        added = open_for(visit, self.open_base, check).add([example])
        return "Added to the knowledge base" if added.new else "Already in the knowledge base"

    def _page(
        self, visit: Visit, outcomes: list[CallOutcome] | None = None, added: str = ""
    ) -> Page:
        results = [
            (one, None if one.trace is None else stored_trace(one.trace)) for one in outcomes or ()
        ]
        models = self.client.models(visit.user)
        tiers = [id for id in models if self.client.gateway.models[id]]
        return Page(
            "playground.html",
            {
                "title": "Playground",
                "models": models,
                # Two equal settings would compare nothing.
                "compared_model": tiers[0] if tiers else "",
                "variants": self.client.variants(),
                "results": results,
                "added": added,
                "can_add": visit.user.can_store and self.open_base is not None,
                "value": visit.value,
                "max_shots": MAX_SHOTS,
                "namespace": visit.namespace,
                "has_cache": self.open_base is not None,
            },
        )


def _settings(visit: Visit, column: str) -> QuestionOptions:
    shots = visit.value(f"shots_{column}")
    return QuestionOptions(
        visit.value(f"model_{column}", "bottega"),
        visit.number(f"shots_{column}", 0, most=MAX_SHOTS) if shots else None,
        retrieve=(retrieve := visit.value(f"retrieve_{column}")) != "no",
        store=bool(visit.value("store")),
        variant=retrieve,
    )

"""Tree search (RCTS) of one chat request: its completions, their bills and its result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bottega.gateway.ports import ServedTier, UpstreamCall
from bottega.gateway.request.bill import SearchBill, allowed_output, expected_tokens
from bottega.gateway.request.jobs import (
    ChatJob,
    ChatResult,
    TenantQuery,
    fitting,
    question_prompt,
    request_prompt,
    without_rationales,
)
from bottega.image import Image
from bottega.openai_api.request import Body, DataUrl, messages_json, parse_request, sampling_fields
from bottega.recipes.rcts import FETCH, SearchLimits
from bottega.types import Candidate, Prompt, Query, Reply, Sampling

SendCall = Callable[[ChatJob, UpstreamCall], Awaitable[ChatResult]]
BuildCall = Callable[[Sequence[Candidate]], Awaitable[UpstreamCall]]
EncodeBody = Callable[[Sequence[Image], Callable[[], Body]], Awaitable[Body]]
MODEL_FIELD = "bottega"  # required to parse a body; each upstream sets its own
LIMITS = ("max_tokens", "max_completion_tokens")


@dataclass
class RequestSearch:
    """Tree search of one request, and the generator of that search. Branches are the client's
    request with other demonstrations, as `call` builds them; rewards need other requests. `send`
    makes a call and books its cost."""

    job: ChatJob
    query: TenantQuery
    served: ServedTier
    limits: SearchLimits
    call: BuildCall
    send: SendCall
    encode: EncodeBody
    data_url: DataUrl
    _branches: dict[Prompt, tuple[Candidate, ...]] = field(default_factory=dict)
    _results: dict[Prompt, ChatResult] = field(default_factory=dict)
    _running: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.served.name

    async def run(self, k: int) -> ChatResult:
        """Return the answer with the chosen demonstrations. Raises `SearchError`, and
        `AccountBudgetError` if the key's budget does not allow the whole search."""
        pipeline, query = self.query.pipeline, self.query.query
        assert pipeline.retrieve is not None
        found = await pipeline.retrieve(query, max(k, FETCH))
        candidates = [one for one in found if self._fits([one])]
        longest = sorted(candidates, key=lambda one: expected_tokens(self.job.request, [one]))[-k:]
        largest = await self.call(longest)
        tree = self.limits.tree_search(
            self,
            prompt=self._prompt,
            parse=pipeline.parse,
            shots=k,
            sampling=Sampling(max_tokens=allowed_output(largest)),
        )
        await self.job.bill.reserve_search(largest, self.limits.max_calls)
        try:
            result = await self.limits.search(tree, query, candidates, k)
        finally:
            # Replies that are still pending after a time-out or a disconnect are billed, too.
            await asyncio.gather(*self._running, return_exceptions=True)
            self.job.bill.failed()  # releases what the search has not spent
        chosen = self._results[result.prompt]
        chosen.call.is_paid, chosen.call.tree = True, result.tree
        return chosen

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        """Return the reply of one request of the search. Raises `GenerationError`."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        job = self.job
        if prompt in self._branches:
            call, request = await self.call(self._branches[prompt]), job.request
        else:
            body = await self._reward_body(prompt, sampling)
            call, request = UpstreamCall(self.served, body), parse_request(body)
        bill = SearchBill(job.record, request, job.bill.price, job.bill.estimates)
        result = await self.send(replace(job, request=request, bill=bill), call)
        self._results[prompt] = result
        return result.completed.reply

    async def aclose(self) -> None:
        """Leave the tier open: the gateway closes it."""

    def _prompt(self, query: Query, shown: Sequence[Candidate]) -> Prompt:
        request, images = self.job.request, self.query.images
        if query is not self.query.query:  # a labelled question of the mutual reward
            return question_prompt(request, images, query, shown)
        kept = fitting(shown, request, self.served.capabilities)
        prompt = request_prompt(request, images, self._readable(kept))
        self._branches[prompt] = tuple(kept)
        return prompt

    async def _reward_body(self, prompt: Prompt, sampling: Sampling) -> Body:
        fields = sampling_fields(sampling)
        limited = any(self.job.request.body.get(name) is not None for name in LIMITS)
        if not limited and self.served.max_tokens is None:
            fields["max_tokens"] = None  # the server's own limit, as for the branches

        def build() -> Body:
            messages = messages_json(prompt.messages, self.data_url)
            given = {name: value for name, value in fields.items() if value is not None}
            return {"model": MODEL_FIELD, "messages": messages, **given}

        return await self.encode(prompt.images, build)

    def _readable(self, shown: Sequence[Candidate]) -> Sequence[Candidate]:
        brief = self.served.turns_only
        return without_rationales(shown) if brief else shown

    def _fits(self, shown: Sequence[Candidate]) -> bool:
        return bool(fitting(shown, self.job.request, self.served.capabilities))

"""Drafts: answers without demonstrations that some retrieval methods search with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from bottega.errors import GenerationError
from bottega.gateway.ports import ServedTier, UpstreamCall
from bottega.openai_api.fields import DataUrl, messages_json
from bottega.openai_api.request import Body
from bottega.openai_api.response import ChatCompletion
from bottega.protocols import turns_only
from bottega.types import Prompt, Reply, Sampling

# Sends a call of the current request and books its cost.
SendDraft = Callable[[UpstreamCall], Awaitable[ChatCompletion]]


@dataclass
class _Sender:
    send: SendDraft | None


_sender: ContextVar[_Sender] = ContextVar("draft_sender")


@contextmanager
def send_drafts(send: SendDraft) -> Iterator[None]:
    """Send the drafts of searches inside the block with `send`.

    A task or connection that begins inside the block keeps its context; a connection may stay open
    for days. Therefore the context refers to `send`, and so to the request, only until the end of
    the block.
    """
    sender = _Sender(send)
    token = _sender.set(sender)
    try:
        yield
    finally:
        sender.send = None
        _sender.reset(token)


class RequestDraftGenerator:
    """Generator that calls a tier within the current request, whose bill includes the draft."""

    def __init__(self, served: ServedTier, data_url: DataUrl) -> None:
        self._served = served
        self._data_url = data_url
        self.name = served.name
        self.turns_only = turns_only(served.tier.generator)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        sender = _sender.get(None)
        if sender is None or sender.send is None:
            raise GenerationError("a draft needs a request", hint="search with another method")
        body: Body = {
            "messages": messages_json(prompt.messages, self._data_url),
            "max_tokens": sampling.max_tokens,
            "temperature": 0,
        }
        return (await sender.send(UpstreamCall(self._served, body))).reply

    async def aclose(self) -> None:
        """Leave the tier open: the gateway closes it."""

"""Cost of the upstream calls of a request: estimates, reservations and bookings."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from bottega.gateway.accounting.access import Reservation
from bottega.gateway.ports import RequestRecord, UpstreamCall
from bottega.gateway.request.reasoning import ReceivedChunks
from bottega.openai_api.client import CallState, track_call
from bottega.openai_api.request import (
    IMAGE_TOKENS,
    LIMIT_FIELDS,
    MAX_IMAGE_TOKENS,
    Body,
    ChatRequest,
    max_text_tokens,
    non_ascii_bytes,
)
from bottega.openai_api.streams import CHARACTERS_PER_TOKEN, count_tokens, reported_usage
from bottega.protocols import Pricer
from bottega.types import Candidate, Example, Usage

# Until an upstream has reported a usage, its tokenizer, chat template and image token counts are
# unknown: a short prompt may count a thousand tokens. Later, this limits how much one prompt
# adds to the reservations of all others.
UNSEEN_PROMPT = 8192
UNSEEN_FACTOR = 4
TOKENS_PER_SECOND = 50.0
DECAY = 0.95  # factor on the sums of earlier calls at each new call

ONE_OF_EACH = Usage(1, 1)
# All keys share the longest reply: above this multiple of the tier's `output_tokens`, one client's
# reply must not raise the reservations of the others.
MAX_LONGEST_FACTOR = 8
T = TypeVar("T")


def answer_text(example: Example) -> str:
    """Return the answer after its rationale, as the master gave it."""
    return f"{example.rationale}\nAnswer: {example.answer}" if example.rationale else example.answer


def expected_tokens(request: ChatRequest, shown: Sequence[Candidate]) -> int:
    """Estimate the prompt tokens of the request with its demonstrations."""
    if not shown:
        return request.prompt_tokens
    examples = [candidate.example for candidate in shown]
    texts = sum(len(example.query.text) + len(answer_text(example)) for example in examples)
    seen = _image_tokens(request, shown)
    return request.prompt_tokens + math.ceil(texts / CHARACTERS_PER_TOKEN) + seen


def expected_image_tokens(request: ChatRequest, shown: Sequence[Candidate]) -> int:
    """Return the part of `expected_tokens` for images."""
    return request.image_tokens + _image_tokens(request, shown)


def _image_tokens(request: ChatRequest, shown: Sequence[Candidate]) -> int:
    if not shown:
        return 0
    images = sum(len(one.example.query.images) for one in shown)
    return images * IMAGE_TOKENS.get(request.image_detail or "", MAX_IMAGE_TOKENS)


def expected_non_ascii_bytes(request: ChatRequest, shown: Sequence[Candidate]) -> int:
    """Return the UTF-8 bytes outside ASCII of the request and its demonstrations."""
    if not shown:
        return request.non_ascii_bytes
    texts = (text for one in shown for text in (one.example.query.text, answer_text(one.example)))
    return request.non_ascii_bytes + sum(map(non_ascii_bytes, texts))


@dataclass
class Bill:
    """Bill that adds the cost of each upstream call to the request's `record`. The expected cost
    of a call is reserved from `reserve` until one of the other methods books or releases it. A call
    that `is_paid` is not booked again."""

    record: RequestRecord
    request: ChatRequest
    price: Pricer
    estimates: TokenEstimates

    async def reserve(self, call: UpstreamCall) -> None:
        """Reserve the largest expected cost of the call, unless it is free. Raises
        `AccountBudgetError` if the cost exceeds the rest of the budget."""
        if (reservation := self._reservation(call)) is not None:
            largest_usage = Usage(self._max_prompt(call), self._max_output(call))
            await reservation.reserve(self.price(call.model, largest_usage) or 0.0)

    async def reserve_search(self, call: UpstreamCall, completions: int) -> None:
        """Reserve the largest expected cost of a search of this many completions like `call`, whose
        prompts may also contain an earlier reply. Raises `AccountBudgetError` like `reserve`."""
        if (reservation := self._reservation(call)) is not None:
            output = self._max_output(call)
            largest_usage = Usage(self._max_prompt(call) + output, output)
            each = self.price(call.model, largest_usage) or 0.0
            await reservation.reserve(completions * each)

    def paid(self, call: UpstreamCall, usage: Usage | None, seconds: float | None = None) -> None:
        """Book a call by the usage that the upstream reported. `seconds` is the time of a complete
        reply, None for a stream."""
        if call.is_paid:
            return
        if usage is None or not usage.prompt_tokens + usage.completion_tokens:
            # Every request has tokens: zero means not counted, so the cost is unknown.
            self._add(call, Usage(), 0.0 if self.is_free(call) else None)
            return
        # Before `_add` releases the reservation: the next reservation uses the new estimate.
        self.estimates.update(
            call.model,
            self._expected(call),
            usage,
            seconds,
            choices=_choices(_fields(call)),
            non_ascii_bytes=self._non_ascii_bytes(call),
            image_tokens=expected_image_tokens(self.request, call.shown),
        )
        self._add(call, usage, self.price(call.model, usage))

    def failed(self) -> None:
        """Release the reservation: an upstream that fails is assumed to charge nothing."""
        self._settle(0.0)

    def cut_off(self, call: UpstreamCall, seconds: float, steps: Sequence[bytes] = ()) -> None:
        """Book a call that ended early: by the last usage of its stream, else by its prompt and
        text so far. `seconds` is the time until the first text, or until the end without one: the
        model may have generated hidden reasoning, which is estimated from it."""
        if call.is_paid:
            return
        usage = reported_usage(steps)
        if usage is None:
            output = count_tokens(steps) + self.estimates.generated(call.model, seconds)
            images = expected_image_tokens(self.request, call.shown)
            prompt = self.estimates.prompt(call.model, self._expected(call), images)
            prompt = min(prompt, self._max_prompt(call))
            usage = Usage(prompt, min(output, allowed_output(call, output)))
        self._add(call, usage, self.price(call.model, usage))

    def is_free(self, call: UpstreamCall) -> bool:
        return self.price(call.model, ONE_OF_EACH) == 0

    def _reservation(self, call: UpstreamCall) -> Reservation | None:
        """Return the request's reservation, None if the call is free or the key has no budget."""
        reservation = self.record.reservation
        if reservation is None or not reservation.has_budget or self.is_free(call):
            return None
        return reservation

    def _expected(self, call: UpstreamCall) -> int:
        return expected_tokens(self.request, call.shown)

    def _non_ascii_bytes(self, call: UpstreamCall) -> int:
        return expected_non_ascii_bytes(self.request, call.shown)

    def _max_output(self, call: UpstreamCall) -> int:
        longest = self.estimates.longest(call.model)
        return allowed_output(call, min(longest, MAX_LONGEST_FACTOR * call.served.output_tokens))

    def _max_prompt(self, call: UpstreamCall) -> int:
        expected, more = self._expected(call), self._non_ascii_bytes(call)
        images = expected_image_tokens(self.request, call.shown)
        return self.estimates.max_prompt(call.model, expected, more, images)

    def _add(self, call: UpstreamCall, usage: Usage, cost: float | None) -> None:
        record, call.cost_usd = self.record, cost
        record.route, record.model = call.served.name, call.model
        record.shots = len(call.shown)
        record.usage = record.usage + usage
        # One call of unknown cost makes the total unknown; the budget counts it as free.
        unknown = cost is None or record.cost_usd is None
        record.cost_usd = None if unknown else (record.cost_usd or 0.0) + (cost or 0.0)
        self._settle(cost or 0.0)

    def _settle(self, usd: float) -> None:
        if self.record.reservation is not None:
            self.record.reservation.settle(usd)


@dataclass
class SearchBill(Bill):
    """Bill of one completion of a search. `reserve_search` has reserved its cost already."""

    async def reserve(self, call: UpstreamCall) -> None:
        """Do nothing."""

    def _settle(self, usd: float) -> None:
        if self.record.reservation is not None:
            self.record.reservation.pay(usd)


def allowed_output(call: UpstreamCall, usual: int = 0) -> int:
    """Return the maximum number of completion tokens of all choices together. Without a limit in
    the request or the tier, each choice counts the tier's `output_tokens`, or `usual` if that is
    more; `min_tokens` raises either. The tokens of a `prediction` are added: rejected ones are
    charged as output."""
    fields = _fields(call)
    limits = [limit for name in LIMIT_FIELDS if isinstance(limit := fields.get(name), int)]
    if not limits and call.served.max_tokens is not None:
        limits = [call.served.max_tokens]
    each = max(limits) if limits else max(call.served.output_tokens, usual)
    if isinstance(least := fields.get("min_tokens"), int):
        each = max(each, least)
    if call.served.capabilities.context is not None:
        each = min(each, call.served.capabilities.context)
    if prediction := fields.get("prediction"):
        each += max_text_tokens(prediction)
    return each * _choices(fields)


def _fields(call: UpstreamCall) -> Body:
    return {**call.body, **call.served.extra}


def _choices(fields: Body) -> int:
    choices = fields.get("n")
    return max(1, choices) if isinstance(choices, int) else 1


async def shield_for(
    work: Coroutine[Any, Any, T],
    seconds: float,
    may_finish: Callable[[], bool],
    idle: asyncio.Event,
) -> T:
    """Return the result of `work`. If the caller is cancelled and `may_finish` returns True, the
    work continues for at most `seconds`, and only until `idle` is set; if it ends in time, its
    result or error replaces the cancellation. Otherwise the work is cancelled."""
    if not seconds:
        return await work
    task = asyncio.ensure_future(work)
    try:
        await _wait_until_done(task)
    except asyncio.CancelledError:
        if may_finish() and not idle.is_set():
            waiting = asyncio.create_task(idle.wait())
            both = [task, waiting]
            try:  # a second cancellation ends the wait
                await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
        if not task.done():
            raise
        # The result replaces the cancellation: otherwise a later `asyncio.timeout` of this task
        # would mistake it for its own.
        current = asyncio.current_task()
        assert current is not None
        current.uncancel()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return task.result()


async def _wait_until_done(task: asyncio.Future[Any]) -> None:
    """Wait until the task is done. Unlike `await task`, do not pass a cancellation of the caller on
    to the task, or raise the task's error."""
    done = asyncio.get_running_loop().create_future()

    def set_done(_: object) -> None:
        if not done.done():  # the caller may have been cancelled
            done.set_result(None)

    task.add_done_callback(set_done)
    await done


@contextmanager
def billed_call(
    bill: Bill, call: UpstreamCall, received: ReceivedChunks | None = None
) -> Iterator[CallState]:
    """Track a call whose cost is reserved. If it fails, book its cost or release the
    reservation."""
    try:
        with track_call() as state:
            yield state
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and not state.is_waiting:
            # The upstream was generating, and charges for its output so far.
            received = received or ReceivedChunks()
            silent = (received.first_text or perf_counter()) - state.started
            bill.cut_off(call, silent, received.chunks)
        else:
            bill.failed()
        raise


@dataclass
class _PromptSums:
    """Decaying sums over the texts, or the images, of the prompts of one model."""

    expected: float = 0.0
    bound: float = 0.0
    prompt: float = 0.0

    def add(self, expected: float, bound: float, prompt: float) -> None:
        self.expected = self.expected * DECAY + expected
        self.bound = self.bound * DECAY + bound
        self.prompt = self.prompt * DECAY + max(0.0, prompt)

    @property
    def ratio(self) -> float:
        return self.prompt / self.expected if self.expected else 1.0

    @property
    def max_ratio(self) -> float:
        return max(1.0, self.prompt / self.bound) if self.bound else 1.0


@dataclass
class _UsageSums:
    """Decaying sums over the calls to one model. The tokens of `images` are the prompt tokens that
    remain after the text of their prompts."""

    text: _PromptSums = field(default_factory=_PromptSums)
    images: _PromptSums = field(default_factory=_PromptSums)
    shortfall: float = 0.0
    completion: float = 0.0
    seconds: float = 0.0
    longest: float = 0.0


class TokenEstimates:
    """Token estimates per model, corrected by the usage that its upstream has reported.

    `expected` is the estimate of the prompt's tokens from its characters and images, which fits
    English; `image_tokens` is the part for its images, whose true number differs by model. Prompts
    without images correct the text, the others the images. `non_ascii_bytes` are the UTF-8 bytes of
    the prompt's text outside ASCII. Byte-level tokenizers need at most one token per byte.
    """

    def __init__(self) -> None:
        self._models: defaultdict[str, _UsageSums] = defaultdict(_UsageSums)

    def update(
        self,
        model: str,
        expected: int,
        usage: Usage,
        seconds: float | None = None,
        *,
        choices: int = 1,
        non_ascii_bytes: int = 0,
        image_tokens: int = 0,
    ) -> None:
        """Update the estimates. `seconds` is the time of a complete reply, None for a stream;
        `choices` share the completion tokens."""
        one = self._models[model]
        bound = expected + non_ascii_bytes
        if image_tokens:
            left = usage.prompt_tokens - (expected - image_tokens) * one.text.ratio
            one.images.add(image_tokens, image_tokens + non_ascii_bytes, left)
        else:
            one.text.add(expected, bound, usage.prompt_tokens)
        shortfall = min(usage.prompt_tokens - bound, UNSEEN_PROMPT)
        one.shortfall = max(one.shortfall * DECAY, shortfall)
        # Maxima decay too: one odd reply must not raise all later reservations.
        one.longest = max(one.longest * DECAY, usage.completion_tokens / choices)
        if seconds is not None:
            one.completion = one.completion * DECAY + usage.completion_tokens
            one.seconds = one.seconds * DECAY + seconds

    def prompt(self, model: str, expected: int, image_tokens: int = 0) -> int:
        """Return the most likely prompt token count."""
        one = self._models[model]
        text = expected - image_tokens
        return round(text * one.text.ratio + image_tokens * one.images.ratio)

    def max_prompt(
        self, model: str, expected: int, non_ascii_bytes: int, image_tokens: int = 0
    ) -> int:
        """Return a cautious upper estimate of the prompt tokens, for a reservation."""
        one = self._models[model]
        if not (one.images if image_tokens else one.text).expected:
            return max(UNSEEN_PROMPT, UNSEEN_FACTOR * expected) + non_ascii_bytes
        text = (expected - image_tokens) * one.text.max_ratio
        likely = text + image_tokens * one.images.max_ratio
        return round(max(likely, expected + one.shortfall)) + non_ascii_bytes

    def longest(self, model: str) -> int:
        """Return the completion tokens of the longest choice, which decays with each later call."""
        return math.ceil(self._models[model].longest)

    def generated(self, model: str, seconds: float) -> int:
        """Estimate the completion tokens of an unseen reply from its seconds of generation."""
        one = self._models[model]
        rate = one.completion / one.seconds if one.seconds else TOKENS_PER_SECOND
        return math.ceil(rate * seconds)

"""Cost of one request: reserved before each upstream call, then booked or estimated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bottega.gateway.accounting.limiter import TokenEstimates
from bottega.gateway.demonstrations import expected_non_ascii_bytes, expected_tokens
from bottega.gateway.endpoint import RequestRecord
from bottega.gateway.ports import UpstreamCall
from bottega.openai_api.request import Body, ChatRequest, max_text_tokens
from bottega.openai_api.response import add_usage
from bottega.openai_api.streams import count_tokens, reported_usage
from bottega.protocols import Pricer
from bottega.types import Usage

ONE_OF_EACH = Usage(1, 1)
LIMITS = ("max_completion_tokens", "max_tokens")
# All keys share the longest reply: above this multiple of the tier's `output_tokens`, one client's
# reply must not raise the reservations of the others.
MAX_LONGEST_FACTOR = 8


@dataclass
class Bill:
    """Bill that adds the cost of each upstream call to the request's `record`. The expected cost
    of a call is reserved from `reserve` until one of the other methods books or releases it."""

    record: RequestRecord
    request: ChatRequest
    price: Pricer
    estimates: TokenEstimates

    def reserve(self, call: UpstreamCall) -> None:
        """Reserve the expected cost of the call. Raises `BudgetError` if it does not fit."""
        if self.record.hold is not None:
            longest = min(
                self.estimates.longest(call.model), MAX_LONGEST_FACTOR * call.served.output_tokens
            )
            most = Usage(self._max_prompt(call), allowed_output(call, longest))
            self.record.hold.reserve(self.price(call.model, most) or 0.0)

    def paid(self, call: UpstreamCall, usage: Usage | None, seconds: float | None = None) -> None:
        """Book a call by the usage that the upstream reported. `seconds` is the time of a complete
        reply, None for a stream."""
        if usage is None or not usage.prompt_tokens + usage.completion_tokens:
            # Every request has tokens: zero means not counted, so the cost is unknown.
            self._add(call, Usage(), 0.0 if self.is_free(call) else None)
            return
        self.estimates.learn(
            call.model,
            self._expected(call),
            usage,
            seconds,
            choices=_choices(_fields(call)),
            non_ascii_bytes=self._non_ascii_bytes(call),
        )
        self._add(call, usage, self.price(call.model, usage))

    def failed(self) -> None:
        """Release the reservation: an upstream that fails is assumed to charge nothing."""
        if self.record.hold is not None:
            self.record.hold.settle(0.0)

    def cut_off(self, call: UpstreamCall, seconds: float, steps: Sequence[bytes] = ()) -> None:
        """Book a call that ended early: by the last usage of its stream, else by its prompt and
        text so far. `seconds` is the time until the first text, or until the end without one: the
        model may have generated hidden reasoning, which is estimated from it."""
        usage = reported_usage(steps)
        if usage is None:
            output = count_tokens(steps) + self.estimates.generated(call.model, seconds)
            usage = Usage(self._prompt(call), min(output, allowed_output(call, output)))
        self._add(call, usage, self.price(call.model, usage))

    def is_free(self, call: UpstreamCall) -> bool:
        return self.price(call.model, ONE_OF_EACH) == 0

    def _expected(self, call: UpstreamCall) -> int:
        return expected_tokens(self.request, call.shown)

    def _non_ascii_bytes(self, call: UpstreamCall) -> int:
        return expected_non_ascii_bytes(self.request, call.shown)

    def _prompt(self, call: UpstreamCall) -> int:
        return min(self.estimates.prompt(call.model, self._expected(call)), self._max_prompt(call))

    def _max_prompt(self, call: UpstreamCall) -> int:
        expected, more = self._expected(call), self._non_ascii_bytes(call)
        return self.estimates.max_prompt(call.model, expected, more)

    def _add(self, call: UpstreamCall, usage: Usage, cost: float | None) -> None:
        record, call.cost_usd = self.record, cost
        record.route, record.model = call.served.name, call.model
        record.shots = len(call.shown)
        record.usage = add_usage(record.usage, usage)
        unknown = cost is None or record.cost_usd is None
        record.cost_usd = None if unknown else (record.cost_usd or 0.0) + (cost or 0.0)
        if record.hold is not None:
            record.hold.settle(cost or 0.0)


def dismissed_usd(calls: Iterable[UpstreamCall]) -> float:
    return sum(call.cost_usd or 0.0 for call in calls)


def allowed_output(call: UpstreamCall, usual: int = 0) -> int:
    """Return the maximum number of completion tokens of all choices together. Without a limit in
    the request, each choice counts the tier's `output_tokens`, or `usual` if that is more;
    `min_tokens` raises either. The tokens of a `prediction` are added: rejected ones are charged as
    output."""
    fields = _fields(call)
    limits = [limit for name in LIMITS if isinstance(limit := fields.get(name), int)]
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

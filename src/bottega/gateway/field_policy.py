"""Which top-level fields of a request are sent on to an upstream."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bottega.gateway.fields import FIELDS, LONGEST_NAME
from bottega.gateway.ports import Body
from bottega.gateway.refusals import Refusal

# Fields of OpenAI's chat completions, without `web_search_options`: each search has a price.
OPENAI = {
    *FIELDS,
    "audio",
    "function_call",
    "messages",
    "modalities",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "tool_choice",
}
# Sampling parameters of vLLM, SGLang and llama.cpp: they only choose among tokens.
SAMPLING = {
    "min_p",
    "repeat_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "top_k",
    "typical_p",
}
# vLLM's output constraints. They mask tokens, as `response_format` does; its other options choose
# the code that runs (`guided_decoding_backend`) or accept a whole grammar.
CONSTRAINTS = {"guided_choice", "guided_json", "guided_regex"}
STRUCTURED = "structured_outputs"
STRUCTURED_OPTIONS = {"choice", "json", "regex"}
ALLOWED = OPENAI | SAMPLING | CONSTRAINTS
# Clients of local servers send these defaults; other values need the operator's permission.
DEFAULTS: Mapping[str, object] = {
    "add_generation_prompt": True,
    "best_of": 1,
    "echo": False,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "priority": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}
SERVICE_TIER = "service_tier"
# Price lists have one price per model, which is that of these service tiers.
PLAIN_TIERS = (None, "auto", "default")


def allowed_fields(body: Body, more: Collection[str] = ()) -> Body:
    """Return the body without fields at their `DEFAULTS`. Raise `Refusal` for a field that is not
    allowed; `more` are fields that the operator allows. Other fields may change what a server does
    or costs: chat templates, priorities, logits processors. A null field counts as absent."""
    dropped = {name for name in body.keys() & DEFAULTS.keys() if _is_default(name, body[name])}
    dropped.difference_update(more)
    if dropped:
        body = {name: value for name, value in body.items() if name not in dropped}
    _check(body, more)
    return body


def _check(body: Body, more: Collection[str]) -> None:
    for name, value in body.items():
        if name == SERVICE_TIER and value not in PLAIN_TIERS:
            problem = f"{name} {str(value)[:LONGEST_NAME]!r} is not available here"
            raise _refusal(problem, name, 'send "default"')
        allowed = name in ALLOWED or name in more or name == SERVICE_TIER
        allowed = allowed or (name == STRUCTURED and _only_constrains(value))
        if not allowed and value is not None:
            name = name[:LONGEST_NAME]
            problem = f"{name!r} is not forwarded by this gateway"
            raise _refusal(problem, name, "ask the operator to allow it ([limits] fields)")


def _is_default(name: str, value: object) -> bool:
    default = DEFAULTS[name]
    # True == 1 in Python; JavaScript writes 1.0 as 1.
    return isinstance(value, bool) is isinstance(default, bool) and value == default


def _only_constrains(value: object) -> bool:
    return isinstance(value, dict) and value.keys() <= STRUCTURED_OPTIONS


def _refusal(problem: str, name: str, alternative: str) -> Refusal:
    return Refusal(
        f"Unsupported parameter: {problem}.",
        code="unsupported_parameter",
        param=name,
        hint=f"leave it out, or {alternative}",
    )

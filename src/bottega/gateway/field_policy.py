"""Which top-level fields of a request are sent on to an upstream."""

from __future__ import annotations

from collections.abc import Collection

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
SAMPLING = {"min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "top_k"}
SERVICE_TIER = "service_tier"
# Price lists have one price per model, which is that of these service tiers.
PLAIN_TIERS = (None, "auto", "default")


def check_fields(body: Body, more: Collection[str] = ()) -> None:
    """Raise `Refusal` for a field that is not allowed; `more` are fields that the operator allows.
    Other fields may change what a server does or costs: chat templates, priorities, logits
    processors. A null field counts as absent."""
    for name, value in body.items():
        if name == SERVICE_TIER and value not in PLAIN_TIERS:
            problem = f"{name} {str(value)[:LONGEST_NAME]!r} is not available here"
            raise _refusal(problem, name, 'send "default"')
        allowed = name in OPENAI or name in SAMPLING or name in more or name == SERVICE_TIER
        if not allowed and value is not None:
            name = name[:LONGEST_NAME]
            problem = f"{name!r} is not forwarded by this gateway"
            raise _refusal(problem, name, "ask the operator to allow it ([limits] fields)")


def _refusal(problem: str, name: str, alternative: str) -> Refusal:
    return Refusal(
        f"Unsupported parameter: {problem}.",
        code="unsupported_parameter",
        param=name,
        hint=f"leave it out, or {alternative}",
    )

"""Fields that servers spell in two ways, or do not know. Nothing is changed before a refusal."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import orjson

from bottega.errors import RejectedError
from bottega.generation.openai_format import JSONObject, joined

UNKNOWN = re.compile(
    r"(?i)unsupported|not supported|unrecogni|unknown|unexpected|not permitted|not allowed"
    r"|forbidden|deprecated|does not support|instead"
)
LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}


@dataclass(frozen=True)
class Dialect:
    """`limit_field` is the only name of the token limit that the server takes, None for both."""

    limit_field: str | None = None
    stream_options: bool = True

    def spell(self, fields: dict[str, object]) -> dict[str, object]:
        if self.limit_field is not None and LIMITS[self.limit_field] in fields:
            fields = dict(fields)
            limit = fields.pop(LIMITS[self.limit_field])
            fields.setdefault(self.limit_field, limit)
        if not self.stream_options and "stream_options" in fields:
            fields = {name: value for name, value in fields.items() if name != "stream_options"}
        return fields

    def after(self, error: RejectedError, fields: dict[str, object]) -> Dialect | None:
        """What to speak after this refusal of `fields`, None if another spelling cannot help."""
        said = str(error)
        if error.status not in (400, 422) or not UNKNOWN.search(said):
            return None
        if self.limit_field is None and "max_completion_tokens" in said:
            spoken = next((name for name in LIMITS if name in fields), None)
            return replace(self, limit_field=LIMITS[spoken]) if spoken else None
        if self.stream_options and "stream_options" in said and "stream_options" in fields:
            return replace(self, stream_options=False)
        return None


def mended(reply: JSONObject) -> bytes | None:
    """The reply written anew if it lacks its usage or if a content is no string, else None.

    A usage that nobody told counts nothing: clients read its fields without asking.
    """
    choices = reply["choices"]
    silent = [
        message
        for choice in (choices if isinstance(choices, list) else ())
        if _wants_text(message := choice["message"])
    ]
    told = isinstance(reply.get("usage"), dict)
    if told and not silent:
        return None
    for message in silent:
        message["content"] = joined(message.get("content"), "text") or ""
    usage = {} if told else {"usage": no_usage()}
    return orjson.dumps({**reply, **usage})


def no_usage() -> dict[str, object]:
    return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def _wants_text(message: JSONObject) -> bool:
    """Null is what the protocol says beside a call."""
    calls = message.get("tool_calls") or message.get("function_call") or message.get("audio")
    return not isinstance(message.get("content"), str) and not calls

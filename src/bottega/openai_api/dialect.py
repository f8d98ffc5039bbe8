"""Field names that servers spell differently or do not support."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from bottega.errors import RejectedError

UNKNOWN_FIELD = re.compile(
    r"(?i)unsupported|not supported|unrecogni|unknown|unexpected|not permitted|not allowed"
    r"|forbidden|deprecated|does not support|instead"
)
LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}


@dataclass(frozen=True)
class Dialect:
    """Fields that a server accepts, learned from its errors. `limit_field` is the only name of the
    token limit that it accepts, None for both."""

    limit_field: str | None = None
    stream_options: bool = True

    def spell(self, fields: dict[str, object]) -> dict[str, object]:
        """Return the fields as the server accepts them."""
        if self.limit_field is not None and LIMITS[self.limit_field] in fields:
            fields = dict(fields)
            limit = fields.pop(LIMITS[self.limit_field])
            fields.setdefault(self.limit_field, limit)
        if not self.stream_options and "stream_options" in fields:
            fields = {name: value for name, value in fields.items() if name != "stream_options"}
        return fields

    def after(self, error: RejectedError, fields: dict[str, object]) -> Dialect | None:
        """Return the dialect to try after this error for `fields`, None if none can help."""
        message = str(error)
        if not rejects_field(error):
            return None
        if self.limit_field is None and "max_completion_tokens" in message:
            used = next((name for name in LIMITS if name in fields), None)
            return replace(self, limit_field=LIMITS[used]) if used else None
        if self.stream_options and "stream_options" in message and "stream_options" in fields:
            return replace(self, stream_options=False)
        return None


def rejects_field(error: RejectedError) -> bool:
    """Return whether the error says that the server does not know or support a field."""
    return error.status in (400, 422) and UNKNOWN_FIELD.search(str(error)) is not None

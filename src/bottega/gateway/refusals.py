"""What a client is told when a request is not answered."""

from __future__ import annotations

from collections.abc import Mapping

from bottega.errors import BottegaError


class Refusal(BottegaError):
    """Becomes `{"error": {"message", "type", "param", "code"}}` with `status`. `param` names the
    field of the body as the client would write it: `messages[2].content`."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.type, self.code, self.param = status, type, code, param
        self.headers = dict(headers or {})

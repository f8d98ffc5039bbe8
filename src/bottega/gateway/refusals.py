"""What a client is refused, in the words of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping

from bottega.errors import BottegaError


class Refusal(BottegaError):
    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.type, self.code, self.param = status, type, code, param
        self.headers = dict(headers or {})

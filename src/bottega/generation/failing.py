"""What an endpoint's refusal means: one error with the server's words, free of credentials."""

from __future__ import annotations

from collections.abc import Mapping

from bottega.errors import EndpointError
from bottega.generation.connection import Endpoint
from bottega.generation.retrying import asked_wait
from bottega.generation.wire import status_error

LONGEST_MESSAGE = 300
LONGEST_READ = 64 * 1024  # of a message; searching megabytes for secrets would take seconds
NO_HEADERS: Mapping[str, str] = {}


def failed(
    endpoint: Endpoint,
    model: str,
    status: int,
    said: str,
    headers: Mapping[str, str] = NO_HEADERS,
) -> EndpointError:
    """The server's advice in the headers, when to try again and whether at all, is followed."""
    error = status_error(status, shown(endpoint, said), endpoint.shown, model)
    error.retry_after = asked_wait(headers)
    if (advice := headers.get("x-should-retry")) in ("true", "false"):
        error.retryable = advice == "true"
    return error


def shown(endpoint: Endpoint, said: str) -> str:
    """One line of what a server said, without the secrets that it may repeat."""
    redacted = endpoint.redact(said) if len(said) < LONGEST_READ else ""
    return " ".join(redacted.split())[:LONGEST_MESSAGE]

"""Address and credentials of an endpoint, its errors without secrets, and calls for a tracer."""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from yarl import URL

from bottega._util.tracing import ModelCall
from bottega.errors import EndpointError, RejectedError, SettingError
from bottega.openai_api.errors import JSONObject, RequestRejectedError, status_error
from bottega.openai_api.response import error_message
from bottega.types import Prompt

Redact = Callable[[str], str]
# Shorter strings are no secrets, and redacting them would hide ordinary words.
MIN_SECRET = 4
SECRET_PATTERN = r"\b(?:sk|key|pk)-[\w*-]{6,}|\bbearer\s+\S+|(?<=://)[^/@\s]+(?=@)"
MAX_MESSAGE = 300
# Searching megabytes for secrets would take seconds: longer messages are not shown.
MAX_SEARCHED = 64 * 1024
NO_HEADERS: Mapping[str, str] = {}
DEFAULT_BASE = "https://api.openai.com/v1"
CHAT_PATH, COMPLETIONS_PATH = "/chat/completions", "/completions"
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# The client and its connections set these.
OWN_HEADERS = frozenset(
    (
        *("accept", "accept-encoding", "authorization", "connection", "content-encoding"),
        *("content-length", "content-type", "expect", "host", "keep-alive", "proxy-authorization"),
        *("te", "traceparent", "tracestate", "trailer", "transfer-encoding", "upgrade"),
    )
)
# Names of OpenTelemetry's conventions for operations, and for the providers of these hosts. Other
# servers of the protocol, such as vLLM, count as `openai`.
OPERATIONS = {CHAT_PATH: "chat", COMPLETIONS_PATH: "text_completion"}
PROVIDERS = {
    "api.anthropic.com": "anthropic",
    "api.cohere.ai": "cohere",
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral_ai",
    "api.moonshot.ai": "moonshot_ai",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
    "generativelanguage.googleapis.com": "gcp.gemini",
}
AZURE = ".openai.azure.com"
KEY_HINT = "copy the key again, without quotes or line breaks"
BASE_HINT = "set OPENAI_BASE_URL (or base_url=) to something like http://localhost:8000/v1"


def redactor(secrets: Iterable[str]) -> Redact:
    """Return a function that hides these secrets, in any URL quoting, and everything that has the
    form of a credential."""
    plain = {form for secret in secrets for form in (secret, unquote(secret), unquote_plus(secret))}
    quoted = {
        form
        for text in plain
        for form in (text, quote(text), quote(text, safe=""), quote_plus(text))
    }
    long = [form for form in quoted if len(form) >= MIN_SECRET]
    longest_first = sorted(long, key=len, reverse=True)
    pattern = re.compile("|".join([*map(re.escape, longest_first), SECRET_PATTERN]), re.IGNORECASE)
    return lambda text: pattern.sub("[redacted]", text)


def check_header(name: str) -> None:
    """Raise `SettingError` for a header that cannot be added to requests."""
    if not HEADER_NAME.fullmatch(name):
        raise SettingError(
            f"a header's name must consist of letters, digits and -, got {name[:64]!r}",
            hint='write a name such as "x-team"',
        )
    if name.lower() in OWN_HEADERS:
        raise SettingError(
            f"the header {name!r} must not be set: each request has its own",
            hint="remove it; for a key in another header than Authorization, set api_key_header",
        )


def _check_value(subject: str, value: str) -> None:
    if not (value.isascii() and value.isprintable()):
        raise SettingError(f"{subject} has characters that a header cannot contain", hint=KEY_HINT)


@dataclass(frozen=True)
class Endpoint:
    """Base URL, headers and secrets of an endpoint. `shown` is the base URL without credentials or
    query, safe for errors and logs."""

    base: URL = field(repr=False)
    shown: str
    headers: dict[str, str] = field(repr=False)
    redact: Redact = field(repr=False)

    @classmethod
    def locate(
        cls, base_url: str | None, api_key: str | None, headers: Mapping[str, str] | None = None
    ) -> Endpoint:
        """Return the endpoint; the defaults are OPENAI_BASE_URL and OPENAI_API_KEY. `headers` are
        added to every request, and their values treated as secrets. Raises `SettingError`."""
        text = (base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE).strip()
        base = _parse(text)
        bare = base.with_user(None).with_query(None)
        key = (os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key).strip()
        _check_value("the API key", key)
        added = {name: value.strip() for name, value in (headers or {}).items()}
        for name, value in added.items():
            check_header(name)
            _check_value(f"the header {name!r}", value)
        sent = {"Content-Type": "application/json", "Accept": "application/json", **added}
        credential = key
        if key:
            sent["Authorization"] = f"Bearer {key}"
        elif base.user is not None:
            pair = f"{base.user}:{base.password or ''}"
            credential = base64.b64encode(pair.encode()).decode("ascii")
            sent["Authorization"] = f"Basic {credential}"
        # The URL's secrets, quoted and unquoted.
        values = [pair.partition("=")[2] for pair in base.raw_query_string.split("&")]
        passwords = (base.password or base.user or "", base.raw_password or base.raw_user or "")
        redact = redactor([credential, *added.values(), *passwords, *base.query.values(), *values])
        return cls(base.with_user(None), str(bare), sent, redact)

    def url(self, path: str) -> URL:
        return self.base.joinpath(path.lstrip("/")).with_query(self.base.query)

    def display(self, message: str) -> str:
        """Return a server's message in one line, without secrets."""
        redacted = self.redact(message) if len(message) < MAX_SEARCHED else ""
        return " ".join(redacted.split())[:MAX_MESSAGE]

    def error(
        self, model: str, status: int, body: JSONObject, headers: Mapping[str, str] = NO_HEADERS
    ) -> EndpointError:
        """Return the error for a failed request; `body` is the error's JSON, empty if there was
        none. The server's advice in the headers decides whether and when to retry."""
        message, wait = self.display(error_message(body)), requested_wait(headers)
        found = body.get("error", body)  # some servers have the fields at the top
        words = found.items() if isinstance(found, dict) else ()
        # Clients read numbers as texts, too.
        fields = {name: self.display(str(word)) for name, word in words if type(word) in (str, int)}
        error = status_error(status, message, self.shown, model, fields, wait)
        if isinstance(error, RejectedError):
            error = RequestRejectedError(error, message, fields)
        error.detail, error.fields = message, fields
        error.retry_after = wait
        if (advice := headers.get("x-should-retry")) in ("true", "false"):
            error.retryable = advice == "true"
        return error


def _parse(text: str) -> URL:
    try:
        url = URL(text)
        host = url.host or ""
        host.encode("idna")  # as the resolver does, which rejects `a..b` and overlong labels
    except ValueError:  # its message quotes the URL, which may contain a password
        raise SettingError("the base URL is not a URL", hint=BASE_HINT) from None
    if url.scheme not in ("http", "https") or not host:
        shown = text.rpartition("@")[2][:60]  # without user and password
        raise SettingError(
            f"the base URL must start with http:// or https://, got {shown!r}", hint=BASE_HINT
        )
    path = url.path.rstrip("/").removesuffix(CHAT_PATH).removesuffix(COMPLETIONS_PATH)
    return url.with_path(path, keep_query=True)


def requested_wait(
    headers: Mapping[str, str], now: Callable[[], float] = time.time
) -> float | None:
    """Return the seconds in `retry-after-ms` or `retry-after` (seconds or an HTTP date)."""
    for name, scale in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            value = float(headers.get(name) or "")
        except ValueError:
            continue
        if 0 <= value < float("inf"):
            return value / scale
    try:
        date = parsedate_to_datetime(headers.get("retry-after") or "")
        return max(0.0, date.timestamp() - now())
    except (ValueError, OverflowError):  # years and offsets beyond the range of a date
        return None


def describe_call(
    model: str,
    endpoint: Endpoint,
    path: str,
    fields: Mapping[str, object],
    *,
    prompt: Prompt | None = None,
    stream: bool = False,
) -> ModelCall:
    """Return the call of a body with these fields. `prompt` is what is added to them."""
    host = endpoint.base.host or ""
    provider = "azure.ai.openai" if host.endswith(AZURE) else PROVIDERS.get(host, "openai")
    return ModelCall(
        model,
        provider,
        OPERATIONS[path],
        fields,
        prompt,
        address=host,
        port=endpoint.base.port,
        stream=stream,
    )

"""Forms of the console: check of their origin, and reading within limits."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import FormData
from starlette.requests import Request

from bottega.errors import BottegaError
from bottega.gateway.request.reading import limited, too_large
from bottega.openai_api.errors import ApiError

MAX_FILES = 1000  # per form
MAX_UPLOAD = 512 << 20  # bytes per form
MAX_FIELD = 4 << 20  # bytes
# Bytes of forms without files. Some versions of the parser take time quadratic in a field's length.
MAX_URLENCODED = 8 << 20


def check_same_origin(request: Request) -> None:
    """Reject a form that another site has sent. Raises `ApiError`.

    Browsers set both headers themselves; scripts cannot change them.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    same = site == "same-origin" if site is not None else None
    if same is None and origin is not None:
        same = _netloc(origin) == request.headers.get("host")
    if not same:
        raise ApiError(
            "the request did not come from a page of this console",
            status=403,
            hint="open the console in a browser and repeat the action there",
        )


def is_over_https(request: Request) -> bool:
    """Return whether the browser uses https, also if a proxy terminates TLS."""
    origin = request.headers.get("origin", "")
    return request.url.scheme == "https" or origin.startswith("https://")


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


async def read_form(
    request: Request, *, max_bytes: int = MAX_UPLOAD, max_files: int = MAX_FILES
) -> FormData:
    """Read a form with at most `max_bytes`. Raises `ApiError`."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        max_bytes = min(max_bytes, MAX_URLENCODED)
    hint = "send fewer files at a time, or use bottega add"
    error = too_large("the upload", f"{max_bytes:,} bytes", hint)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise error
    receive = limited(request.receive, max_bytes, error)
    try:
        return await Request(request.scope, receive).form(
            max_files=max_files, max_fields=MAX_FILES, max_part_size=MAX_FIELD
        )
    except BottegaError:
        raise
    except Exception as error:  # its type depends on the version of the multipart parser
        reason = getattr(error, "detail", None) or error
        raise ApiError(
            f"the form cannot be read: {reason}",
            hint=f"send at most {max_files} files at a time" if max_files else "send it again",
        ) from error

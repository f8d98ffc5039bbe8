"""Requests and responses of the console: sessions, forms, templates, security headers, errors."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import urlencode, urlsplit

from jinja2 import ChoiceLoader, Environment, PackageLoader, PrefixLoader, StrictUndefined
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from bottega.errors import BottegaError
from bottega.evaluation.report.payload import thumbnail
from bottega.gateway.errors import status_of
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.pixels import media_type
from bottega.ui.sessions import COOKIE, ConsoleUser, Sessions

log = logging.getLogger(__name__)

ROOT = "/ui"
HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:;"
        " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
}
# Stored bytes may be HTML or SVG: browsers must not execute them.
IMAGE_HEADERS = {
    "cache-control": "private, max-age=3600",
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
}
# Self-contained pages, such as reports: they have their styles inside and no scripts.
REPORT_HEADERS = {
    **HEADERS,
    "content-security-policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'",
}
MAX_FILES = 1000  # per form
MAX_UPLOAD = 512 << 20  # bytes per form
DAY = 86_400


@dataclass(frozen=True)
class Visit:
    """Request of a logged-in user. `form` has the fields and files of a POST, `loop` is the
    server's event loop."""

    request: Request
    user: ConsoleUser
    loop: asyncio.AbstractEventLoop
    form: FormData = field(default_factory=FormData)

    @property
    def namespace(self) -> str:
        """Return the requested namespace, or the user's own. Raises `ApiError`."""
        return self.user.namespace(self.value("namespace") or None)

    def value(self, name: str, default: str = "") -> str:
        """Return a field of the form, else a parameter of the query string, else `default`."""
        found = self.form.get(name)
        if isinstance(found, str):
            return found
        return self.request.query_params.get(name, default)

    def number(self, name: str, default: int, *, least: int = 0, most: int = 1_000_000) -> int:
        """Return a whole number, clipped to the bounds; `default` if it is absent. Raises
        `ApiError`."""
        text = self.value(name)
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ApiError(
                f"{name} must be a whole number, got {text[:40]!r}",
                hint="enter digits only, e.g. 10",
            )
        return min(max(int(text), least), most)

    def files(self, name: str) -> list[UploadFile]:
        """Return the uploaded files of a field; an empty field sends a file without a name."""
        found = [one for one in self.form.getlist(name) if isinstance(one, UploadFile)]
        return [one for one in found if one.filename]

    def require(self, allowed: bool, action: str) -> None:
        """Raise `ApiError` unless `allowed`; `action` completes "this session may not"."""
        if not allowed:
            raise ApiError(
                f"this session may not {action}",
                status=403,
                hint="log in with an admin key, without the read-only option",
            )


@dataclass(frozen=True)
class Page:
    """Template with its values, and the status of the response. The browser reloads the page after
    `reload_seconds`, unless 0."""

    template: str
    values: Mapping[str, object] = field(default_factory=dict)
    status: int = 200
    reload_seconds: int = 0


@dataclass(frozen=True)
class Redirect:
    """Redirection to a page of the console after a change. That page shows `message`."""

    path: str
    message: str = ""
    params: Mapping[str, str] = field(default_factory=dict)


Result = Page | Redirect | Response
# A handler runs in a thread.
Handler = Callable[[Visit], Result]


@dataclass(frozen=True)
class Link:
    """Link of the navigation. With `for_admins`, only users who see all namespaces have it."""

    path: str
    title: str
    for_admins: bool = False


class Renderer:
    """Renderer of pages, with a navigation of the given links; the first one is the start page."""

    def __init__(self, links: Sequence[Link], sessions: Sessions) -> None:
        self.sessions = sessions
        self._links = links
        self._environment = Environment(
            loader=ChoiceLoader(
                [
                    PackageLoader("bottega.ui", "templates"),
                    PrefixLoader({"evaluation": PackageLoader("bottega.evaluation", ".")}),
                ]
            ),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "usd": format_usd,
            "count": format_count,
            "ago": format_ago,
            "moment": format_moment,
            "seconds": format_seconds,
            "fixed": format_fixed,
        }
        self._environment.globals |= {"root": ROOT, "query": query_string}

    @property
    def home(self) -> str:
        """Return the path of the start page."""
        return f"{ROOT}{self._links[0].path}"

    def render(self, request: Request, user: ConsoleUser | None, page: Page) -> Response:
        """Return the response of a page. Without a `user` it has no navigation."""
        links = [
            one for one in self._links if user is not None and (user.sees_all or not one.for_admins)
        ]
        text = self._environment.get_template(page.template).render(
            user=user,
            links=links,
            path=request.url.path,
            home=self.home,
            param=lambda name: request.query_params.get(name, ""),
            message=request.query_params.get("message", ""),
            **page.values,
        )
        headers = {"refresh": str(page.reload_seconds)} if page.reload_seconds else {}
        return Response(text, page.status, HEADERS | headers, "text/html; charset=utf-8")

    def route(self, path: str, handler: Handler, *, method: str = "GET") -> Route:
        """Return the route of a page that needs a session."""

        async def handle(request: Request) -> Response:
            user = self.sessions.user(request.cookies.get(COOKIE))
            if user is None:
                return self._login_needed(request)
            try:
                form = FormData()
                if request.method == "POST":
                    check_same_origin(request)
                    form = await read_form(request)
                visit = Visit(request, user, asyncio.get_running_loop(), form)
                try:
                    response = await asyncio.to_thread(self._respond, visit, handler)
                finally:
                    await form.close()
            except BottegaError as error:
                return self.render(request, user, error_page(error))
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path)
                return self.render(request, user, UNEXPECTED)
            if request.method == "POST":
                log.info("console %s: POST %s", user.account.id or user.name, path)
            return response

        return Route(f"{ROOT}{path}", handle, methods=[method])

    def _respond(self, visit: Visit, handler: Handler) -> Response:
        result = handler(visit)
        if isinstance(result, Redirect):
            params = query_string({**result.params, "message": result.message})
            return RedirectResponse(f"{ROOT}{result.path}{params}", 303, HEADERS)
        if isinstance(result, Response):
            return result
        return self.render(visit.request, visit.user, result)

    def _login_needed(self, request: Request) -> Response:
        # A script that refreshes a page must not show the login form inside it.
        if request.headers.get("x-requested-with") == "console" or request.method != "GET":
            text = "the session has expired: log in again"
            return Response(text, 401, HEADERS, "text/plain; charset=utf-8")
        wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"{ROOT}/login{query_string({'next': wanted})}", 303, HEADERS)


def check_same_origin(request: Request) -> None:
    """Reject a form that another site has sent. Raises `ApiError`.

    Browsers set both headers themselves; scripts cannot change them.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    same = site == "same-origin" if site is not None else None
    if same is None and origin is not None:
        same = urlsplit(origin).netloc == request.headers.get("host")
    if not same:
        raise ApiError(
            "the request did not come from a page of this console",
            status=403,
            hint="open the console in a browser and repeat the action there",
        )


async def read_form(request: Request) -> FormData:
    """Return the form of at most `MAX_UPLOAD` bytes and `MAX_FILES` files. Raises `ApiError`."""
    too_large = ApiError(
        f"the upload is larger than {MAX_UPLOAD >> 20} MiB",
        status=413,
        hint="send fewer files at a time, or use bottega add",
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_UPLOAD:
        raise too_large
    received = 0
    receive = request.receive

    async def limited() -> Any:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_UPLOAD:
            raise too_large
        return message

    request._receive = limited
    try:
        return await request.form(max_files=MAX_FILES, max_fields=MAX_FILES, max_part_size=4 << 20)
    except BottegaError:
        raise
    except Exception as error:  # its type depends on the version of the multipart parser
        raise ApiError(
            f"the form cannot be read: {error}",
            hint=f"send at most {MAX_FILES} files at a time",
        ) from error


def error_page(error: BottegaError) -> Page:
    values = {"title": "Error", "problem": str(error), "hint": error.hint or ""}
    return Page("error.html", values, status_of(error))


UNEXPECTED = Page(
    "error.html",
    {
        "title": "Internal error",
        "problem": "an unexpected error occurred",
        "hint": "see the server's log for the details",
    },
    500,
)


def query_string(params: Mapping[str, object]) -> str:
    """Return the query string with its question mark, without empty parameters."""
    given = {name: value for name, value in params.items() if value not in (None, "")}
    return f"?{urlencode(given)}" if given else ""


def format_usd(value: float | None) -> str:
    if value is None:
        return "unknown"
    digits = 2 if abs(value) >= 100 else 4 if abs(value) >= 0.01 or not value else 6
    return f"${value:,.{digits}f}"


def format_count(value: float) -> str:
    return f"{value:,.0f}"


def format_fixed(value: float | None, digits: int = 3) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def format_seconds(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def format_moment(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"


def format_ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", DAY), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


_THUMBNAILS = BoundedSemaphore(2)  # decoded images are large


def image_response(image: Image, side: int | None) -> Response:
    """Return the stored bytes, or a thumbnail of at most `side` pixels. Raises `ImageError`."""
    if side is None:
        return Response(image.data, 200, IMAGE_HEADERS, image.media_type)
    with _THUMBNAILS:
        data = thumbnail(image, side)
    return Response(data, 200, IMAGE_HEADERS, media_type(data))

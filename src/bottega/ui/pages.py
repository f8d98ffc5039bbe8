"""Requests and responses of the console: sessions, forms, templates, security headers, errors."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from threading import BoundedSemaphore
from typing import Literal
from urllib.parse import urlencode

from jinja2 import ChoiceLoader, Environment, PackageLoader, PrefixLoader, StrictUndefined
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from bottega._util.caching import CLIENT
from bottega._util.progress import plural
from bottega._util.sql_tables import storable_text
from bottega.errors import BottegaError
from bottega.evaluation.report.payload import thumbnail
from bottega.gateway.asgi import CONSOLE
from bottega.gateway.errors import status_of, to_api_error
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.pixels import media_type
from bottega.ui.forms import MAX_UPLOAD, check_same_origin, read_form
from bottega.ui.sessions import ConsoleUser, Sessions, cookie_name

log = logging.getLogger(__name__)

ROOT = CONSOLE
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
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
}
# Self-contained pages, such as reports: they have their styles inside and no scripts.
REPORT_HEADERS = {
    **HEADERS,
    "content-security-policy": (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; frame-ancestors 'none'"
    ),
}
THREADS = 32
DAY = 86_400
# Attribute of `ConsoleUser` that a change needs, with its description for errors.
Right = Literal["can_edit", "can_store", "can_administer"]
_THUMBNAILS = BoundedSemaphore(2)  # decoded images are large
ACTIONS: Mapping[Right, str] = {
    "can_edit": "send requests or change anything",
    "can_store": "change the examples of a namespace",
    "can_administer": "manage keys",
}


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
        """Return a field of the form, else a parameter of the query string, else `default`. It has
        no NUL and no lone surrogates, which databases do not store."""
        found = self.form.get(name)
        if not isinstance(found, str):
            found = self.request.query_params.get(name, default)
        return storable_text(found)

    def values(self, name: str) -> list[str]:
        """Return all values of a field of the form, such as those of checked boxes."""
        return [storable_text(one) for one in self.form.getlist(name) if isinstance(one, str)]

    def part(self, name: str) -> str:
        """Return a part of the path, such as an id."""
        return storable_text(str(self.request.path_params[name]))

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


def require(allowed: bool, action: str) -> None:
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


PageResult = Page | Redirect | Response
# A handler runs in a thread.
Handler = Callable[[Visit], PageResult]


@dataclass(frozen=True)
class Link:
    """Link of the navigation. With `for_admins`, only users who see all namespaces have it."""

    path: str
    title: str
    for_admins: bool = False


@cache
def _environment() -> Environment:
    environment = Environment(
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
    environment.filters |= {
        "usd": format_usd,
        "count": format_count,
        "plural": partial(plural, spec=","),
        "ago": format_ago,
        "moment": format_moment,
        "seconds": format_seconds,
        "fixed": format_fixed,
        "percent": format_percent,
    }
    environment.globals |= {"root": ROOT, "query": query_string}
    return environment


class Renderer:
    """Renderer of pages, with a navigation of the given links; the first one is the start page."""

    def __init__(self, links: Sequence[Link], sessions: Sessions) -> None:
        self.sessions = sessions
        self._links = links
        # Handlers wait for answers of the gateway, which needs the threads of `asyncio.to_thread`.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bottega-console")

    @property
    def home(self) -> str:
        """Return the path of the start page."""
        return f"{ROOT}{self._links[0].path}"

    def render(self, request: Request, user: ConsoleUser | None, page: Page) -> Response:
        """Return the response of a page. Without a `user` it has no navigation."""
        links = [
            one for one in self._links if user is not None and (user.sees_all or not one.for_admins)
        ]
        template = _environment().get_template(page.template)
        text = template.render(
            user=user,
            links=links,
            path=request.url.path,
            home=self.home,
            param=lambda name: request.query_params.get(name, ""),
            # A link from elsewhere leads to the login page: it must not choose the text there.
            message="" if user is None else request.query_params.get("message", ""),
            **page.values,
        )
        body = text.encode(errors="replace")  # names of files may have lone surrogates
        headers = {"refresh": str(page.reload_seconds)} if page.reload_seconds else {}
        return Response(body, page.status, HEADERS | headers, "text/html; charset=utf-8")

    def route(
        self,
        path: str,
        handler: Handler,
        *,
        method: str = "GET",
        right: Right | None = "can_edit",
        max_bytes: int = MAX_UPLOAD,
    ) -> Route:
        """Return the route of a page that needs a session. A POST needs the right, which is checked
        before its form of at most `max_bytes` is read."""

        async def handle(request: Request) -> Response:
            user = self.sessions.user(request.cookies.get(cookie_name(request)))
            if user is None:
                return self._login_needed(request)
            CLIENT.set(user.account.id)  # of this task only: fair turns
            loop = asyncio.get_running_loop()
            try:
                form = FormData()
                if request.method == "POST":
                    check_same_origin(request)
                    if right is not None:
                        require(getattr(user, right), ACTIONS[right])
                    form = await read_form(request, max_bytes=max_bytes)
                visit = Visit(request, user, loop, form)
                try:
                    response = await loop.run_in_executor(
                        self._threads, self._respond, visit, handler
                    )
                finally:
                    await form.close()
            except BottegaError as error:
                return self.render(request, user, self._error_page(request, user, error))
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

    def _error_page(self, request: Request, user: ConsoleUser, error: BottegaError) -> Page:
        if status_of(error) >= 500 and not isinstance(error, ApiError):
            log.warning("%s %s failed: %s", request.method, request.url.path, error)
            if not user.sees_all:  # paths and addresses of the server are for the log
                error = to_api_error(error)
        return error_page(error)

    def _login_needed(self, request: Request) -> Response:
        # A script that refreshes a page must not show the login form inside it.
        if request.headers.get("x-requested-with") == "console" or request.method != "GET":
            return self.render(request, None, SESSION_ENDED)
        wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"{ROOT}/login{query_string({'next': wanted})}", 303, HEADERS)


def error_page(error: BottegaError) -> Page:
    values = {"title": "Error", "problem": str(error), "hint": error.hint or ""}
    return Page("error.html", values, status_of(error))


SESSION_ENDED = Page(
    "error.html",
    {
        "title": "Log in again",
        "problem": "the session has ended, and nothing was changed",
        "hint": "log in on another page, then return to this form and submit it again",
    },
    401,
)
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
    return f"?{urlencode(given, errors='replace')}" if given else ""


def format_usd(value: float | None) -> str:
    if value is None:
        return "unknown"
    digits = 2 if abs(value) >= 100 else 4 if abs(value) >= 0.01 or not value else 6
    return f"{'-' if value < 0 else ''}${abs(value):,.{digits}f}"


def format_count(value: float) -> str:
    return f"{value:,.0f}"


def format_fixed(value: float | None, digits: int = 3) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def format_percent(share: float) -> str:
    """Return a share from 0 to 1 as a percentage; small ones have a decimal, and none is 0 unless
    the share is."""
    percent = 100 * share
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.0f} %" if percent >= 10 or not percent else f"{percent:.1f} %"


def format_seconds(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def format_moment(moment: float) -> str:
    try:
        return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # after the year 9999, or damaged
        return f"{moment:g} s"


def format_ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", DAY), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def image_response(image: Image, side: int | None) -> Response:
    """Return the stored bytes, or a thumbnail of at most `side` pixels. Raises `ImageError`."""
    if side is None:
        return Response(image.data, 200, IMAGE_HEADERS, image.media_type)
    with _THUMBNAILS:
        data = thumbnail(image, side)
    return Response(data, 200, IMAGE_HEADERS, media_type(data))

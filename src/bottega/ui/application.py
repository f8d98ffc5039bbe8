"""Routes of a gateway's console, and the login pages of every console."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from bottega.errors import BottegaError, NotFoundError
from bottega.gateway.request.cached_examples import Forget
from bottega.gateway.running.server import GatewayServer
from bottega.image import Image
from bottega.ui.bases import BaseOpener
from bottega.ui.cache import CachePages, cache_routes
from bottega.ui.evaluation_runs import RunLibrary
from bottega.ui.evaluations import EVALUATIONS, evaluation_routes
from bottega.ui.forms import check_same_origin, is_over_https, read_form
from bottega.ui.gateway_client import GatewayClient
from bottega.ui.key_pages import KeyPages
from bottega.ui.knowledge_pages import KnowledgePages, knowledge_routes
from bottega.ui.overview import OverviewPage
from bottega.ui.pages import HEADERS, ROOT, Link, Page, Renderer, Visit, error_page
from bottega.ui.playground import PlaygroundPage
from bottega.ui.request_pages import RequestPages
from bottega.ui.sessions import SESSION_SECONDS, Sessions, cookie_name

# Package, path and media type of the static files by name.
STATIC = {
    "console.css": ("bottega.ui", "static/console.css", "text/css"),
    "console.js": ("bottega.ui", "static/console.js", "text/javascript"),
    "chart.css": ("bottega.evaluation", "chart.css", "text/css"),
}
MAX_LOGIN_BYTES = 64 << 10
INVALID_KEY = "This key is not valid. It may be incomplete, revoked or expired."

LINKS = (
    Link("/overview", "Overview"),
    Link("/requests", "Requests"),
    Link("/playground", "Playground"),
    Link("/cache", "Cache"),
    Link("/knowledge", "Knowledge base"),
    EVALUATIONS,
    Link("/keys", "Keys", for_admins=True),
)


def gateway_routes(
    server: GatewayServer, open_base: BaseOpener | None, forget: Forget, *, token: str | None = None
) -> list[BaseRoute]:
    """Return the routes of a gateway's console. `open_base` returns the knowledge base of a
    namespace and blocks; None for a pipeline of Python code. `forget` removes the replies of a
    namespace from the response cache after a change. Users log in with their keys, or with `token`
    if the gateway has no keys."""
    sessions = Sessions(server.accounts, token=token)
    renderer = Renderer(LINKS, sessions)
    client = GatewayClient(server)
    store = None if server.traces is None else server.traces.store
    requests = RequestPages(
        server.ledger,
        store,
        account_names=lambda: {one.id: one.name for one in server.accounts.list()},
        base_image=partial(_base_image, open_base),
        client=client,
        feedback=server.feedback,
    )
    playground = PlaygroundPage(client, open_base)
    keys = KeyPages(server.accounts, server.ledger)
    page, runs = renderer.route, server.config.console.runs
    admin_page = partial(page, method="POST", right="can_administer")
    check_namespace = server.gateway.access.check_namespace
    return [
        *common_routes(renderer),
        page("/overview", OverviewPage(server.ledger)),
        page("/requests", requests.browse),
        page("/requests/{id}", requests.show),
        page("/requests/{id}/replay", requests.replay, method="POST"),
        page("/requests/{id}/feedback", requests.rate, method="POST"),
        page("/requests/{id}/images/{sha256}", requests.image),
        page("/requests/{id}/explanation", requests.explanation),
        page("/playground", playground.show),
        page("/playground", playground.submit, method="POST"),
        *evaluation_routes(renderer, None if runs is None else RunLibrary([runs])),
        *cache_routes(
            renderer,
            CachePages(
                open_base,
                forget,
                server.config.feedback.max_corrections,
                check_namespace=check_namespace,
            ),
        ),
        *knowledge_routes(
            renderer, KnowledgePages(open_base, forget, check_namespace=check_namespace)
        ),
        page("/keys", keys.browse),
        admin_page("/keys", keys.add),
        admin_page("/keys/{id}/change", keys.change),
        admin_page("/keys/{id}/rotate", keys.rotate),
        admin_page("/keys/{id}/revoke", keys.revoke),
        page("/{path:path}", unknown_page),
    ]


def common_routes(renderer: Renderer) -> list[BaseRoute]:
    """Return the routes of the login and of static files."""
    login = LoginPages(renderer)
    return [
        Route(ROOT, login.home),
        Route(f"{ROOT}/", login.home),
        Route(f"{ROOT}/login", login.show, methods=["GET"]),
        Route(f"{ROOT}/login", login.submit, methods=["POST"]),
        Route(f"{ROOT}/logout", login.logout, methods=["POST"]),
        Route(f"{ROOT}/static/{{name}}", static),
    ]


def unknown_page(visit: Visit) -> Page:
    raise NotFoundError("the console has no such page", hint="choose one from the navigation")


class LoginPages:
    """Handlers of login and logout."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer, self._sessions = renderer, renderer.sessions

    async def home(self, request: Request) -> Response:
        return RedirectResponse(self._renderer.home, 303, HEADERS)

    async def show(self, request: Request) -> Response:
        # The link that the server printed. A key in a link would stand in logs and histories, and a
        # link from another site could log a visitor in as somebody else.
        if token := request.query_params.get("token"):
            is_token = self._sessions.is_token(token)
            return self._logged_in(request, token if is_token else "", False, self._renderer.home)
        return self._page(request)

    async def submit(self, request: Request) -> Response:
        try:
            check_same_origin(request)
            form = await read_form(request, max_bytes=MAX_LOGIN_BYTES, max_files=0)
        except BottegaError as error:
            return self._renderer.render(request, None, error_page(error))
        key, read_only = str(form.get("key", "")), bool(form.get("read_only"))
        return self._logged_in(request, key.strip(), read_only, str(form.get("next", "")))

    async def logout(self, request: Request) -> Response:
        try:
            check_same_origin(request)
            if (user := self._sessions.user(request.cookies.get(cookie_name(request)))) is not None:
                await asyncio.to_thread(self._sessions.logout, user)
        except BottegaError as error:  # the cookie remains, so the user can try again
            return self._renderer.render(request, None, error_page(error))
        response = RedirectResponse(f"{ROOT}/login", 303, HEADERS)
        response.delete_cookie(cookie_name(request), path=ROOT)
        return response

    def _logged_in(self, request: Request, key: str, read_only: bool, wanted: str) -> Response:
        cookie = self._sessions.login(key, read_only=read_only)
        if cookie is None:
            return self._page(request, problem=INVALID_KEY, status=401)
        response = RedirectResponse(_own_path(wanted, self._renderer.home), 303, HEADERS)
        response.set_cookie(
            cookie_name(request),
            cookie,
            max_age=SESSION_SECONDS,
            path=ROOT,
            secure=is_over_https(request),
            httponly=True,
            samesite="strict",
        )
        return response

    def _page(self, request: Request, problem: str = "", status: int = 200) -> Response:
        values: Mapping[str, object] = {
            "title": "Log in",
            "problem": problem,
            "wanted": request.query_params.get("next", ""),
            "by_link": self._sessions.token is not None,
        }
        return self._renderer.render(request, None, Page("login.html", values, status))


def _own_path(wanted: str, home: str) -> str:
    """Return `wanted` if it is a path of the console, else `home`."""
    try:
        parts = urlsplit(wanted)
    except ValueError:
        return home
    own = not parts.scheme and not parts.netloc and parts.path.startswith(f"{ROOT}/")
    return wanted if own and "\\" not in wanted else home


async def static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        return Response("not found", 404, HEADERS)
    package, path, type = STATIC[name]
    data = await asyncio.to_thread(files(package).joinpath(path).read_bytes)
    headers = {**HEADERS, "cache-control": "no-cache"}
    return Response(data, 200, headers, type)


def _base_image(open_base: BaseOpener | None, namespace: str, sha256: str) -> Image | None:
    if open_base is None:
        return None
    return open_base(namespace).images([sha256]).get(sha256)

"""Console of a gateway, if its extra is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from bottega.errors import MissingDependencyError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from bottega.gateway.cached_examples import Forget
    from bottega.gateway.config.settings import Config
    from bottega.gateway.running.build import OpenBase
    from bottega.gateway.running.server import GatewayServer


@dataclass(frozen=True)
class Console:
    """Console of a gateway. Where it is enabled and its extra is missing, its pages say how to
    install it. `token` opens it on a gateway without keys."""

    enabled: bool
    missing: str | None
    token: str | None

    @classmethod
    def of(cls, config: Config, *, has_token: bool = True) -> Console:
        missing = None if find_spec("itsdangerous") is not None else "itsdangerous"
        token = None
        if has_token and config.console.enabled and missing is None:
            from bottega.ui.sessions import new_token

            token = new_token()
        return cls(config.console.enabled, missing, token)

    def routes(
        self, server: GatewayServer, open_base: OpenBase | None, forget: Forget
    ) -> Sequence[BaseRoute]:
        if not self.enabled:
            return []
        if self.missing is not None:
            return _missing_routes(MissingDependencyError(self.missing, "ui"))
        from bottega.ui.app import gateway_routes

        # With keys, a key is the only way in.
        token = None if server.gateway.authenticate is not None else self.token
        return gateway_routes(server, open_base, forget, token=token)

    def link(self, url: str, protected: bool) -> str | None:
        """Return the address to print, None if there is no console or no way in."""
        page = url.removesuffix("/v1") + "/ui/login"
        if not self.enabled or self.missing is not None:
            return None
        if protected:
            return page
        return None if self.token is None else f"{page}?token={self.token}"


def _missing_routes(error: MissingDependencyError) -> list[BaseRoute]:
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def explain(request: Request) -> Response:
        return PlainTextResponse(f"the console is not installed: {error}\n{error.hint}\n", 501)

    return [Route("/ui", explain), Route("/ui/{page:path}", explain)]

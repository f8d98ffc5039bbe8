"""Console of a gateway, if the extra `ui` is installed."""

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

    from bottega.gateway.config.gateway_settings import Config
    from bottega.gateway.request.cached_examples import Forget
    from bottega.gateway.running.build import OpenBase
    from bottega.gateway.running.server import GatewayServer


@dataclass(frozen=True)
class Console:
    """Console of a gateway. `missing` is the package that is not installed: then its pages explain
    how to install it. With `token`, users of a gateway without keys log in."""

    enabled: bool
    missing: str | None
    token: str | None

    @classmethod
    def of(cls, config: Config, *, has_token: bool = True) -> Console:
        """Return the console of a configuration, with a new token if `has_token`."""
        missing = None if find_spec("itsdangerous") is not None else "itsdangerous"
        token = None
        if has_token and config.console.enabled and missing is None:
            from bottega.ui.sessions import new_token

            token = new_token()
        return cls(config.console.enabled, missing, token)

    def routes(
        self, server: GatewayServer, open_base: OpenBase | None, forget: Forget
    ) -> Sequence[BaseRoute]:
        """Return the routes at /ui; none if the console is disabled."""
        if not self.enabled:
            return []
        if self.missing is not None:
            return _missing_routes(MissingDependencyError(self.missing, "ui"))
        from bottega.ui.application import gateway_routes

        # If the gateway requires keys, the token must not replace one.
        token = None if server.gateway.authenticate is not None else self.token
        return gateway_routes(server, open_base, forget, token=token)

    def link(self, url: str, protected: bool) -> str | None:
        """Return the address to print, None if there is no console or no login."""
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
        return PlainTextResponse(
            f"the console is not installed: {error}\nhint: {error.hint}\n", 501
        )

    return [Route("/ui", explain), Route("/ui/{page:path}", explain)]

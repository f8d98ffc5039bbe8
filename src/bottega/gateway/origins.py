"""Which web pages may ask a gateway that asks for no key."""

from __future__ import annotations

import re

from bottega.gateway.refusals import Refusal

HERE = re.compile(r"https?://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")


def check_origin(origin: str | None) -> None:
    """Browsers send what a page asks of loopback, only the answer they withhold: it would cost
    money, and teach the cache. What is no web page (an app, an extension) has other schemes.
    Raises `Refusal`."""
    if origin is None or HERE.fullmatch(origin):
        return
    if origin == "null" or origin.lower().startswith(("http://", "https://")):
        raise Refusal(
            "web pages of other hosts may not ask here without a key",
            status=403,
            type="permission_error",
            code="origin_forbidden",
            hint="bottega keys add NAME, and send the key",
        )

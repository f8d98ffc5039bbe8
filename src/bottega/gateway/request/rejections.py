"""Requests that tiers rejected recently, such as one with a field that a model does not support."""

from __future__ import annotations

import re

from bottega._util.caching import LRUCache
from bottega._util.identity import json_digest
from bottega.errors import BottegaError, PromptTooLongError
from bottega.openai_api.request import ChatRequest

REMEMBER_SECONDS = 600.0
MAX_REMEMBERED = 10_000
TOO_LONG_CODES = ("context_length_exceeded", "request_too_large")
TOO_LONG = re.compile(
    r"(?i)context[ _](length|window|size)|too (long|large|many (input |prompt )?tokens)"
    r"|max(imum)?[ _]\w*[ _]?(tokens|length)|exceeds? .*(tokens|length|context)"
)
# Names of fields in an error: quoted, or with an underscore.
FIELD_NAME = re.compile(r"(?<=[\"'`])\w+(?=[\"'`])|\b[a-z]+_\w+")
MANY_IMAGES = re.compile(
    r"(?i)too many|number of|(at most|up to|only|maximum of|limit of) (one|\d+) (image|photo)"
)
NESTED = re.compile(r"[.\[]")
USUAL_ROLES, USUAL_FIELDS = {"system", "user", "assistant"}, {"messages", "model", "stream"}
LENGTH, IMAGES = "length", "images"  # keys that are not field names
# Codes of a content policy, which is no limit of a model.
POLICY_CODES = {"content_filter", "content_policy_violation", "moderation_blocked"}


def is_too_long(error: BottegaError) -> bool:
    """Return whether the request has too many tokens or bytes for the tier, by the error's code,
    its status or, without them, its text."""
    code = getattr(error, "code", None)
    by_status = getattr(error, "status", None) == 413
    is_named = code in TOO_LONG_CODES or isinstance(error, PromptTooLongError)
    return is_named or by_status or bool(TOO_LONG.search(str(error)))


def is_content_policy(error: BottegaError) -> bool:
    """Return whether the provider refused the content, not the form of the request."""
    return getattr(error, "code", None) in POLICY_CODES


class Rejections(LRUCache[tuple[str, str, str], int]):
    """Rejections of the last ten minutes, by account, so that an invalid request of one client does
    not change the tier of others."""

    def __init__(self) -> None:
        super().__init__(MAX_REMEMBERED, seconds=REMEMBER_SECONDS)

    def learn(self, account: str, tier: str, request: ChatRequest, error: BottegaError) -> None:
        """Remember what the tier rejected, if the error shows it: a field with its value, the
        length, or the number of images."""
        for name, size in _rejected(request, error).items():
            self.put((account, tier, name), size)

    def knows(self, account: str, tier: str, request: ChatRequest) -> bool:
        """Return whether the tier rejected such a request recently."""
        sizes = _sizes(request)
        for name in (*sizes, *_features(request).values()):
            least = self.get((account, tier, name))
            if least is not None and sizes.get(name, least) >= least:
                return True
        return False


def _rejected(request: ChatRequest, error: BottegaError) -> dict[str, int]:
    """Return the rejected features of the request, with their sizes."""
    features, sizes = _features(request), _sizes(request)
    if found := named_features(request, error):
        return dict.fromkeys((features[name] for name in found), 0)
    # An image that is too large or damaged says nothing about other requests.
    if request.images and "image" in str(error).lower():
        return {IMAGES: sizes[IMAGES]} if MANY_IMAGES.search(str(error)) else {}
    return {LENGTH: sizes[LENGTH]} if is_too_long(error) else {}


def named_features(request: ChatRequest, error: BottegaError) -> set[str]:
    """Return the client's optional fields and roles that the error names."""
    if getattr(error, "code", None) in TOO_LONG_CODES:
        return set()
    param = getattr(error, "param", None) or ""
    named = {NESTED.split(param)[0], *FIELD_NAME.findall(str(error))}
    return named & _features(request).keys()


def _sizes(request: ChatRequest) -> dict[str, int]:
    return {LENGTH: request.total_tokens, IMAGES: len(request.images)}


def _features(request: ChatRequest) -> dict[str, str]:
    """Return the optional fields and roles by their names in errors, with the fields' values: a
    model that rejects one temperature may accept another."""
    roles = {message.role for message in request.messages} - USUAL_ROLES
    fields = request.body.keys() - USUAL_FIELDS
    return {
        **{name: f"{name} {json_digest(request.body[name])}" for name in fields},
        **{role: f"role {role}" for role in roles},
    }

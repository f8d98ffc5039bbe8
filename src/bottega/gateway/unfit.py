"""Why no tier takes a request, and what a client can do about it."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.gateway.ports import Takes
from bottega.gateway.refusals import Refusal
from bottega.gateway.requests import Needs


def unfit(needs: Needs, takes: Sequence[Takes], named: str = "") -> Refusal:
    """`named` is the tier that the client asked for: the only one that could have answered."""
    it = "it takes" if named else "they take"
    found = list(_reasons(needs, takes))
    if not found:  # each of the needs is met by some tier
        found = [("all of this only apart", "send less at once")]
    said = ", ".join(reason for reason, _ in found)
    instead = " and ".join(dict.fromkeys(hint for _, hint in found))
    who = f"the tier {named!r} cannot" if named else "no tier can"
    return Refusal(
        f"{who} take this request: {it} {said}",
        code="unsupported_by_tier",
        hint=f"ask for the model 'bottega', or {instead}" if named else instead,
    )


def _reasons(needs: Needs, takes: Sequence[Takes]) -> list[tuple[str, str]]:
    images, context = _most([one.images for one in takes]), _most([one.context for one in takes])
    found = []
    if needs.tools and not any(one.tools for one in takes):
        found.append(("no tools", "leave the tools out"))
    if needs.audio and not any(one.audio for one in takes):
        found.append(("no audio", "leave the audio out"))
    if images == 0 and needs.images:
        found.append(("no images", "leave the images out"))
    elif images is not None and needs.images > images:
        said = f"at most {images} images, and these are {needs.images}"
        found.append((said, "send fewer images"))
    if context is not None and needs.tokens > context:
        said = f"at most {context:,} tokens, and these are about {needs.tokens:,}"
        found.append((said, "send a shorter text"))
    return found


def _most(limits: Sequence[int | None]) -> int | None:
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None

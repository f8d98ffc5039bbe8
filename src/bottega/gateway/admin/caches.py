"""Administration of a namespace's cache: statistics, browsing, deletion, import and export."""

from __future__ import annotations

import asyncio
import base64
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from bottega.errors import (
    BottegaError,
    EmbeddingError,
    ImageError,
    LoadError,
    NotFoundError,
    SettingError,
    StoreBusyError,
    StoreFullError,
)
from bottega.gateway.accounting.accounts import Account
from bottega.knowledge import And, Contains, Eq, Filter, KnowledgeBase, read_jsonl
from bottega.openai_api.errors import ApiError
from bottega.types import Example

HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
# HTTP status by the first matching class; other errors are status 500.
STATUS: tuple[tuple[type[BottegaError], int], ...] = (
    (NotFoundError, 404),
    (StoreBusyError, 503),
    (StoreFullError, 507),
    (SettingError, 400),
    (LoadError, 400),
    (ImageError, 400),
    (EmbeddingError, 400),
)


def json_response(document: object, status: int = 200) -> Response:
    body = orjson.dumps(document)
    return Response(body, status, {**HEADERS, "content-type": "application/json"})


def api_error(error: BottegaError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    headers = {"retry-after": "1"} if error.retryable else {}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ApiError(str(error), status=status, type=kind, headers=headers, hint=error.hint)


def query_number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise ApiError(
            f"{name} must be a whole number from 0 to {most}, got {text[:40]!a}",
            param=name,
            hint="use a number in this range, or leave it out",
        )
    return int(text)


async def read_body(request: Request, most: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        check_length(len(body), most)
    return bytes(body)


def check_length(length: int, most: int) -> None:
    if length > most:
        raise ApiError(
            f"the body is longer than {most:,} bytes", status=413, hint="send it in several parts"
        )


async def read_object(
    request: Request, fields: Mapping[str, tuple[type, ...]], most: int
) -> dict[str, object]:
    """Read a JSON object with no other fields than these. A field with null counts as absent.
    Raises `ApiError`."""
    try:
        row = orjson.loads(await read_body(request, most))
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error.msg}", hint="send an object") from error
    if not isinstance(row, dict):
        raise ApiError("the body is not an object", hint=f"send an object with {', '.join(fields)}")
    for name, value in row.items():
        if name not in fields:
            raise ApiError(f"{name[:40]!a} is not a field", hint=f"use {', '.join(fields)}")
        # An exact comparison, since isinstance(True, int).
        if value is not None and type(value) not in fields[name]:
            raise ApiError(
                f"{name} has the wrong type, got {type(value).__name__}",
                param=name,
                hint="see docs/gateway.md",
            )
    return {name: value for name, value in row.items() if value is not None}


OpenCache = Callable[[str], KnowledgeBase]

PAGE, MAX_PAGE = 20, 200
MAX_OFFSET = 2**53
MAX_REPORTED = 100
IN_MEMORY = 1024 * 1024
# Stored bytes may be HTML or SVG: browsers must not execute them.
IMAGE_HEADERS = {**HEADERS, "content-security-policy": "default-src 'none'; sandbox"}
PROVENANCE, IMPORTED = "provenance", "imported"


class CacheAdmin:
    """Handlers of the routes below /admin that read or change a namespace's cache."""

    def __init__(
        self, open_cache: OpenCache, forget: Callable[[str], None], max_import: int
    ) -> None:
        self._open = open_cache
        self._forget = forget
        self._longest_import = max_import

    async def stats(self, request: Request, _: Account) -> Response:
        def work() -> dict[str, object]:
            cache = self._open(_namespace(request))
            counted = asdict(cache.stats())
            del counted["path"]
            return {**counted, "namespaces": cache.namespaces()}

        return json_response(await asyncio.to_thread(work))

    async def browse(self, request: Request, _: Account) -> Response:
        """List examples, newest first."""
        limit = query_number(request, "limit", PAGE, MAX_PAGE)
        offset = query_number(request, "offset", 0, MAX_OFFSET)

        def work() -> dict[str, object]:
            cache = self._open(_namespace(request))
            found = cache.ids(where=_filter(request))[::-1]
            page = found[offset : offset + limit]
            return {
                "total": len(found),
                "offset": offset,
                "examples": _describe_existing(cache, page),
            }

        return json_response(await asyncio.to_thread(work))

    async def show(self, request: Request, _: Account) -> Response:
        def work() -> dict[str, object]:
            return _describe(self._open(_namespace(request)), _id(request))

        return json_response(await asyncio.to_thread(work))

    async def image(self, request: Request, _: Account) -> Response:
        """Return the stored bytes of an image."""
        example = await asyncio.to_thread(lambda: self._open(_namespace(request)).get(_id(request)))
        images, which = example.query.images, int(request.path_params["number"])
        if which >= len(images):
            raise NotFoundError(
                f"image {which} does not exist, the example has {len(images)}",
                hint="use a number from 0",
            )
        return Response(images[which].data, 200, IMAGE_HEADERS, images[which].media_type)

    async def delete(self, request: Request, _: Account) -> Response:
        def work() -> dict[str, object]:
            namespace = _namespace(request)
            cache = self._open(namespace)
            removed = cache.delete([_id(request)])
            self._forget(namespace)
            return {"removed": removed, "examples": len(cache)}

        return json_response(await asyncio.to_thread(work))

    async def pin(self, request: Request, _: Account) -> Response:
        return await self._set_pinned(request, KnowledgeBase.pin)

    async def unpin(self, request: Request, _: Account) -> Response:
        return await self._set_pinned(request, KnowledgeBase.unpin)

    async def _set_pinned(
        self, request: Request, change: Callable[[KnowledgeBase, list[str]], int]
    ) -> Response:
        def work() -> dict[str, object]:
            cache = self._open(_namespace(request))
            return {"changed": change(cache, [_id(request)]), "pinned": cache.stats().pinned}

        return json_response(await asyncio.to_thread(work))

    async def import_(self, request: Request, account: Account) -> Response:
        """Import JSON lines with images as data URLs, in the format of `export` or `load_jsonl`.
        Invalid lines are skipped and reported. The examples are marked as imported, with the
        account's name."""
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as file:
            length = 0
            async for chunk in request.stream():
                length += len(chunk)
                check_length(length, self._longest_import)
                await asyncio.to_thread(file.write, chunk)
            file.seek(0)
            added = await asyncio.to_thread(self._import, file, _namespace(request), account)
        return json_response(added)

    def _import(
        self, lines: Iterable[bytes], namespace: str, account: Account
    ) -> dict[str, object]:
        bad: list[BottegaError] = []
        cache = self._open(namespace)
        examples = read_jsonl(lines, "the upload", whole_replies=True, on_error=bad.append)
        added = cache.add((_as_imported(one, account) for one in examples), on_error=bad.append)
        named = [{"reason": str(error), "hint": error.hint} for error in bad[:MAX_REPORTED]]
        return {
            "new": added.new,
            "duplicates": added.duplicates,
            "bad": len(bad),
            "skipped": named,
            "examples": len(cache),
        }

    async def export(self, request: Request, _: Account) -> Response:
        """Stream the examples as JSON lines. A damaged example ends the stream; `bottega export`
        reports it and writes the others."""
        namespace = _namespace(request)
        cache = await asyncio.to_thread(self._open, namespace)
        headers = {**HEADERS, "content-disposition": 'attachment; filename="cache.jsonl"'}
        return StreamingResponse(_lines(cache), 200, headers, "application/x-ndjson")


def _lines(cache: KnowledgeBase) -> Iterator[bytes]:
    for example in cache:
        query = example.query
        row = {
            "id": example.id,
            "question": query.text,
            "answer": example.answer,
            "images": [_data_url(image.media_type, image.data) for image in query.images],
            "labels": example.labels,
            "choices": query.choices,
            "rationale": example.rationale,
            "tags": dict(example.tags),
            "source": example.source,
        }
        yield orjson.dumps(row) + b"\n"


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _as_imported(example: Example, account: Account) -> Example:
    tags = {**example.tags, PROVENANCE: IMPORTED}
    return replace(example, tags=tags, source=f"imported by {account.name}")


def _describe_existing(cache: KnowledgeBase, ids: Sequence[str]) -> list[dict[str, object]]:
    found = []
    for id in ids:
        with suppress(NotFoundError):  # deleted or evicted meanwhile
            found.append(_describe(cache, id))
    return found


def _describe(cache: KnowledgeBase, id: str) -> dict[str, object]:
    example, metadata = cache.get(id), cache.metadata(id)
    query = example.query
    images = [
        {
            "sha256": image.sha256,
            "media_type": image.media_type,
            "bytes": len(image.data),
            "width": image.width,
            "height": image.height,
        }
        for image in query.images
    ]
    return {
        "id": example.id,
        "question": query.text,
        "answer": example.answer,
        "choices": query.choices,
        "labels": example.labels,
        "rationale": example.rationale,
        "tags": dict(example.tags),
        "source": example.source,
        "images": images,
        **asdict(metadata),
    }


def _filter(request: Request) -> Filter:
    params = request.query_params
    parts: list[Filter] = []
    if text := params.get("text"):
        parts.append(Contains(text))
    if source := params.get("source"):
        parts.append(Eq("source", source))
    return And(tuple(parts))


def _namespace(request: Request) -> str:
    return request.query_params.get("namespace", "")


def _id(request: Request) -> str:
    return str(request.path_params["id"])

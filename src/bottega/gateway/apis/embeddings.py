"""Embeddings API of OpenAI: vectors of texts and images by the embedder of the cache."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import orjson

from bottega._util.tracing import span
from bottega.errors import EmbeddingError
from bottega.gateway.apis.translation import FieldNames, encode_body, text_field, typed, unsupported
from bottega.gateway.errors import unknown_model
from bottega.gateway.ports import HttpReply, ReadBody, RequestRecord
from bottega.gateway.request.chat import Gateway
from bottega.gateway.request.reading import read_images
from bottega.image import Image
from bottega.openai_api.errors import ApiError, wrong_type
from bottega.openai_api.request import Body, ChatRequest, require
from bottega.protocols import Vectors
from bottega.types import Query

EMBEDDINGS = ("/v1/embeddings", "/embeddings")

EMBEDDER = "bottega/embedder"
FORMATS = ("float", "base64")
FIELDS = FieldNames({"messages": "input"}, "input", "embeddings reference")


@dataclass(frozen=True)
class EmbeddingsEndpoint:
    """Handler of embeddings. An input is a text, or an array of parts (texts and images) as in a
    chat message."""

    gateway: Gateway

    async def answer(
        self, record: RequestRecord, headers: Mapping[str, str], body: ReadBody
    ) -> HttpReply:
        gateway = self.gateway
        await gateway.admit(record, headers)
        given = typed(gateway.limits.parse(await body()), dict, "", "an object")
        try:
            inputs = _inputs(given)
        except ApiError as error:
            raise FIELDS.renamed(error, None) from error
        try:
            request = gateway.limits.read(encode_body(_chat_body(inputs)))
            images = await read_images(request.images, gateway.fetch, gateway.limits)
        except ApiError as error:
            raise FIELDS.renamed(error, [f"input[{n}]" for n in range(len(inputs))]) from error
        tenant = await gateway.tenants.open(record.namespace)
        if tenant.embed is None:
            raise unsupported(
                "this gateway has no embedder", "model", "ask the operator to set [cache] embed"
            )
        queries = [
            Query(message.text, tuple(images[part.url] for part in message.images))
            for message in request.messages
        ]
        record.state, record.reason, record.model = "passed_through", "embeddings", EMBEDDER
        embed = partial(asyncio.to_thread, tenant.embed, queries)
        try:
            with span("embed", {"gen_ai.operation.name": "embeddings"}):
                vectors = await gateway.decoding.run(images.values(), embed, Image.decode_cost)
        except EmbeddingError as error:
            raise ApiError(str(error), param="input", hint=error.hint) from error
        payload = _payload(vectors, request, given.get("encoding_format") == "base64")
        return HttpReply({}, payload)


def _inputs(given: Body) -> list[object]:
    model = text_field(given, "model")
    require(given, "input", "")
    if model != EMBEDDER:
        raise unknown_model(model, [EMBEDDER])
    if given.get("dimensions") is not None:
        raise unsupported("'dimensions' is not supported", "dimensions", "remove it")
    if given.get("encoding_format") not in (None, *FORMATS):
        wrong_type("encoding_format", " or ".join(FORMATS), given["encoding_format"])
    inputs = given["input"]
    if isinstance(inputs, str):
        return [inputs]
    if not isinstance(inputs, list) or not inputs:
        wrong_type("input", "a string or an array", inputs)
    for number, one in enumerate(inputs):
        if not isinstance(one, str | list):
            wrong_type(f"input[{number}]", "a string or an array of parts", one)
    return inputs


def _chat_body(inputs: Sequence[object]) -> Body:
    return {"model": EMBEDDER, "messages": [{"role": "user", "content": one} for one in inputs]}


def _payload(vectors: Vectors, request: ChatRequest, as_base64: bool) -> bytes:
    rows = vectors.astype("<f4", copy=False)
    data = [
        {
            "object": "embedding",
            "index": number,
            "embedding": base64.b64encode(row.tobytes()).decode() if as_base64 else row,
        }
        for number, row in enumerate(np.ascontiguousarray(rows))
    ]
    tokens = request.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    reply = {"object": "list", "data": data, "model": EMBEDDER, "usage": usage}
    return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)

"""Embeddings with the real openai client against a real server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from openai.types import CreateEmbeddingResponse

from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.apis.embeddings import EMBEDDER
from bottega.gateway.ports import Tenant
from bottega.knowledge import PixelEmbedder
from bottega.types import Query
from tests.builders import solid_image
from tests.gateway.harness import Harness, client, harness
from tests.knowledge.doubles import SeededEmbedder, vector_of


def embedding_with(embedder: Any) -> Any:
    def customize(tenant: Tenant) -> Tenant:
        return replace(tenant, embed=embedder.embed)

    return customize


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("embeddings")
    with harness(folder, customize=embedding_with(SeededEmbedder())) as endpoint:
        yield endpoint


def embed(gateway: Harness, given: Any, **more: Any) -> CreateEmbeddingResponse:
    with client(gateway.url) as real:
        return real.embeddings.create(model=EMBEDDER, input=given, **more)


def nested(depth: int) -> Any:
    """Return nested arrays, more deeply than orjson encodes them."""
    return json.loads("[" * depth + "]" * depth)


def image_part(shade: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": solid_image(shade).data_url}}


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
def test_texts(gateway: Harness, encoding_format: str | None) -> None:
    more = {} if encoding_format is None else {"encoding_format": encoding_format}
    found = embed(gateway, ["first text", "second text"], **more)
    vectors: Any = [one.embedding for one in found.data]
    if encoding_format == "base64":
        vectors = [np.frombuffer(base64.b64decode(one), "<f4") for one in vectors]
    expected = [vector_of(Query("first text")), vector_of(Query("second text"))]
    assert np.array_equal(np.array(vectors, np.float32), expected)
    assert [one.index for one in found.data] == [0, 1]
    assert found.model == EMBEDDER and found.usage.prompt_tokens > 0


def test_images_and_texts_are_one_input(gateway: Harness) -> None:
    parts = [image_part(3), {"type": "text", "text": "what?"}]
    [one] = embed(gateway, [parts]).data
    wanted = vector_of(Query("what?", (solid_image(3),)))
    assert np.allclose(one.embedding, wanted, atol=1e-6)


def test_single_text(gateway: Harness) -> None:
    [one] = embed(gateway, "a").data
    assert np.allclose(one.embedding, vector_of(Query("a")), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "more", "param"),
    [
        ([], {}, "input"),
        ([1, 2], {}, "input[0]"),
        ([{"type": "text", "text": "a"}], {}, "input[0]"),
        ([[1, 2], [3]], {}, "input[0]"),
        ("a", {"model": nested(300)}, "model"),
        ([[image_part(3)], [{"type": "image_url", "image_url": {"url": "x"}}]], {}, "input[1]"),
        ("a", {"dimensions": 2}, "dimensions"),
        ("a", {"encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_invalid_requests_name_the_field(
    gateway: Harness, given: Any, more: Any, param: str
) -> None:
    with client(gateway.url) as real, pytest.raises(openai.BadRequestError) as raised:
        real.post(
            "/embeddings",
            body={"model": EMBEDDER, "input": given, **more},
            cast_to=CreateEmbeddingResponse,
        )
    assert str(raised.value.param).startswith(param)


def test_deeply_nested_inputs_are_rejected(gateway: Harness) -> None:
    with pytest.raises(openai.BadRequestError, match="nested"):
        embed(gateway, [[{"type": "text", "text": "a", "x": nested(300)}]])


def test_too_many_inputs_name_the_limit(gateway: Harness) -> None:
    with pytest.raises(openai.BadRequestError, match="'input': more than 200 messages"):
        embed(gateway, ["a"] * 201)


def test_unknown_model_names_the_known_one(gateway: Harness) -> None:
    with client(gateway.url) as real, pytest.raises(openai.NotFoundError, match=EMBEDDER):
        real.embeddings.create(model="text-embedding-3-small", input="a")


def test_input_that_cannot_be_embedded_is_an_error(tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("pixels")
    with harness(folder, customize=embedding_with(PixelEmbedder())) as own:
        with pytest.raises(openai.BadRequestError, match="image"):
            embed(own, "no image")
        assert own.wait(1).state == "failed"


def test_keys_are_checked(tmp_path_factory: Any) -> None:
    accounts = {"sk-test": Account("a", "a")}
    folder, customize = tmp_path_factory.mktemp("keys"), embedding_with(SeededEmbedder())
    with harness(
        folder, customize=customize, authenticate=lambda key: accounts.get(key or "")
    ) as own:
        assert embed(own, "a").data
        with client(own.url) as real, pytest.raises(openai.AuthenticationError):
            real.with_options(api_key="wrong").embeddings.create(model=EMBEDDER, input="a")
        assert own.records[0].reason == "embeddings"

"""Stored responses and `previous_response_id` with the real openai client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.config.gateway_settings import ResponseSettings
from bottega.gateway.request.response_store import ResponseStore
from bottega.generation import ScriptedGenerator
from bottega.openai_api.errors import ApiError
from tests import server as doubles
from tests.builders import solid_image
from tests.gateway.harness import Harness, client, harness
from tests.gateway.test_responses import response_input
from tests.gateway.test_responses_upstream import CALLED, reply_with
from tests.gateway.upstreams import upstream

DAY = 86_400.0


@contextmanager
def gateway(folder: Path, **more: Any) -> Iterator[Harness]:
    with closing(Ledger(folder / "gateway.db")) as ledger:
        store = ResponseStore(ledger, ResponseSettings(store=True))
        with harness(folder, responses=store, **more) as server:
            yield server


@pytest.fixture
def seen() -> ScriptedGenerator:
    return ScriptedGenerator(lambda prompt: f"answer {len(prompt.messages)}")


@pytest.fixture
def plain(tmp_path: Path, seen: ScriptedGenerator) -> Iterator[Harness]:
    with gateway(tmp_path, apprentice=seen) as server:
        yield server


@pytest.fixture
def real(plain: Harness) -> Iterator[openai.OpenAI]:
    with client(plain.url) as opened:
        yield opened


def turns(seen: ScriptedGenerator) -> list[tuple[str, tuple[object, ...]]]:
    return [(one.role, one.parts) for one in seen.calls[-1].prompt.messages]


def test_conversation_continues(real: openai.OpenAI, seen: ScriptedGenerator) -> None:
    first = real.responses.create(
        model="bottega", input=response_input(1, text="What is this?"), instructions="Be short."
    )
    assert first.to_dict()["store"] is True
    second = real.responses.create(model="bottega", input="And why?", previous_response_id=first.id)
    third = real.responses.create(model="bottega", input="Sure?", previous_response_id=second.id)
    # Instructions belong to one request.
    assert turns(seen) == [
        ("user", (solid_image(1), "What is this?")),
        ("assistant", ("answer 2",)),
        ("user", ("And why?",)),
        ("assistant", ("answer 3",)),
        ("user", ("Sure?",)),
    ]
    assert third.output_text == "answer 5"
    assert (third.previous_response_id, first.previous_response_id) == (second.id, None)
    other = real.responses.create(model="bottega", input="Really?", previous_response_id=first.id)
    assert other.output_text == "answer 3"  # a branch of the conversation


def test_streamed_response_is_stored_before_its_end(
    real: openai.OpenAI, seen: ScriptedGenerator
) -> None:
    for event in real.responses.create(model="bottega", input="hi", stream=True):
        if event.type == "response.completed":
            assert event.response.to_dict()["store"] is True
            more = real.responses.create(
                model="bottega", input="more", previous_response_id=event.response.id
            )
            assert real.responses.retrieve(event.response.id) == event.response
    assert more.output_text == "answer 3"
    assert [role for role, _ in turns(seen)] == ["user", "assistant", "user"]


def test_responses_are_read_and_deleted(real: openai.OpenAI) -> None:
    first = real.responses.create(model="bottega", input="hi", metadata={"a": "b"})
    found = real.responses.retrieve(first.id)
    assert found == first and found.metadata == {"a": "b"}
    second = real.responses.create(model="bottega", input="x", previous_response_id=first.id)
    real.responses.delete(first.id)
    for way in (real.responses.retrieve, real.responses.delete, real.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="no such response"):
            way(first.id)
    for id, expected in ((first.id, "no such response"), (second.id, "no longer stored")):
        with pytest.raises(openai.NotFoundError, match=expected) as refused:
            real.responses.create(model="bottega", input="y", previous_response_id=id)
        assert refused.value.param == "previous_response_id"


def test_client_may_refuse_to_store(real: openai.OpenAI) -> None:
    reply = real.responses.create(model="bottega", input="hi", store=False)
    assert reply.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        real.responses.retrieve(reply.id)
    with pytest.raises(openai.BadRequestError):
        real.responses.create(model="bottega", input="hi", store="yes")  # type: ignore[call-overload]


def test_input_that_cannot_be_stored_is_refused_before_the_call(
    real: openai.OpenAI, seen: ScriptedGenerator
) -> None:
    item: Any = {"role": "user", "content": "hi", "x": orjson.loads("[" * 300 + "]" * 300)}
    with pytest.raises(openai.BadRequestError, match="nested"):
        real.responses.create(model="bottega", input=[item])
    assert not seen.calls
    assert real.responses.create(model="bottega", input=[item], store=False).output_text


def test_function_calls_are_part_of_the_conversation(tmp_path: Path) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    with doubles.running() as endpoint, gateway(tmp_path, master=upstream(endpoint)) as server:
        endpoint.answers = [
            reply_with("tool_calls", content=None, tool_calls=[CALLED]),
            doubles.ok("sunny"),
        ]
        with client(server.url) as real:
            first = real.responses.create(model="bottega/master", input="Weather?", tools=[tool])
            (call,) = [one for one in first.output if one.type == "function_call"]
            output: Any = {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": "25 degrees",
            }
            second = real.responses.create(
                model="bottega/master", input=[output], tools=[tool], previous_response_id=first.id
            )
    assert second.output_text == "sunny"
    roles = [message["role"] for message in endpoint.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "tool"]


def test_responses_are_private_to_their_key(tmp_path: Path) -> None:
    accounts = {"sk-test": Account("a", "a"), "sk-other": Account("b", "b")}
    with (
        gateway(tmp_path, authenticate=lambda key: accounts.get(key or "")) as server,
        client(server.url) as ours,
    ):
        reply = ours.responses.create(model="bottega", input="secret")
        theirs = ours.with_options(api_key="sk-other")
        with pytest.raises(openai.NotFoundError):
            theirs.responses.retrieve(reply.id)
        with pytest.raises(openai.NotFoundError):
            theirs.responses.delete(reply.id)
        with pytest.raises(openai.NotFoundError):
            theirs.responses.create(model="bottega", input="x", previous_response_id=reply.id)
        with pytest.raises(openai.AuthenticationError):
            ours.with_options(api_key="none").responses.retrieve(reply.id)
        assert ours.responses.retrieve(reply.id).id == reply.id


@pytest.fixture(params=["file", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        url: str = request.getfixturevalue("gateway_database")
        return url
    return str(tmp_path / "gateway.db")


def stored(id: str, text: str = "") -> bytes:
    return orjson.dumps({"id": id, "output": [{"text": text}]})


async def test_store_is_bounded_by_number_size_and_age(location: str) -> None:
    now = 100 * DAY
    with closing(Ledger(location)) as ledger:
        settings = ResponseSettings(store=True, max_per_key=3, mb_per_key=1, keep_days=10)
        store = ResponseStore(ledger, settings, clock=lambda: now)

        async def held(account: str) -> list[str]:
            found = []
            for number in range(6):
                with suppress(ApiError):
                    found.append(orjson.loads(await store.get(account, f"r{number}"))["id"])
            return found

        previous = None
        for number in range(5):
            now += 1
            item = {"n": number, "text": "\0é"}
            await store.add("a", previous, [item], stored(f"r{number}"))
            previous = f"r{number}"
        await store.add("b", None, [], stored("r5"))
        assert await held("a") == ["r2", "r3", "r4"]
        with pytest.raises(ApiError, match="no longer stored: 'r1'"):
            await store.conversation("a", "r4", 10)
        await store.add("a", None, [{"n": 9}], stored("r0b"))
        await store.add("a", "r0b", [{"n": 10, "text": "\0é"}], stored("r0c"))
        items = await store.conversation("a", "r0c", 10)
        assert items == [{"n": 9}, {"text": ""}, {"n": 10, "text": "\0é"}, {"text": ""}]
        with pytest.raises(ApiError, match="no longer stored"):
            await store.conversation("a", "r0c", 1)
        now += 1
        await store.add("a", None, [], stored("r0", "x" * 700_000))
        now += 1
        await store.add("a", None, [], stored("r1", "x" * 700_000))
        assert await held("a") == ["r1"]
        await store.add("a", None, [], stored("r2", "x" * 1_200_000))  # too long
        assert await held("a") == ["r1"] and await held("b") == ["r5"]
        now += 11 * DAY
        assert await held("a") == await held("b") == []
        await store.add("a", None, [], stored("r0"))
        assert ledger.read("SELECT id FROM gateway_responses") == [("r0",)]

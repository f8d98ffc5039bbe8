from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import (
    GenerationError,
    RateLimitedError,
    ReplayMissError,
    ServerFailedError,
    SettingError,
    StoreError,
    StoreFullError,
)
from bottega.generation import (
    Call,
    OpenAIGenerator,
    ReplayGenerator,
    ScriptedGenerator,
    request_key,
)
from bottega.types import Message, Prompt, Sampling
from tests.builders import solid_image
from tests.generation.prompts import ask, shown


async def test_a_function_replies_and_calls_are_recorded() -> None:
    model = ScriptedGenerator(
        lambda prompt: f"{len(prompt.messages)} turns", name="toy", latency=0.001
    )
    prompt, sampling = shown(1, 2), Sampling(n=2)
    reply = await model.generate(prompt, sampling)
    assert [one.text for one in reply.completions] == ["3 turns", "3 turns"]
    assert (reply.model, reply.usage.completion_tokens) == ("toy", 4)
    assert model.calls == [Call(prompt, sampling)]


async def test_a_sequence_replies_raises_and_ends() -> None:
    model = ScriptedGenerator(["a", "b", RateLimitedError("slow down")])
    reply = await model.generate(ask(), Sampling(n=2))
    assert [one.text for one in reply.completions] == ["a", "b"]
    with pytest.raises(RateLimitedError):
        await model.generate(ask(), Sampling())
    with pytest.raises(GenerationError, match="ended after") as caught:
        await model.generate(ask(), Sampling())
    assert caught.value.hint
    await model.aclose()


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    max_tokens=st.integers(1, 3),
    n=st.integers(1, 3),
    seed=st.none() | st.integers(0, 2),
    stop=st.lists(st.sampled_from("ab"), max_size=2).map(tuple),
)
parts = st.sampled_from(
    ["a", "b", "ab", "image", solid_image(1), solid_image(2), solid_image(1).sha256]
)
messages = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant"]),
    parts=st.lists(parts, max_size=3).map(tuple),
)
prompts = st.lists(messages, max_size=2).map(lambda found: Prompt(tuple(found)))
requests = st.tuples(st.sampled_from(["m", "n"]), prompts, samplings)


@given(requests, requests)
def test_keys_are_equal_exactly_if_requests_are(
    one: tuple[str, Prompt, Sampling], other: tuple[str, Prompt, Sampling]
) -> None:
    assert (request_key(*one) == request_key(*other)) == (one == other)


async def test_recorded_requests_are_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    inner = ScriptedGenerator(["a", "b"], name="toy")
    replay = ReplayGenerator(path, inner)
    first = await replay.generate(shown(1, 2), Sampling(n=2))
    assert await replay.generate(shown(1, 2), Sampling(n=2)) == first
    await replay.aclose()
    later = ReplayGenerator(path)
    assert (later.name, len(later), len(inner.calls)) == ("toy", 1, 1)
    assert await later.generate(shown(1, 2), Sampling(n=2)) == first
    assert solid_image(1).data[20:40] not in path.read_bytes()


async def test_a_miss_explains_how_to_record(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    await ReplayGenerator(path, ScriptedGenerator(["a"])).generate(ask(), Sampling())
    for prompt, sampling in ((ask("else"), Sampling()), (ask(), Sampling(temperature=0.1))):
        with pytest.raises(ReplayMissError) as caught:
            await ReplayGenerator(path).generate(prompt, sampling)
        assert "record" in caught.value.hint


async def test_failures_are_not_recorded(tmp_path: Path) -> None:
    replay = ReplayGenerator(tmp_path / "r", ScriptedGenerator([ServerFailedError("down"), "a"]))
    with pytest.raises(ServerFailedError):
        await replay.generate(ask(), Sampling())
    assert (await replay.generate(ask(), Sampling())).completions[0].text == "a"


async def test_concurrent_equal_requests_make_one_call(tmp_path: Path) -> None:
    inner = ScriptedGenerator(lambda prompt: "a", latency=0.02)
    replay = ReplayGenerator(tmp_path / "r", inner)
    flights = [asyncio.create_task(replay.generate(ask(), Sampling())) for _ in range(5)]
    await asyncio.sleep(0.005)
    flights[0].cancel()
    replies = await asyncio.gather(*flights[1:])
    assert len({id(reply) for reply in replies}) == len(inner.calls) == 1
    assert flights[0].cancelled()


async def test_a_request_without_callers_is_cancelled(tmp_path: Path) -> None:
    replay = ReplayGenerator(tmp_path / "r", ScriptedGenerator(lambda prompt: "a", latency=0.05))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(replay.generate(ask(), Sampling()), 0.005)
    await asyncio.sleep(0.1)
    assert len(replay) == 0
    assert (await replay.generate(ask(), Sampling())).completions[0].text == "a"


async def test_a_truncated_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "r"
    for word in ("one", "two"):
        await ReplayGenerator(path, ScriptedGenerator([word])).generate(ask(word), Sampling())
    path.write_bytes(path.read_bytes()[:-30])
    torn = ReplayGenerator(path, ScriptedGenerator(["again"]))
    assert len(torn) == 1
    await torn.generate(ask("two"), Sampling())
    whole = ReplayGenerator(path)
    assert (await whole.generate(ask("one"), Sampling())).completions[0].text == "one"
    assert (await whole.generate(ask("two"), Sampling())).completions[0].text == "again"


async def test_a_line_without_its_end_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "r"
    for word in ("one", "two"):
        await ReplayGenerator(path, ScriptedGenerator([word])).generate(ask(word), Sampling())
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:-30])
    replay = ReplayGenerator(path, ScriptedGenerator(["three"]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # a line break and the second line fit, except for the last byte
        size = path.stat().st_size + len(second)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        with pytest.raises(StoreFullError):
            replay._append(second)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    await replay.generate(ask("three"), Sampling())
    assert len(ReplayGenerator(path)) == 3


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text("dear diary\n")
    with pytest.raises(StoreError):
        ReplayGenerator(path)
    with pytest.raises(StoreError):
        ReplayGenerator(tmp_path, ScriptedGenerator(["a"]))
    with pytest.raises(SettingError, match="no model"):
        ReplayGenerator(tmp_path / "absent")


async def test_several_models_in_one_record(tmp_path: Path) -> None:
    path = tmp_path / "r"
    for name in ("a", "b"):
        await ReplayGenerator(path, ScriptedGenerator([name], name=name)).generate(
            ask(), Sampling()
        )
    with pytest.raises(SettingError, match="a, b"):
        ReplayGenerator(path)
    reply = await ReplayGenerator(path, model="b").generate(ask(), Sampling())
    assert reply.completions[0].text == "b"


async def test_the_fingerprint_replaces_the_name_in_keys(tmp_path: Path) -> None:
    path = tmp_path / "r"
    inner = ScriptedGenerator(["plain"], name="m")
    await ReplayGenerator(path, inner).generate(ask(), Sampling())
    other = ReplayGenerator(path, OpenAIGenerator("m", extra_body={"effort": "low"}))
    assert other.name == "m"
    assert request_key("m", ask(), Sampling()) in ReplayGenerator(path)._replies
    assert other._fingerprint != "m"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk_is_reported() -> None:
    replay = ReplayGenerator("/dev/null", ScriptedGenerator(["a"]))
    replay._path = Path("/dev/full")
    with pytest.raises(StoreFullError) as caught:
        await replay.generate(ask(), Sampling())
    assert "free disk space" in caught.value.hint

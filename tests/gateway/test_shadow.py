"""Shadow samples measure some answers, and the gate depends on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bottega.errors import ServerFailedError
from bottega.gateway.ports import Tenant
from bottega.generation import ScriptedGenerator
from bottega.parsing import decided_agreement
from bottega.pipeline import Pipeline
from bottega.protocols import Tier
from bottega.reranking import GatedReranker, TopKReranker
from bottega.routing import BenefitGate, ShadowSampler
from bottega.types import Answer, Prompt, Query, Reply, Sampling
from tests.gateway.harness import harness, raw, user_messages


def correct_with_example(prompt: Prompt) -> str:
    """Answer correctly only with a demonstration."""
    return "seven" if len(prompt.messages) > 1 else "no idea"


def wrong_with_example(prompt: Prompt) -> str:
    return "no idea" if len(prompt.messages) > 1 else "seven"


def shadow_parts(
    gate: BenefitGate, *, gated: bool = True, rate: float = 1.0, at_once: int = 4, seed: int = 0
) -> tuple[ShadowSampler, Callable[[Tenant], Tenant], Callable[[Pipeline], Pipeline]]:
    shadow = ShadowSampler(gate, decided_agreement, rate=rate, at_once=at_once, seed=seed)
    rerank = (
        GatedReranker(TopKReranker("nearest-last"), gate.shows)
        if gated
        else TopKReranker("nearest-last")
    )

    def customize(tenant: Tenant) -> Tenant:
        ungated = replace(tenant.pipeline, rerank=TopKReranker("nearest-last"))
        return replace(tenant, shadow=shadow, ungated=ungated)

    return shadow, customize, lambda pipeline: replace(pipeline, rerank=rerank)


@pytest.mark.parametrize(
    ("apprentice", "helps"), [(correct_with_example, True), (wrong_with_example, False)]
)
def test_gate_shows_demonstrations_that_help(
    tmp_path: Path, apprentice: Callable[[Prompt], str], helps: bool
) -> None:
    gate = BenefitGate(min_samples=5, window=60)
    shadow, customize, change = shadow_parts(gate)
    with harness(
        tmp_path,
        master=ScriptedGenerator(lambda prompt: "seven", name="big"),
        apprentice=ScriptedGenerator(apprentice),
        customize=customize,
        change=change,
    ) as server:
        raw(server, user_messages(100), "bottega/master")
        for shade in range(10):
            first = raw(server, user_messages(shade))
            if shade == 0:
                assert first.headers["x-bottega-demonstrations"] == "0"  # not measured yet
            server.wait(1 + 3 * (shade + 1))  # the answer and two shadow calls
        last = raw(server, user_messages(50))
        assert (last.headers["x-bottega-demonstrations"] != "0") is helps
        assert last.parse().choices[0].message.content == "seven"
    quality = shadow.summary()
    assert quality.n >= 10
    assert quality.with_demonstrations.least == (1.0 if helps else 0.0)
    assert quality.without.least == (0.0 if helps else 1.0)
    assert {(pair.shown, pair.hidden) for _, pair in server.pairs} == {
        (1.0, 0.0) if helps else (0.0, 1.0)
    }


def test_master_answers_of_measurements_are_stored_and_counted(tmp_path: Path) -> None:
    gate = BenefitGate()
    _, customize, change = shadow_parts(gate, gated=False)
    charged: list[float] = []
    with harness(
        tmp_path,
        master=ScriptedGenerator(lambda prompt: "seven", name="big"),
        apprentice=ScriptedGenerator(correct_with_example),
        customize=lambda tenant: replace(customize(tenant), charge=charged.append),
        change=change,
    ) as server:
        raw(server, user_messages(100), "bottega/master")
        answer = raw(server, user_messages(1))
        server.wait(4)
        samples = [one for one in server.records if one.state == "shadow"]
        assert sorted(one.route for one in samples) == ["apprentice", "master"]
        assert {one.request_id for one in samples} == {answer.headers["x-request-id"]}
        assert all(one.cost_usd for one in samples)
        assert sorted(charged) == sorted(one.cost_usd or 0.0 for one in samples)
        assert len(server.examples()) == 2


def test_requests_with_overrides_are_not_measured(tmp_path: Path) -> None:
    gate = BenefitGate()
    shadow, customize, change = shadow_parts(gate, gated=False)
    with harness(tmp_path, customize=customize, change=change) as server:
        raw(server, user_messages(100), "bottega/master")
        raw(server, user_messages(1), "bottega/apprentice")
        raw(server, user_messages(2), "bottega:no-retrieve")
        raw(server, user_messages(3), "bottega", n=2)
        raw(server, [{"role": "user", "content": "### Task: a title"}])
        assert shadow.begins()  # all slots are free
    assert not server.pairs
    assert all(one.state != "shadow" for one in server.records)


def test_unavailable_master_fails_only_the_sample(tmp_path: Path) -> None:
    gate = BenefitGate()
    shadow, customize, change = shadow_parts(gate, gated=False)
    failing = ScriptedGenerator(["seven", *[ServerFailedError("down", status=500)] * 9], name="big")
    with harness(tmp_path, master=failing, customize=customize, change=change) as server:
        raw(server, user_messages(100), "bottega/master")
        for shade in range(3):
            assert raw(server, user_messages(shade)).headers["x-bottega-route"] == "apprentice"
        server.wait(10)
    calls = [(one.route, one.status) for one in server.records if one.state == "shadow"]
    assert sorted(calls) == [("apprentice", 200)] * 3 + [("master", 502)] * 3
    assert shadow.summary().failed == 3
    assert not server.pairs


@pytest.mark.parametrize("samples", [1, 2])
def test_escalated_answer_is_measured(tmp_path: Path, samples: int) -> None:
    """While the gate hides examples, the apprentice is unsure and always escalates: a gate that
    measured only the apprentice's answers would never open."""

    async def unsure(query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        is_sure = tier.name == "master" or answer.text == "seven"
        return None if is_sure else Tier("master", tier.generator)

    gate = BenefitGate(min_samples=5, window=60)
    shadow, customize, change = shadow_parts(gate)

    def enough(samples: int) -> bool:
        return shadow.summary().n >= samples

    with harness(
        tmp_path,
        master=ScriptedGenerator(lambda prompt: "seven", name="big"),
        apprentice=ScriptedGenerator(correct_with_example),
        customize=customize,
        change=lambda pipeline: replace(change(pipeline), escalate=unsure),
        asks={"n": samples} if samples > 1 else None,
    ) as server:
        raw(server, user_messages(100), "bottega/master")
        for shade in range(8):
            reply = raw(server, user_messages(shade))
            if shade == 0:
                assert reply.headers["x-bottega-route"] == "master"
                # The master already answered and is not called again.
                server.wait(3)
                assert [one.route for one in server.records if one.state == "shadow"] == [
                    "apprentice"
                ]
            wait_until(partial(enough, shade + 1))
        assert raw(server, user_messages(50)).headers["x-bottega-route"] == "apprentice"
    pair = server.pairs[0][1]
    assert (pair.shown, pair.hidden) == (1.0, 0.0)
    assert (server.sampled[0], server.sampled[-1]) == (False, True)  # dismissed, then served


def test_master_answer_replaces_the_cached_reply(tmp_path: Path) -> None:
    """Otherwise wrong replies from before the gate opened would be repeated."""
    _, customize, change = shadow_parts(BenefitGate())
    with harness(
        tmp_path,
        master=ScriptedGenerator(lambda prompt: "seven", name="big"),
        apprentice=ScriptedGenerator(correct_with_example),
        customize=customize,
        change=change,
    ) as server:
        raw(server, user_messages(100), "bottega/master")
        wrong = raw(server, user_messages(1))
        assert wrong.parse().choices[0].message.content == "no idea"
        server.wait(4)
        again = raw(server, user_messages(1))
        other = raw(server, user_messages(1), "bottega/apprentice")
    assert again.parse().choices[0].message.content == "seven"
    assert (again.headers["x-bottega-cache"], again.headers["x-bottega-route"]) == (
        "replayed",
        "master",
    )
    assert other.headers["x-bottega-route"] == "apprentice"


def test_cut_master_answer_replaces_nothing(tmp_path: Path) -> None:
    class TruncatingGenerator(ScriptedGenerator):
        async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
            reply = await super().generate(prompt, sampling)
            cut = tuple(replace(one, finish_reason="length") for one in reply.completions)
            return replace(reply, completions=cut) if len(self.calls) > 1 else reply

    _, customize, change = shadow_parts(BenefitGate())
    with harness(
        tmp_path,
        master=TruncatingGenerator(lambda prompt: "seven", name="big"),
        apprentice=ScriptedGenerator(correct_with_example),
        customize=customize,
        change=change,
    ) as server:
        raw(server, user_messages(100), "bottega/master")
        raw(server, user_messages(1))
        server.wait(4)
        again = raw(server, user_messages(1))
    assert again.headers["x-bottega-cache"] == "replayed"
    assert again.parse().choices[0].message.content == "no idea"


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)

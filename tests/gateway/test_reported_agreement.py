"""The reported agreement with the master, against answers whose truth is known."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bottega.generation import ScriptedGenerator
from bottega.routing import BenefitGate
from bottega.routing.benefit_gate import AgreementRange, shadow_quality
from bottega.types import Prompt
from tests.gateway.harness import client, harness, raw, user_messages
from tests.gateway.test_shadow import shadow_parts

Say = Callable[[int, bool], str]
COLOURS = ("red", "green", "blue", "white")


def label(number: int, formal: bool) -> str:
    return f"**sign-{number}**" if formal else f"The answer is sign-{number}."


def length(number: int, formal: bool) -> str:
    return f"{number + 1} cm" if formal else f"{(number + 1) * 10} mm"


def record(number: int, formal: bool) -> str:
    fields = {"label": f"part-{number}", "ok": bool(number % 2), "count": number}
    return json.dumps(
        fields if formal else dict(reversed([*fields.items()])), indent=formal or None
    )


def sentence(number: int, formal: bool) -> str:
    """Paraphrases, which no rule decides."""
    colour, count = COLOURS[number % 4], number // 4 + 2
    return f"The picture shows {count} {colour} boats." if formal else f"{count} boats in {colour}."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("say", "judge"),
    [(label, None), (length, None), (record, None), (sentence, None), (sentence, "master")],
)
def test_the_true_agreement_lies_in_the_reported_interval(
    tmp_path: Path, say: Say, judge: str | None
) -> None:
    """In at least 8 of 10 runs: a 95 % interval may miss it."""
    found = [run(tmp_path / str(seed), say, seed, judge) for seed in range(10)]
    held = [interval.low <= truth <= interval.high for interval, truth in found]
    print(say.__name__, judge, *found, sep="\n")
    assert sum(held) >= 8
    is_open = say is sentence and judge is None
    assert all((interval.undecided > 0) == is_open for interval, _ in found)


def described(text: str) -> set[str]:
    """Return the number and the colour of a sentence."""
    return {word for word in re.findall(r"\w+", text) if word.isdigit() or word in COLOURS}


def run(folder: Path, say: Say, seed: int, judge: str | None) -> tuple[AgreementRange, float]:
    """Return the reported agreement of 400 answers and the true one. The apprentice is right more
    often with demonstrations, which the gate hides at first."""
    folder.mkdir()

    def item(prompt: Prompt) -> int:
        return int(re.findall(r"item (\d+)", str(prompt.messages[-1].parts))[-1])

    def answer(prompt: Prompt) -> str:
        is_shown = len(prompt.messages) > 1
        draw = random.Random(f"{seed} {item(prompt)} {is_shown}").random()
        is_right = draw < (0.7 if is_shown else 0.5)
        return say((item(prompt) + (not is_right)) % 40, False)

    def master(prompt: Prompt) -> str:
        if prompt.messages[0].role == "system":
            one, other = json.loads(str(prompt.messages[1].parts[0]))["answers"]
            return "SAME" if described(one) == described(other) else "DIFFERENT"
        return say(item(prompt) % 40, True)

    gate = BenefitGate()
    _, customize, change = shadow_parts(gate, rate=0.15, at_once=400, seed=seed)
    right = list[bool]()
    with (
        harness(
            folder,
            master=ScriptedGenerator(master, name="big"),
            apprentice=ScriptedGenerator(answer),
            customize=customize,
            change=change,
            replays=False,
        ) as server,
        client(server.url) as real,
    ):
        assert server.gateway.shadow is not None
        server.gateway.shadow.judge = judge
        raw(server, user_messages(0, text="item 400"), "bottega/master")
        for number in range(400):
            messages = user_messages(1 + number % 200, text=f"item {number}")
            reply = real.chat.completions.create(model="bottega", messages=messages)
            right.append(reply.choices[0].message.content == say(number % 40, False))
    pairs = [pair for (_, pair), drawn in zip(server.pairs, server.sampled, strict=True) if drawn]
    return shadow_quality(pairs).served, sum(right) / len(right)

"""Two questions about one image: each is shown the other's stored answer, never its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bottega.gateway.running.build import build
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.harness import Harness, client, harness, raw, user_messages
from tests.server import Server, ok

COLOUR, SHAPE = "Which colour is it?", "Which shape is it?"


def ask(server: Harness, text: str, model: str = "bottega", shade: int = 7, **more: Any) -> Any:
    return raw(server, user_messages(shade, text=text), model, **more)


def shots(response: Any) -> int:
    return int(response.headers["x-bottega-demonstrations"])


def test_second_question_is_shown_the_first_answer(tmp_path: Path) -> None:
    with harness(tmp_path, replays=False) as server:
        assert ask(server, COLOUR, "bottega/master").headers["x-bottega-stored"]
        second = ask(server, SHAPE)
        assert shots(second) == 1
        assert second.parse().choices[0].message.content == f"{SHAPE} (1 shown)"


def test_the_identical_question_is_not_shown_its_own_answer(tmp_path: Path) -> None:
    with harness(tmp_path, replays=False) as server:
        ask(server, COLOUR, "bottega/master")
        assert shots(ask(server, COLOUR)) == 0
        ask(server, SHAPE, "bottega/master")
        assert shots(ask(server, COLOUR)) == 1
        assert shots(ask(server, "Anything else?")) == 2


def test_other_contexts_are_separate(tmp_path: Path) -> None:
    with harness(tmp_path, replays=False) as server:
        ask(server, COLOUR, "bottega/master", stop=["."])
        assert shots(ask(server, SHAPE)) == 0
        assert shots(ask(server, SHAPE, stop=["."])) == 1


def test_questions_with_different_choices_are_both_stored(tmp_path: Path) -> None:
    """Over HTTP the choices are part of the question text."""
    few, more = "Which colour? (a) red (b) blue", "Which colour? (a) red (b) grey"
    with harness(tmp_path, replays=False) as server:
        ask(server, few, "bottega/master")
        ask(server, more, "bottega/master")
        assert [example.query.text for example in server.examples()] == [few, more]


@pytest.mark.parametrize(("kind", "embed"), [("nearest", "pixels"), ("bm25", "words")])
def test_a_configured_gateway_shows_it_too(
    endpoint: Server, tmp_path: Path, kind: str, embed: str
) -> None:
    endpoint.answers = [ok("seven")]
    more = f'retrieve = "{kind}"\n[replay]\nseconds = 0\n'
    config = gateway_config(tmp_path, endpoint.url, more, embed=embed)
    with run_gateway(build(config, ENVIRONMENT)) as url, client(url) as real:
        for model, text, shown in (
            ("bottega/large", COLOUR, 0),
            ("bottega/small", COLOUR, 0),
            ("bottega/small", SHAPE, 1),
        ):
            response = real.chat.completions.with_raw_response.create(
                model=model, messages=user_messages(7, text=text)
            )
            assert shots(response) == shown, (model, text)

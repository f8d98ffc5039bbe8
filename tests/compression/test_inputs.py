import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from PIL import Image as Pillow

from bottega.compression.hyper_model import HyperModel, InputBuilder, padded, rows
from bottega.image import Image
from bottega.types import Example, Prompt, Query
from tests.compression.tiny_models import (
    ASSISTANT,
    USER,
    encode,
    passage,
    passages,
    texts,
    word,
    word_encoder,
)
from tests.kv_prefix.tiny_models import ALL, END, IMAGE, START, tiny


def test_passage_tokens_are_those_of_the_prompt() -> None:
    inputs = texts().passages([passage("red bus"), passage("red")])

    assert rows(inputs) == [[USER, word("red"), word("bus"), END], [USER, word("red"), END]]


def test_passage_equal_to_the_question_is_read() -> None:
    assert rows(texts().passages([passage("?")])) == [[USER, word("?"), END]]


def test_question_without_image_gives_three_equal_inputs() -> None:
    image, question, both = texts().query_inputs([Query("which is it")])

    assert rows(image) == rows(question) == rows(both)
    ids = [word("which"), word("is"), word("it")]
    assert rows(both) == [[START, USER, *ids, END, ASSISTANT]]


def test_answer_tokens_follow_the_question() -> None:
    queries = [Query("which is it"), Query("who")]

    answers = texts().answers(queries, ["a red bus", "you"])

    assert answers == [[word("a"), word("red"), word("bus")], [word("you")]]


def test_answers_exclude_the_end_token_of_a_text() -> None:
    read = InputBuilder(word_encoder(tiny("instructblip_t5")), frozenset({END}))

    assert read.answers([Query("what")], ["a red bus"]) == [[word("a"), word("red"), word("bus")]]


def test_concatenation_shows_all_passages_before_the_question() -> None:
    shown = passages(2)
    ids = rows(texts().with_passages([Query("who")], [shown]))[0]

    parts = [rows(texts().passages([one]))[0] for one in shown]
    assert ids == [START, *parts[0], *parts[1], USER, word("who"), END, ASSISTANT]


SHOWN = Image.from_pillow(Pillow.new("L", (4, 4)))
DEMONSTRATIONS = (
    Example(Query("which is it", (SHOWN,)), "red bus"),
    Example(Query("?", (SHOWN,)), "red", rationale="roof and wall"),
    Example(Query("who", (SHOWN,)), "who"),
)


@pytest.mark.parametrize("name", ALL)
def test_demonstration_tokens_are_those_a_prompt_gains(name: str) -> None:
    """They end with the last token of the answer, and the other tokens stay the same."""
    read = InputBuilder(word_encoder(tiny(name)), frozenset({END}))
    query = Query("who is it", (SHOWN,))
    around = rows(read.questions([query]))[0]
    demonstrations = rows(read.passages(DEMONSTRATIONS))

    assert demonstrations[0] == [
        *(USER, *image_tokens(name), word("which"), word("is"), word("it"), END),
        *(ASSISTANT, word("red"), word("bus")),
    ]
    for count in (1, 2, 3):
        shown = rows(read.with_passages([query], [DEMONSTRATIONS[:count]]))[0]
        assert shown == [START, *itertools.chain(*demonstrations[:count]), *around[1:]]


def image_tokens(name: str) -> list[int]:
    """Return the tokens of the image in a prompt without text."""
    read = InputBuilder(word_encoder(tiny(name)), frozenset({END}))
    ids = rows(read.images([Query("", (SHOWN,))]))[0]
    return ids[ids.index(USER) + 1 : ids.index(END, 2)]


def test_rationale_precedes_the_answer() -> None:
    (ids,) = rows(texts().passages(DEMONSTRATIONS[1:2]))

    reply = [word(one) for one in ("roof", "and", "wall", "Answer:", "red")]
    assert ids[ids.index(ASSISTANT) + 1 :] == reply


def test_example_without_answer_is_a_passage() -> None:
    passage = Example(Query("red bus"), "", rationale="roof and wall")

    assert rows(texts().passages([passage])) == [[USER, word("red"), word("bus"), END]]


def test_rows_have_no_padding() -> None:
    given = [[5, 6, 7], [8]]

    assert rows(padded(given)) == given


def test_end_token_before_the_passage_is_excluded() -> None:
    """For example the end of a system turn."""
    opening = [START, ASSISTANT, word("unknown"), END]

    def opened(prompts: Sequence[Prompt]) -> dict[str, Any]:
        return padded([[*opening, *ids[1:]] for ids in rows(encode(prompts))])

    inputs = InputBuilder(opened, frozenset({END})).passages([passage("red bus")])

    assert rows(inputs) == [[USER, word("red"), word("bus"), END]]


@pytest.mark.parametrize("name", ["llava", "fast_vlm", "qwen2_vl"])
def test_one_batch_equals_two_batches_with_and_without_image(name: str) -> None:
    shown = tiny(name)

    def encode(prompts: Sequence[Prompt]) -> dict[str, Any]:
        parts = [prompt.messages[0].parts for prompt in prompts]
        return shown.inputs(
            *([20, *(IMAGE if isinstance(one, Image) else 30 for one in row)] for row in parts)
        )

    query = Query("who", (Image.from_pillow(Pillow.new("L", (4, 4))),))
    hyper, builder = HyperModel(shown.model), InputBuilder(encode, frozenset({END}))
    prompts = hyper.embed(torch.tensor([21, 22]))
    with torch.inference_mode():
        together = hyper.read(builder.text_and_question(query), prompts).prompted
        apart = [
            hyper.read(one, prompts).prompted
            for one in (builder.texts_only([query]), builder.questions([query]))
        ]

    assert together is not None and apart[0] is not None and apart[1] is not None
    torch.testing.assert_close(together[:1], apart[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(together[1:], apart[1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(together[0], together[1], atol=1e-2)

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from PIL import Image as Pillow

from bottega.compression.hyper_model import HyperModel
from bottega.compression.inputs import InputBuilder, padded, rows
from bottega.image import Image
from bottega.types import Example, Prompt, Query
from tests.compression.tiny_models import (
    ASSISTANT,
    USER,
    encode,
    labelled_passage,
    passages,
    speaking,
    texts,
    word,
)
from tests.kv_prefix.tiny_models import ALL, END, IMAGE, START, tiny


def test_passage_tokens_are_those_of_the_prompt() -> None:
    inputs = texts().passages([labelled_passage("red house"), labelled_passage("red")])

    assert rows(inputs) == [[USER, word("red"), word("house"), END], [USER, word("red"), END]]


def test_passage_equal_to_the_question_is_read() -> None:
    assert rows(texts().passages([labelled_passage("?")])) == [[USER, word("?"), END]]


def test_a_question_without_image_is_compressed_three_times() -> None:
    image, question, both = texts().query_inputs([Query("what is it")])

    assert rows(image) == rows(question) == rows(both)
    ids = [word("what"), word("is"), word("it")]
    assert rows(both) == [[START, USER, *ids, END, ASSISTANT]]


def test_answer_tokens_follow_the_question() -> None:
    queries = [Query("what is it"), Query("who")]

    answers = texts().answers(queries, ["a red house", "you"])

    assert answers == [[word("a"), word("red"), word("house")], [word("you")]]


def test_answers_leave_out_what_a_tokenizer_ends_every_text_with() -> None:
    read = InputBuilder(speaking(tiny("instructblip_t5")), frozenset({END}))

    assert read.answers([Query("what")], ["a red house"]) == [
        [word("a"), word("red"), word("house")]
    ]


def test_concatenation_shows_all_passages_before_the_question() -> None:
    shown = passages(2)
    ids = rows(texts().with_passages([Query("who")], [shown]))[0]

    parts = [rows(texts().passages([one]))[0] for one in shown]
    assert ids == [START, *parts[0], *parts[1], USER, word("who"), END, ASSISTANT]


SHOWN = Image.from_pillow(Pillow.new("L", (4, 4)))
DEMONSTRATIONS = (
    Example(Query("what is it", (SHOWN,)), "red house"),
    Example(Query("?", (SHOWN,)), "red", rationale="roof and door"),
    Example(Query("who", (SHOWN,)), "who"),
)


@pytest.mark.parametrize("name", ALL)
def test_demonstration_tokens_are_those_a_prompt_gains(name: str) -> None:
    """To the last token of its answer; and what stands around it is whole."""
    read = InputBuilder(speaking(tiny(name)), frozenset({END}))
    query = Query("who is it", (SHOWN,))
    around = rows(read.questions([query]))[0]
    labelled_passage = rows(read.passages(DEMONSTRATIONS))

    assert labelled_passage[0] == [
        *(USER, *rows_of_picture(name), word("what"), word("is"), word("it"), END),
        *(ASSISTANT, word("red"), word("house")),
    ]
    for count in (1, 2, 3):
        shown = rows(read.with_passages([query], [DEMONSTRATIONS[:count]]))[0]
        assert shown == [START, *itertools.chain(*labelled_passage[:count]), *around[1:]]


def rows_of_picture(name: str) -> list[int]:
    """Its tokens, as a prompt of a picture alone has them."""
    read = InputBuilder(speaking(tiny(name)), frozenset({END}))
    ids = rows(read.images([Query("", (SHOWN,))]))[0]
    return ids[ids.index(USER) + 1 : ids.index(END, 2)]


def test_a_rationale_is_read_before_the_answer() -> None:
    (ids,) = rows(texts().passages(DEMONSTRATIONS[1:2]))

    said = [word(one) for one in ("roof", "and", "door", "Answer:", "red")]
    assert ids[ids.index(ASSISTANT) + 1 :] == said


def test_example_without_answer_is_a_passage() -> None:
    passage = Example(Query("red house"), "", rationale="roof and door")

    assert rows(texts().passages([passage])) == [[USER, word("red"), word("house"), END]]


def test_rows_come_back_without_their_padding() -> None:
    given = [[5, 6, 7], [8]]

    assert rows(padded(given)) == given


def test_end_token_before_the_passage_is_excluded() -> None:
    """As where a system turn comes first."""
    opening = [START, ASSISTANT, word("unknown"), END]

    def opened(prompts: Sequence[Prompt]) -> dict[str, Any]:
        return padded([[*opening, *ids[1:]] for ids in rows(encode(prompts))])

    inputs = InputBuilder(opened, frozenset({END})).passages([labelled_passage("red house")])

    assert rows(inputs) == [[USER, word("red"), word("house"), END]]


@pytest.mark.parametrize("name", ["llava", "fast_vlm", "qwen2_vl"])
def test_one_batch_equals_two_batches_with_and_without_image(name: str) -> None:
    shown = tiny(name)

    def encode(prompts: Sequence[Prompt]) -> dict[str, Any]:
        parts = [prompt.messages[0].parts for prompt in prompts]
        return shown.inputs(
            *([20, *(IMAGE if isinstance(one, Image) else 30 for one in row)] for row in parts)
        )

    query = Query("who", (Image.from_pillow(Pillow.new("L", (4, 4))),))
    hyper, asking = HyperModel(shown.model), InputBuilder(encode, frozenset({END}))
    prompts = hyper.embed(torch.tensor([21, 22]))
    with torch.inference_mode():
        together = hyper.read(asking.text_and_question(query), prompts).prompted
        apart = [
            hyper.read(one, prompts).prompted
            for one in (asking.texts_only([query]), asking.questions([query]))
        ]

    assert together is not None and apart[0] is not None and apart[1] is not None
    torch.testing.assert_close(together[:1], apart[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(together[1:], apart[1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(together[0], together[1], atol=1e-2)

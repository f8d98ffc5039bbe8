"""Order of images and texts, and the form of content, by the template of a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bottega.generation.tokenization import ChatTemplate, ControlTokens
from bottega.image import Image
from tests.builders import solid_image
from tests.generation.tiny_families import IMAGES_FIRST, ORDERED, template, tokenizer

IMAGE = solid_image(1)
FIRST = template(IMAGES_FIRST, "<image>")
STRINGS = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '/' }}{% endfor %}"
PRINTED = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}/{% endfor %}"


def chat(source: str) -> ChatTemplate:
    words = tokenizer({"image_token": "<image>"}, {})
    words.chat_template = source

    def apply(conversation: Any, **options: Any) -> str:
        return str(words.apply_chat_template(conversation, tokenize=False, **options))

    processor = SimpleNamespace(apply_chat_template=apply, image_token="<image>", tokenizer=words)
    return ChatTemplate(processor, ControlTokens.for_processor(processor))


def rendered(source: str, *turns: tuple[str, Sequence[str | Image]]) -> str:
    return chat(source).render(turns, prefilled=False)


def pieces(text: str) -> list[str]:
    return re.findall(r"<image>|user:|[a-z]\d", text)


@pytest.mark.parametrize(
    ("parts", "turns"),
    [
        ("i t1 i t2 i t3", ["<image> t1", "<image> t2", "<image> t3"]),
        ("i i t1 i i t2", ["<image> <image> t1", "<image> <image> t2"]),
        ("i t1 t2 i t3", ["<image> t1 t2", "<image> t3"]),
        ("t1 i t2 i t3", ["<image> t1 t2", "<image> t3"]),
        ("t1 i", ["<image> t1"]),
        ("i t1 i", ["<image> t1", "<image>"]),
        ("i t1", ["<image> t1"]),
        ("i i", ["<image> <image>"]),
        ("t1 t2", ["t1 t2"]),
    ],
)
def test_images_keep_their_texts_where_the_template_puts_images_first(
    parts: str, turns: Sequence[str]
) -> None:
    given = [IMAGE if part == "i" else part for part in parts.split()]
    expected = [piece for turn in turns for piece in ("user:", *turn.split())]
    assert pieces(rendered(FIRST, ("user", given))) == expected
    whole = ["user:", *("<image>" if part == "i" else part for part in parts.split())]
    assert pieces(rendered(template(ORDERED, "<image>"), ("user", given))) == whole


def test_one_warning_names_the_changed_order(caplog: pytest.LogCaptureFixture) -> None:
    first, ordered = chat(FIRST), chat(template(ORDERED, "<image>"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for one in (first, ordered):
                one.render([("user", (IMAGE, "a1"))], prefilled=False)
        assert not caplog.records  # one image in a turn keeps its place
        for _ in range(2):
            for one in (first, ordered):
                one.render([("user", (IMAGE, "a1", IMAGE, "a2"))], prefilled=False)
    [record] = caplog.records
    assert "puts images before texts: one turn per demonstration" in record.getMessage()


SYSTEM, USER, ASSISTANT = ("system", ("be brief",)), ("user", ("what",)), ("assistant", ("cat",))


@pytest.mark.parametrize("source", [STRINGS, PRINTED, template("{{ m['content'] }}", "")])
def test_content_is_a_string_where_the_template_reads_strings(source: str) -> None:
    text = rendered(source, SYSTEM, USER, ASSISTANT, ("user", ("why ", "<image>")))
    for part in ("system:", "be brief", "user:", "what", "assistant:", "cat", "why <\u200cimage>"):
        assert part in text
    assert "type" not in text


def test_only_the_system_turn_is_a_string_where_other_turns_are_lists() -> None:
    source = template(ORDERED, "<image>", system_string=True)
    text = rendered(source, SYSTEM, ("user", (IMAGE, "what")), ASSISTANT, USER)
    assert "[SYSTEM]be brief" in text and "user: <image>what" in text and "type" not in text


def test_a_continued_turn_is_a_string_as_well() -> None:
    assert chat(STRINGS).render([USER, ASSISTANT], prefilled=True).endswith("assistant:cat")

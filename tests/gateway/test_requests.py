from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from bottega.gateway.ports import TierCapabilities
from bottega.gateway.request.bill import expected_non_ascii_bytes
from bottega.gateway.request.jobs import BACKGROUND, augmented, bypass_reason, context_of, fitting
from bottega.openai_api.errors import ApiError
from bottega.openai_api.request import BodyLimits, ChatRequest, parse_request
from bottega.types import Candidate, Example, Query
from tests.builders import candidates, solid_image

URL = "data:image/png;base64,AAAA"
ASK = {"role": "user", "content": "Which digit?"}


def chat(*messages: dict[str, Any], **more: Any) -> ChatRequest:
    return parse_request({"model": "bottega", "messages": list(messages), **more})


def reason_of(request: ChatRequest) -> str | None:
    return bypass_reason(request, re.compile(BACKGROUND))


def seen(text: str, *urls: str, detail: str | None = None) -> dict[str, Any]:
    images = [
        {"type": "image_url", "image_url": {"url": url} | ({"detail": detail} if detail else {})}
        for url in urls
    ]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def test_question_is_the_last_user_turn_with_all_images() -> None:
    read = chat(
        {"role": "system", "content": "Be brief."},
        seen("First?", URL),
        {"role": "assistant", "content": "One."},
        seen("And these?", "data:b", "data:c"),
    )
    assert read.question == "And these?"
    assert [image.url for image in read.images] == [URL, "data:b", "data:c"]
    assert (read.instruction_count, read.is_single_turn) == (1, False)
    assert reason_of(read) is None


def test_image_url_may_be_a_string() -> None:
    read = chat(
        {"role": "user", "content": [{"type": "image_url", "image_url": URL}]},
    )
    assert [image.url for image in read.images] == [URL]
    assert reason_of(read) is None


@pytest.mark.parametrize(
    ("messages", "more", "reason"),
    [
        ([ASK], {"tools": [{"type": "function"}]}, "tools"),
        ([ASK], {"tools": []}, None),
        ([ASK], {"tool_choice": "none"}, None),
        ([ASK], {"function_call": "none", "tools": []}, None),
        ([ASK], {"tools": [{"type": "function"}], "tool_choice": "none"}, "tools"),
        ([ASK], {"tool_choice": "required"}, "tools"),
        ([{"role": "tool", "content": "4", "tool_call_id": "x"}], {}, "tools"),
        ([ASK], {"modalities": ["text", "audio"]}, "audio"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], {}, "audio"),
        ([{"role": "user", "content": [{"type": "file", "file": {}}]}], {}, "parts"),
        ([ASK, {"role": "assistant", "content": "It is"}], {}, "no question"),
        ([{"role": "system", "content": "Hello"}], {}, "no question"),
        ([{"role": "user", "content": "### Task:\nSuggest a title."}], {}, "background"),
        ([{"role": "user", "content": "My ### Task: is hard"}], {}, None),
        ([{"role": "user", "content": "  "}], {}, "empty question"),
        ([ASK, {"role": "system", "content": "x"}, ASK], {}, None),
    ],
)
def test_bypass_has_a_reason(
    messages: list[dict[str, Any]], more: dict[str, Any], reason: str | None
) -> None:
    assert reason_of(chat(*messages, **more)) == reason


def test_instructions_and_format_change_the_context() -> None:
    contexts = {
        context_of(chat(ASK)),
        context_of(chat({"role": "system", "content": "Be brief."}, ASK)),
        context_of(chat({"role": "system", "content": "Be a pirate."}, ASK)),
        context_of(chat(ASK, response_format={"type": "json_object"})),
    }
    assert len(contexts) == 4 and "" in contexts
    assert context_of(chat(ASK)) == context_of(chat(seen("Other?"), temperature=0))


def test_demonstrations_follow_the_instructions() -> None:
    read = chat({"role": "developer", "content": "Be brief."}, seen("Which?", URL, detail="low"))
    shown = [
        Candidate(Example(Query("Which?", (solid_image(3),)), "3", rationale="Two bows."), 0.9),
        Candidate(Example(Query("How many?"), "4"), 0.8),
    ]
    body = augmented(read, shown, lambda image: f"data:{image.sha256}")
    messages: Any = body["messages"]
    assert [one["role"] for one in messages] == [
        "developer", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert messages[1]["content"] == [
        {
            "type": "image_url",
            "image_url": {"url": f"data:{solid_image(3).sha256}", "detail": "low"},
        },
        {"type": "text", "text": "Which?"},
    ]
    assert messages[2]["content"] == "Two bows.\nAnswer: 3"
    assert messages[3] == {"role": "user", "content": "How many?"}
    assert messages[-1] == read.body["messages"][-1]  # type: ignore[index]
    assert augmented(read, [], lambda image: "") is read.body


def test_least_similar_demonstrations_are_left_out_first() -> None:
    read = chat(seen("Which?", URL))
    shown = candidates("a", "b", "c")[::-1]  # nearest last
    kept = fitting(shown, read, TierCapabilities(images=3))
    assert [one.example.answer for one in kept] == ["b", "a"]
    assert fitting(shown, read, TierCapabilities(images=1)) == []
    one = read.prompt_tokens + 1150
    assert [c.example.answer for c in fitting(shown, read, TierCapabilities(context=one))] == ["a"]


def test_capabilities_support_a_request() -> None:
    plain = TierCapabilities(images=0, tools=False, context=10)
    assert plain.support(chat(ASK))
    assert not TierCapabilities(images=1).support(chat(seen("Which?", URL, URL)))
    assert not TierCapabilities(tools=False).support(chat(ASK, tools=[{"type": "function"}]))
    assert not TierCapabilities().support(chat(ASK, modalities=["audio"]))
    assert not TierCapabilities(context=10).support(replace(chat(ASK), prompt_tokens=11))


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        ([ASK], {"tools": [{"type": "function", "function": {"description": "x" * 3500}}]}),
        ([ASK], {"response_format": {"type": "json_schema", "json_schema": {"d": "x" * 3500}}}),
        ([ASK, {"role": "assistant", "tool_calls": [{"function": {"arguments": "x" * 3500}}]}], {}),
        ([{"role": "user", "content": [{"type": "file", "file": {"file_data": "x" * 3500}}]}], {}),
        ([{"role": "user", "content": "?", "name": "x" * 3500}], {}),
        ([{"role": "assistant", "content": "", "refusal": "x" * 3500}, ASK], {}),
        ([{"role": "assistant", "content": "", "reasoning_content": "x" * 3500}, ASK], {}),
        ([{"role": "assistant", "content": [{"type": "text", "text": "", "x": "x" * 3500}]}], {}),
    ],
)
def test_tokens_outside_texts_count(messages: list[dict[str, Any]], more: dict[str, Any]) -> None:
    """A budget reserves their cost."""
    assert 1000 <= chat(*messages, **more).prompt_tokens < 1200


def test_text_in_other_parts_counts() -> None:
    part = {"type": "refusal", "refusal": "x" * 350_000}
    assert chat({"role": "assistant", "content": [part]}).prompt_tokens >= 100_000


def test_prediction_is_not_part_of_the_prompt() -> None:
    predicted = {"type": "content", "content": "x" * 3500}
    assert chat(ASK, prediction=predicted).prompt_tokens < 100


@pytest.mark.parametrize(
    ("messages", "more", "size"),
    [
        ([{"role": "user", "content": "na\u00efve \u732b"}], {}, 5),
        ([seen("\u732b"), ASK], {}, 3),
        ([ASK], {"tools": [{"type": "function", "function": {"description": "\u732b" * 9}}]}, 27),
        ([ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "\u732b"}}]}], {}, 3),
    ],
)
def test_bytes_outside_ascii_are_counted(
    messages: list[dict[str, Any]], more: dict[str, Any], size: int
) -> None:
    read = chat(*messages, **more)
    example = Candidate(Example(Query("\u732b?"), "\u732b"), 1.0)
    assert read.non_ascii_bytes == size
    assert expected_non_ascii_bytes(read, []) == size
    assert expected_non_ascii_bytes(read, [example]) == size + 6


@pytest.mark.parametrize(
    ("content", "limits", "expected"),
    [
        ("a", BodyLimits(messages=1), "more than 1 message."),
        ("ab", BodyLimits(text_characters=1), "more than 1 character of text."),
        (seen("", URL, URL)["content"], BodyLimits(images=1), "more than 1 image."),
        (seen("", *[URL] * 3)["content"], BodyLimits(images=2), "more than 2 images."),
    ],
)
def test_a_limit_of_one_is_in_the_singular(content: Any, limits: BodyLimits, expected: str) -> None:
    messages = [{"role": "user", "content": content}] * (1 if limits.messages > 1 else 2)
    with pytest.raises(ApiError) as refused:
        parse_request({"model": "bottega", "messages": messages}, limits)
    assert expected in str(refused.value)

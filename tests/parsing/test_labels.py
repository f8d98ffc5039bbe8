from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.parsing import LabelParser, last_answer, plain_text
from bottega.parsing.answers import normalize
from bottega.types import Completion, Query

CHOICES = ("cat", "Dog", "salt and pepper", "a, b", "Straße", "no_parking")
QUERY = Query("?", choices=CHOICES)
ONE, MANY = LabelParser(), LabelParser(multi_label=True)


@pytest.mark.parametrize(
    ("reply", "text", "rationale"),
    [
        ("digit three\nAnswer: three", "three", "digit three"),
        ("Answer: one\nbut wait\n**Answer:** two", "two", None),
        ("Answer: three", "three", None),
        ("A green disc.", "A green disc.", None),
        ("Answer: first\nand then more text", "Answer: first\nand then more text", None),
        ("Answer:", "Answer:", None),
        ("Answer: 7\n\nQuestion: What is 2 + 2?\nAnswer: 4", "7", None),
        ('{"answer": "seven"}', "seven", None),
        ('{"answer": "seven", "confidence": 0.5}', "seven", None),
        ("<answer>seven</answer>", "seven", None),
        ("A disc.<|im_end|>\n<|im_start|>user\nAnd this?", "A disc.", None),
        ("```python\nprint(1)\n```", "```python\nprint(1)\n```", None),
        ("Four questions.\n\nQuestion: 1 + 1?", "Four questions.\n\nQuestion: 1 + 1?", None),
    ],
)
def test_last_answer_reads_a_closing_line_only(
    reply: str, text: str, rationale: str | None
) -> None:
    answer = last_answer(Query("?"), Completion(reply))
    assert (answer.text, answer.rationale, answer.valid) == (text, rationale, True)


@pytest.mark.parametrize(
    ("reply", "label", "confidence"),
    [
        ("Answer Choice: cat\nConfidence Score: 0.9", "cat", 0.9),
        ("---BEGIN FORMAT TEMPLATE---\nAnswer Choice: Dog\nConfidence Score: 1\n---END", "Dog", 1),
        ("**Answer Choice:** [cat]\n**Confidence Score:** 85%", "cat", 0.85),
        ("Answer Choice: cat\nConfidence Score: 0", "cat", 0.0),
        ("Answer Choice: cat\nConfidence Score: 100%", "cat", 1.0),
        ("Answer Choice: cat\nConfidence Score: 1.5", "cat", None),
        ("Answer Choice: 'DOG'.\nConfidence Score: .5", "Dog", 0.5),
        ("answer: strasse", "Straße", None),
        ("Answer Choice: cat\nConfidence Score: very high", "cat", None),
        ("Answer Choice: cat\nConfidence Score: 7", "cat", None),
        ("Answer Choice: cat\n...\nAnswer Choice: dog", "Dog", None),
        ("<think>Answer Choice: cat</think>Answer Choice: dog", "Dog", None),
        ("  no parking ", "no_parking", None),
        ("so it is...\n</think>\n\ncat", "cat", None),
        ("Answer Choice: cat\nConfidence Score: -0.5", "cat", None),
        ("a, b", "a, b", None),
        ("a cat", "cat", None),
    ],
)
def test_replies_that_name_a_choice(reply: str, label: str, confidence: float | None) -> None:
    answer = ONE(QUERY, Completion(reply))
    assert (answer.valid, answer.labels, answer.confidence) == (True, (label,), confidence)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "   ",
        "caterpillar",
        "a catfish",
        "I cannot tell.",
        "cat, dog",
        "unknown",
        "Answer Choice: [Your Answer Choice Here]",
        "Answer Choice:",
        "<think>cat</think>",
        "<think>\nAnswer: dog\nor rather",
        '{"not": "cat"}',
        '{"excluded": "cat"}',
        '{"label": "cat", "negated": true}',
        "cat. Oops, I meant fox.",
        "cat\n\nScratch that: it is a fox.",
        "Answer: cat. Ignore that.",
        "cat (unlikely)",
    ],
)
def test_everything_else_is_invalid(reply: str) -> None:
    answer = ONE(QUERY, Completion(reply))
    assert not answer.valid
    assert answer.labels == ()


def test_choices_may_look_like_a_template_or_be_empty() -> None:
    assert ONE(Query("?", choices=("Answer: yes",)), Completion("Answer: yes")).valid
    marks = Query("?", choices=("?", "!"))
    assert ONE(marks, Completion("?")).labels == ("?",)
    assert not ONE(marks, Completion("...")).valid
    assert not ONE(marks, Completion("")).valid


TOPICS = Query("?", choices=("biology", "geography", "history of art", "B"))


@pytest.mark.parametrize(
    ("reply", "label"),
    [
        ("biology\n\nWhich of", "biology"),
        ("**Biology**\nWhich of these is it?", "biology"),
        ("- geography", "geography"),
        ("\u2022 geography\n", "geography"),
        ("> geography", "geography"),
        ("### History of art", "history of art"),
        ("- **geography**.", "geography"),
        ("**B**", "B"),
        ("- B\n\nbecause it has leaves", "B"),
        ("Answer: **biology**.", "biology"),
        ("**Answer:** - biology\n\nQuestion: what is", "biology"),
        ("  \n'biology'\n\n\n...", "biology"),
        ("biology\nbiology\nbiology", "biology"),
    ],
)
def test_a_label_on_its_own_line_is_read(reply: str, label: str) -> None:
    answer = ONE(TOPICS, Completion(reply))
    assert (answer.valid, answer.labels) == (True, (label,))


@pytest.mark.parametrize(
    "reply",
    [
        "biology\ngeography",
        "biology\n\n- geography",
        "- biology\n- geography",
        "biology\n\nno, rather history of art.",
        "It has leaves.\nbiology",
        "biology of plants\nbiology",
        "geography\n**B**",
    ],
)
def test_a_reply_that_may_mean_two_labels_is_refused(reply: str) -> None:
    assert not ONE(TOPICS, Completion(reply)).valid


@pytest.mark.parametrize("minus", ["-", "\u2013", "\u2212"])
@pytest.mark.parametrize("bullet", ["-", "\u2013", "\u2014"])
def test_any_dash_may_be_a_minus_sign(bullet: str, minus: str) -> None:
    numbers = Query("?", choices=(f"{minus}5", "5"))
    assert not ONE(numbers, Completion(f"{bullet} 5")).valid
    assert not ONE(numbers, Completion(f"{bullet} 5\n\nWhich of")).valid


def test_a_bullet_is_not_mistaken_for_a_sign() -> None:
    numbers = Query("?", choices=("5", "-5"))
    assert ONE(numbers, Completion("-5")).labels == ("-5",)
    assert not ONE(numbers, Completion("- 5")).valid
    assert ONE(Query("?", choices=("5", "6")), Completion("- 5")).labels == ("5",)


@given(st.sampled_from(CHOICES[:3]), st.sampled_from(["", "- ", "* ", "> ", "\u2022 ", "## "]))
def test_any_listed_label_followed_by_other_text_is_read(label: str, bullet: str) -> None:
    assert ONE(QUERY, Completion(f"{bullet}**{label}**\n\nWhich one")).labels == (label,)


@given(st.permutations(CHOICES[:3]), st.sampled_from(["\n", "\n\n", "\n- ", "\nor "]))
def test_two_labels_are_never_read_as_one(labels: list[str], between: str) -> None:
    assert not ONE(QUERY, Completion(between.join(labels[:2]))).valid


@pytest.mark.parametrize(
    ("reply", "choices", "label"),
    [
        ("The answer is dog.", ("cat", "dog"), "dog"),
        ("The correct answer is: **dog**\nIt barks.", ("cat", "dog"), "dog"),
        ("B. Because it barks.", ("A", "B"), "B"),
        ("The answer is B. It barks.", ("A", "B"), "B"),
        ("Answer: B. dog", ("A", "B"), "B"),
        ("Answer: B. dog", ("cat", "dog"), "dog"),
        ("Answer: (B) dog", ("cat", "dog"), "dog"),
        ("**B: dog**", ("cat", "dog"), "dog"),
        ("1. biology", TOPICS.choices, "biology"),
        ("2) geography", TOPICS.choices, "geography"),
        ("biology</s>", TOPICS.choices, "biology"),
        ("biology\n<|im_end|>\n<|endoftext|>", TOPICS.choices, "biology"),
        ("biology</s>", ("biology</s>", "biology"), "biology</s>"),
    ],
)
def test_a_label_with_its_letter_or_an_introduction_is_read(
    reply: str, choices: tuple[str, ...], label: str
) -> None:
    answer = ONE(Query("?", choices=choices), Completion(reply))
    assert (answer.valid, answer.labels) == (True, (label,))


@pytest.mark.parametrize(
    ("reply", "choices"),
    [
        ("The answer is dog, not cat.", ("cat", "dog")),
        ("The answer is dog.\nNo, wait.", ("cat", "dog")),
        ("The answer is not dog.", ("cat", "dog")),
        ("B. Because A has no legs.", ("A", "B")),
        ("B. That is wrong.", ("A", "B")),
        ("B) A", ("A", "B")),
        ("A. dog", ("cat", "dog")),
        ("C. dog", ("cat", "dog")),
        ("2. biology", TOPICS.choices),
        ("1. biology\n2. geography", TOPICS.choices),
        ("B. biology", TOPICS.choices),
        ("1. 5", ("5", "6")),
        ("5. 3", ("5", "6")),
        ("dog</s>cat", ("cat", "dog")),
    ],
)
def test_a_letter_that_may_mean_another_label_is_invalid(
    reply: str, choices: tuple[str, ...]
) -> None:
    assert not ONE(Query("?", choices=choices), Completion(reply)).valid


def test_choices_that_differ_in_case_are_distinguished_or_refused() -> None:
    query = Query("?", choices=("Polish", "polish"))
    assert ONE(query, Completion("polish")).labels == ("polish",)
    assert not ONE(query, Completion("POLISH")).valid


def test_confidence_falls_back_to_the_probability_of_the_tokens() -> None:
    assert ONE(QUERY, Completion("cat", logprob=math.log(0.25))).confidence == pytest.approx(0.25)
    stated = ONE(QUERY, Completion("Answer: cat\nConfidence: 0.4", logprob=-9.0))
    assert stated.confidence == 0.4


@pytest.mark.parametrize(
    ("reply", "labels"),
    [
        ("cat, Dog", ("cat", "Dog")),
        ("Answer Choice: ['cat', 'dog']", ("cat", "Dog")),
        ("cat; salt and pepper and a, b", ("cat", "salt and pepper", "a, b")),
        ("cat\ndog\ncat", ("cat", "Dog")),
        ("cat, and dog", ("cat", "Dog")),
        ("None.", ()),
        ("- cat\n- **dog**", ("cat", "Dog")),
    ],
)
def test_several_labels(reply: str, labels: tuple[str, ...]) -> None:
    answer = MANY(QUERY, Completion(reply))
    assert (answer.valid, answer.labels) == (True, labels)


@pytest.mark.parametrize("reply", ["cat, elephant", "cat or so", "", "cat and"])
def test_one_unknown_label_makes_the_list_invalid(reply: str) -> None:
    assert not MANY(QUERY, Completion(reply)).valid


@pytest.mark.parametrize(
    ("reply", "labels"),
    [
        ("Label: cat\nLabel: Dog", ("cat", "Dog")),
        ("**Label:** cat\nLabel: cat", ("cat",)),
        ("Type: mammal\nLabel: cat\nLabel: Dog", ("cat", "Dog")),
        ("Label: cat\nLabel: zebra", None),
        ("Label: cat\nLabel: Dog ❌", None),
        ("~~cat~~ Dog", ("Dog",)),
    ],
)
def test_several_lines_with_a_field_are_a_list(reply: str, labels: tuple[str, ...] | None) -> None:
    answer = MANY(QUERY, Completion(reply))
    assert (answer.labels if answer.valid else None) == labels


def test_a_cross_that_belongs_to_a_choice_is_read() -> None:
    assert ONE(Query("?", choices=("✗", "✓")), Completion("✗")).text == "✗"


def cpu_seconds(reply: str) -> float:
    """CPU time of this thread, which other processes do not change."""
    started = time.thread_time()
    MANY(QUERY, Completion(reply))
    ONE(QUERY, Completion(reply))
    return time.thread_time() - started


REPEATED = [
    ("", "*\n", 20_000),
    ("confidence", ":", 40_000),
    ("", "cat, ", 4000),
    ("", "{\n", 20_000),
    ("", "{a:[", 8000),
    ("", "<answer>", 8000),
    ("", "Human:\n", 8000),
    ("label", "*", 40_000),
    ("The answer is ", "the ", 8000),
]


@pytest.mark.parametrize(("begin", "repeated", "times"), REPEATED)
def test_repetitive_replies_take_linear_time(begin: str, repeated: str, times: int) -> None:
    counts = (times // 8, times)
    short, long = (min(cpu_seconds(begin + repeated * n) for _ in range(2)) for n in counts)
    assert long < 0.01 + 24 * short  # linear: 8 times, quadratic: 64 times


@pytest.mark.parametrize("reply", ["cat\n" * 9000, "- " * 18_000, "cat\n\n- x" + " cats" * 9000])
def test_a_long_reply_is_normalized_a_fixed_number_of_times(
    reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = 0

    def counted(text: str) -> str:
        nonlocal seen
        seen += len(text)
        return normalize(text)

    monkeypatch.setattr("bottega.parsing.answers.normalize", counted)
    monkeypatch.setattr("bottega.parsing.labels.normalize", counted)
    ONE(QUERY, Completion(reply))
    assert len(reply) <= seen <= 5 * len(reply)


def test_each_choice_is_normalized_a_fixed_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = 0

    def counted(text: str) -> str:
        nonlocal seen
        seen += 1
        return normalize(text)

    monkeypatch.setattr("bottega.parsing.answers.normalize", counted)
    monkeypatch.setattr("bottega.parsing.labels.normalize", counted)
    query = Query("?", choices=tuple(f"kind {number}" for number in range(200)))
    assert len(MANY(query, Completion("- kind 7, kind 8, " * 50 + "kind 9")).labels) == 3
    assert seen < 2000


def test_without_a_number_there_is_no_confidence() -> None:
    assert ONE(QUERY, Completion("cat", logprob=math.nan)).confidence is None


def test_a_horizontal_rule_is_not_a_rationale() -> None:
    reply = "It purrs.\n\n***\nAnswer: cat"
    assert ONE(QUERY, Completion(reply)).rationale == "It purrs."


def test_without_choices_any_text_is_an_answer() -> None:
    assert ONE(Query("?"), Completion("Answer: 'Mona Lisa'.")).text == "Mona Lisa"
    assert not ONE(Query("?"), Completion(" . ")).valid


@pytest.mark.parametrize(
    ("reply", "label", "rationale"),
    [
        ("add 3 4\nAnswer: 7", "7", "add 3 4"),
        ("add 3 4\n\nAnswer: 7.", "7", "add 3 4"),
        ("so\nAnswer: 1\nno,\nAnswer: 2", "2", "so"),
        ("7", "7", None),
        ("Answer: 7", "7", None),
        ("---BEGIN FORMAT TEMPLATE---\nAnswer Choice: 7\n---END", "7", None),
    ],
)
def test_text_before_the_answer_is_its_rationale(
    reply: str, label: str, rationale: str | None
) -> None:
    answer = ONE(Query("?"), Completion(reply))
    assert (answer.labels, answer.rationale) == ((label,), rationale)


def test_an_invalid_answer_keeps_its_rationale() -> None:
    answer = ONE(QUERY, Completion("it barks\nAnswer: wolf"))
    assert (answer.valid, answer.rationale) == (False, "it barks")


def test_plain_text_keeps_the_reply() -> None:
    assert plain_text(QUERY, Completion("<think>x</think> A cat. \n")).text == "A cat."
    assert not plain_text(QUERY, Completion("\n")).valid


@given(
    st.text(max_size=200) | st.sampled_from(["", "Answer: ?", "cat", "!", "none"]),
    st.lists(st.text(min_size=1, max_size=9), max_size=5),
    st.none() | st.floats(),
    st.booleans(),
)
def test_no_text_raises_and_labels_are_choices(
    reply: str, choices: list[str], logprob: float | None, multi_label: bool
) -> None:
    query = Query("?", choices=(*CHOICES, *choices))
    answer = LabelParser(multi_label=multi_label)(query, Completion(reply, logprob=logprob))
    assert set(answer.labels) <= set(query.choices)
    assert answer.confidence is None or 0 <= answer.confidence <= 1


@given(st.lists(st.sampled_from(CHOICES), min_size=1, unique=True))
def test_a_list_of_choices_is_read_back(labels: list[str]) -> None:
    assert MANY(QUERY, Completion("; ".join(labels))).labels == tuple(labels)

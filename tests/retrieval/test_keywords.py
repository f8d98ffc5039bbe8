from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import GenerationError, SettingError
from bottega.generation import ScriptedGenerator
from bottega.prompting import InterleavedPrompter
from bottega.retrieval import (
    DenseRetriever,
    GeneratedKeywordExtractor,
    KeywordRetriever,
    ResponseProbeRetriever,
    TfidfKeywordExtractor,
    keyword_query,
    stored_keywords,
    tag_keywords,
)
from bottega.retrieval.keywords import MAX_WORDS, read_keywords
from bottega.types import Candidate, Example, Query
from tests.builders import solid_image


@pytest.mark.parametrize(
    ("reply", "keywords"),
    [
        ("red disc, size, counting", ("red disc", "size", "counting")),
        ("Keywords: red, blue", ("red", "blue")),
        ("Here are the 10 most important keywords:\n1. red\n2. blue\n", ("red", "blue")),
        ("- red\n- blue\n* green", ("red", "blue", "green")),
        ('"red"; `blue` | **green**.', ("red", "blue", "green")),
        ("<think>well, colours</think>red, blue", ("red", "blue")),
        ("<think>well, colours", ()),
        ("Red, red, RED", ("Red",)),
        ("2024, 3 apples", ("2024", "3 apples")),
        ("I am sorry but I cannot find any keyword in there at all", ()),
        ("猫，犬、鳥", ("猫", "犬", "鳥")),
        ("", ()),
        (",,;\n\n", ()),
    ],
)
def test_lists_of_any_shape_are_read(reply: str, keywords: tuple[str, ...]) -> None:
    assert read_keywords(reply, 10) == keywords


@given(reply=st.text(), count=st.integers(1, 12))
def test_any_reply_gives_few_short_different_keywords(reply: str, count: int) -> None:
    keywords = read_keywords(reply, count)
    assert len(keywords) <= count
    assert len({keyword.casefold() for keyword in keywords}) == len(keywords)
    assert all(k and "," not in k and len(k.split()) <= MAX_WORDS for k in keywords)


async def test_the_prompt_contains_the_text_unchanged() -> None:
    model = ScriptedGenerator(["red, disc, round"])
    text = "Braces {count} {text} stay."
    assert await GeneratedKeywordExtractor(model, count=2)(text) == ("red", "disc")
    [part] = model.calls[0].prompt.messages[0].parts
    assert str(part).endswith(text)
    assert "the 2 most important" in str(part)
    assert model.calls[0].prompt.messages[0].role == "user"
    assert await GeneratedKeywordExtractor(model)(" ") == ()
    assert len(model.calls) == 1


async def test_terms_are_rare_in_the_corpus() -> None:
    corpus = ["the disc is red", "the disc is blue", "the disc is round"]
    terms = TfidfKeywordExtractor(corpus, count=3, longest=1)
    assert await terms("The zebra, the red disc") == ("zebra", "red", "disc")
    assert terms.of("") == terms.of("the of and") == ()
    assert set(TfidfKeywordExtractor(longest=1).of("How many are there above?")) == {
        "how",
        "many",
        "above",
    }
    assert TfidfKeywordExtractor().of("red disc red disc red")[0] == "red"
    assert TfidfKeywordExtractor(count=1, longest=1).of("red disc red") == ("red",)
    for count, longest in ((0, 1), (1, 0)):
        with pytest.raises(SettingError):
            TfidfKeywordExtractor(count=count, longest=longest)


async def test_a_model_generates_at_least_one_keyword() -> None:
    assert await GeneratedKeywordExtractor(ScriptedGenerator(["red, disc"]), count=1)(
        "a red disc"
    ) == ("red",)
    with pytest.raises(SettingError, match="count must be at least 1, got 0"):
        GeneratedKeywordExtractor(ScriptedGenerator([]), count=0)


def test_a_keyword_has_at_most_six_words() -> None:
    assert read_keywords("one two three four five six, a b c d e f g", 10) == (
        "one two three four five six",
    )


def test_terms_have_no_stop_words_and_at_most_longest_words() -> None:
    assert TfidfKeywordExtractor(longest=3).of("big red disc") == (
        *("big", "red", "disc", "big red", "red disc", "big red disc"),
    )
    assert TfidfKeywordExtractor().of("disc of glass") == ("disc", "glass")


async def test_keywords_outside_the_question_come_last() -> None:
    class Fixed:
        async def __call__(self, text: str, /) -> tuple[str, ...]:
            return ("round", "disc", "colour")

    search = RecordingRetriever()
    await KeywordRetriever(DenseRetriever(search), Fixed())(Query("Colour of the disc?"), 1)
    assert search.queries[0].text == "colour, disc, round"


@given(text=st.text())
def test_terms_of_any_text_do_not_fail(text: str) -> None:
    assert all(TfidfKeywordExtractor(count=4).of(text))


async def test_stored_keywords_are_read_again() -> None:
    def answer(prompt: object) -> str:
        text = str(prompt).partition("Text:")[2]
        return next((f"{word}, more" for word in ("vorbu", "why", "question") if word in text), "")

    plain = Example(Query("a question"), "vorbu", tags={"topic": "colour"})
    reasoned = Example(Query("a question"), "7", rationale="why so")
    passage = Example(Query("a question"), "")
    silent = Example(Query("?"), "5")
    tagged = Example(Query("q"), "vorbu", tags={"keywords": "old"})
    model = ScriptedGenerator(answer)
    done = await tag_keywords(
        [plain, reasoned, passage, silent, tagged], GeneratedKeywordExtractor(model)
    )
    assert [stored_keywords(example) for example in done] == [
        ("vorbu", "more"),
        ("why", "more"),
        ("question", "more"),
        (),
        ("old",),
    ]
    assert done[0].tags == {"topic": "colour", "keywords": "vorbu, more"}
    assert done[3:] == [silent, tagged]


async def test_a_failed_model_raises_a_single_error() -> None:
    failing = GeneratedKeywordExtractor(ScriptedGenerator([GenerationError("down"), "a"]))
    with pytest.raises(GenerationError):
        await tag_keywords([Example(Query("q"), "a"), Example(Query("q"), "b")], failing)


class RecordingRetriever:
    """Retriever that records its queries."""

    def __init__(self) -> None:
        self.queries: list[Query] = []

    def __call__(self, query: Query, k: int) -> list[Candidate]:
        self.queries.append(query)
        return []


async def test_the_question_is_replaced_by_its_keywords() -> None:
    search, whole = (
        RecordingRetriever(),
        Query("What is the colour of the disc?", (solid_image(1),), id="q"),
    )
    # "disc" is the rarest; the question's order stays.
    terms = TfidfKeywordExtractor(["What is the colour?", "What is the shape?"], longest=1)
    retrieve = KeywordRetriever(DenseRetriever(search), terms)
    await retrieve(whole, 3)
    await retrieve(Query("is it"), 3)
    cut, kept = search.queries
    assert (cut.text, cut.images, cut.id) == ("what, colour, disc", whole.images, "q")
    assert kept.text == "is it"


@pytest.mark.parametrize(
    ("keep", "answer", "text"),
    [(True, "vorbu", "What? vorbu"), (False, "vorbu", "vorbu"), (False, "the", "What?")],
)
async def test_a_probe_searches_by_the_apprentices_answer(
    keep: bool, answer: str, text: str
) -> None:
    search, model = RecordingRetriever(), ScriptedGenerator([answer])
    prompt = InterleavedPrompter(show_choices=False)
    probe = ResponseProbeRetriever(
        DenseRetriever(search), model, prompt, TfidfKeywordExtractor(), keep_question=keep
    )
    query = Query("What?", (solid_image(1),), id="q")
    await probe(query, 3)
    assert [(q.text, q.images, q.id) for q in search.queries] == [(text, query.images, "q")]
    assert model.calls[0].prompt == prompt(query, ())


def test_keyword_queries_replace_the_question() -> None:
    query = Query("What is it?", (solid_image(1),))
    tagged = Example(query, "a cat", tags={"keywords": "cat, whiskers"})
    assert stored_keywords(tagged) == ("cat", "whiskers")
    assert keyword_query(tagged) == Query("cat, whiskers", query.images)
    assert keyword_query(Example(query, "a cat", tags={"keywords": " , "})) == query
    assert keyword_query(Example(query, "a cat")) == query

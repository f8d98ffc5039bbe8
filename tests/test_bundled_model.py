"""Abilities in the model cards: copying labels of the most similar demonstration, reading
questions, rules and passages, and answering "unknown" otherwise."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from PIL import ImageDraw
from safetensors import safe_open

from bottega import (
    Image,
    InterleavedPrompter,
    LabelParser,
    Prompt,
    Query,
    Sampling,
    TransformersGenerator,
    bundled,
)
from bottega.bundled import bundled_folder
from bottega.errors import ModelLoadError
from bottega.prompting import ContinuationPrompter
from bottega.tasks.attributes import ATTRIBUTES, VALUES, render_scenes
from bottega.tasks.glyphs import NAMES, GlyphTask, render_named_glyphs
from bottega.tasks.glyphs import QUESTION as WHICH_CHARACTER
from bottega.tasks.rules import RULES, render_rows
from bottega.tasks.task import to_images
from bottega.types import Answer, Candidate, Completion, Example, Message

LABELS = ["zero", "Straße nach Süden", "犬", "a_much-longer label, with (punctuation) 12.5 %"]
PROMPT = InterleavedPrompter(show_choices=False)
BRIEF = InterleavedPrompter(show_choices=False, repeat_question=False)
MAX_BYTES = {"apprentice": (8_000_000, 4_000_000), "master": (24_000_000, 12_000_000)}
COLOUR, SHAPE = "What colour is it?", "Which shape do you see here?"
HOME = "What is its home?"
SYMBOL = "What does the symbol make of them?"


@pytest.fixture(scope="module")
def model() -> Iterator[TransformersGenerator]:
    generator = bundled()
    yield generator
    asyncio.run(generator.aclose())


@pytest.fixture(scope="module")
def master() -> Iterator[TransformersGenerator]:
    skip_if_absent("master")
    generator = bundled("master")
    yield generator
    asyncio.run(generator.aclose())


def skip_if_absent(name: str) -> None:
    try:
        bundled_folder(name)
    except ModelLoadError:
        pytest.skip(f"this checkout carries no {name}")


def drawing(kind: int) -> Image:
    """Draw one of four distinct figures."""
    image = Pillow.new("RGB", (64, 64), "black")
    pen = ImageDraw.Draw(image)
    if kind == 0:
        pen.ellipse((12, 12, 52, 52), outline="white", width=5)
    elif kind == 1:
        pen.line((32, 8, 32, 56), fill="white", width=5)
    elif kind == 2:
        pen.line([(10, 54), (32, 10), (54, 54), (10, 54)], fill="white", width=5)
    else:
        pen.line([(10, 10), (54, 10), (10, 54), (54, 54)], fill="white", width=5)
    return Image.from_pillow(image)


def question(kind: int, text: str = "What is in the image above?") -> Query:
    return Query(text, (drawing(kind),))


def demonstrations(text: str = "What is in the image above?") -> list[Candidate]:
    examples = [Example(question(kind, text), label) for kind, label in enumerate(LABELS)]
    return [Candidate(example, 0.0) for example in examples]


async def ask(model: TransformersGenerator, prompt: Prompt) -> str:
    return (await model.generate(prompt, Sampling(max_tokens=64))).completions[0].text


@pytest.mark.parametrize("kind", range(len(LABELS)))
async def test_the_label_of_the_same_character_is_copied(
    model: TransformersGenerator, kind: int
) -> None:
    assert await ask(model, PROMPT(question(kind), demonstrations())) == LABELS[kind]


async def test_the_order_of_the_demonstrations_does_not_matter(
    model: TransformersGenerator,
) -> None:
    backwards = demonstrations()[::-1]
    assert await ask(model, PROMPT(question(1), backwards)) == LABELS[1]


async def test_label_words_in_the_question_do_not_matter(
    model: TransformersGenerator,
) -> None:
    text = "Is it zero, zero or rather zero? Answer with zero unless it is not."
    assert await ask(model, PROMPT(question(2, text), demonstrations(text))) == LABELS[2]


async def test_no_demonstrations_means_unknown(model: TransformersGenerator) -> None:
    assert await ask(model, PROMPT(question(0), [])) == "unknown"


@pytest.mark.parametrize("name", MAX_BYTES)
def test_the_folder_stays_small(name: str) -> None:
    skip_if_absent(name)
    files, most = list(bundled_folder(name).iterdir()), MAX_BYTES[name]
    assert sum(file.stat().st_size for file in files) <= most[0]
    assert sum(map(parameters, (f for f in files if f.suffix == ".safetensors"))) <= most[1]


def parameters(file: Path) -> int:
    with safe_open(file, framework="pt") as stored:
        return sum(math.prod(stored.get_slice(name).get_shape()) for name in stored.keys())  # noqa: SIM118


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (COLOUR, "zimol"),
        (SHAPE, "tarkon"),
        ("Tell me the hue.", "zimol"),
        ("Look at the picture and name the outline of the things in it.", "tarkon"),
    ],
)
async def test_the_question_selects_the_attribute(
    model: TransformersGenerator, text: str, answer: str
) -> None:
    assert await ask(model, PROMPT(Query(text, (scene("disc", "blue"),)), WORDS)) == answer


@pytest.mark.parametrize("rule", RULES)
async def test_a_rule_is_inferred_from_three_rows(model: TransformersGenerator, rule: str) -> None:
    worked = RULES[rule]
    shown = [
        Example(Query(SYMBOL, (row(a, b),)), str(worked(a, b)), rationale=f"{rule} {a} {b}")
        for a, b in ((2, 3), (4, 1), (7, 5))
    ]
    reply = await ask(
        model, BRIEF(Query("Apply the sign to both sides.", (row(6, 8),)), some(shown))
    )
    answer = parsed(reply)
    assert (answer.rationale, answer.text) == (f"{rule} 6 8", str(worked(6, 8)))


@pytest.mark.parametrize("rule", RULES)
async def test_the_answer_follows_a_given_rationale(
    model: TransformersGenerator, rule: str
) -> None:
    """As the reward of self-consistency asks: the rule is the rationale's, the numbers are seen."""
    query = Query("Apply the sign to both sides.", (row(6, 8),))
    reply = await ask(model, ContinuationPrompter(BRIEF)(query, f"{rule} 6 8"))
    assert parsed(reply).text == str(RULES[rule](6, 8))


@pytest.mark.parametrize(("name", "home"), [("cedol", "merlok"), ("babra", "zapun")])
async def test_facts_are_read_from_passages(
    model: TransformersGenerator, name: str, home: str
) -> None:
    passages = [
        "The home of babra is zapun",
        "It was the food of cedol that people called plint",
        "In the end the dwelling of cedol was named merlok",
    ]
    passage_turns = some([Example(Query(text), "") for text in passages])
    assert await ask(model, PROMPT(Query(HOME, (glyph(name),)), passage_turns)) == home
    assert await ask(model, PROMPT(Query(HOME, (glyph(name),)), [])) == "unknown"


@pytest.mark.parametrize(
    "labels",
    [
        ("3", "12", "0", "7"),
        ("3 apples", "12 apples", "12 pears", "7 pears"),
        ("red fox", "red panda", "red kite", "the red squirrel"),
        ("unknown", "known", "add", "larger"),
        ("line one\nline two", "line one\nline three", "Привет", "Ünïcode"),
        ("https://a.com/x", "https://a.com/y", '{"label": 1}', "n01440764"),
        ("class 1", "class 2", "class 3", "class 4"),
        ("size: 3", "size: 12", "Label: 3", "Label: 4"),
        ("cat?", "dog?", "écrit", "Inuit"),
        ("colour blind", "food", "hue", "tool"),
        ("there is a crack", "there is no crack", "this is fine", "bad"),
    ],
    ids=lambda labels: labels[0],
)
async def test_labels_of_every_kind_are_copied(
    model: TransformersGenerator, labels: tuple[str, ...]
) -> None:
    shown = some([Example(question(i), label) for i, label in enumerate(labels)])
    prompts = [BRIEF(question(kind), shown) for kind in range(len(labels))]
    assert await asyncio.gather(*(ask(model, prompt) for prompt in prompts)) == list(labels)


@pytest.mark.parametrize(
    "text",
    [
        "Which animal is it?",
        "Bild?",
        "",
        "Is it 1 or 2 of them? Be careful.",
        "Which traffic sign is this?",
        "Which food is it?",
        "How many thanks?",
        "Of what colour, shape and kind?",
        "Is it a cat or a dog",
    ],
)
async def test_classes_are_distinguished_for_any_wording(
    model: TransformersGenerator, text: str
) -> None:
    labels = ["cat", "dog", "horse", "bird"]
    shown = some([Example(question(i, text), label) for i, label in enumerate(labels)])
    prompts = [BRIEF(question(kind, text), shown) for kind in range(4)]
    assert await asyncio.gather(*(ask(model, prompt) for prompt in prompts)) == labels


async def test_batched_and_single_prompts_give_equal_answers(
    model: TransformersGenerator,
) -> None:
    prompts = [
        PROMPT(question(0), []),
        PROMPT(question(3), demonstrations()),
        BRIEF(question(1), demonstrations()),
        PROMPT(Query(SHAPE, (scene("disc", "blue"),)), WORDS),
        PROMPT(
            Query(HOME, (glyph("babra"),)), some([Example(Query("home of babra is zapun"), "")])
        ),
    ]
    together = await asyncio.gather(*(ask(model, prompt) for prompt in prompts))
    assert together == [await ask(model, prompt) for prompt in prompts]
    assert len(set(together)) == len(prompts)


@pytest.mark.parametrize(
    "odd",
    [
        (Message("system", ("You name figures. It is easy.",)),),
        (Message("user", ("Hello.",)), Message("assistant", ("Hello to you.",))),
        (Message("user", (drawing(0), drawing(1), "Two?")), Message("assistant", ("two",))),
    ],
)
async def test_turns_before_demonstrations_are_ignored(
    model: TransformersGenerator, odd: tuple[Message, ...]
) -> None:
    usual = PROMPT(question(3), demonstrations()).messages
    assert await ask(model, Prompt((*odd, *usual))) == LABELS[3]


@pytest.mark.parametrize("parts", [("Hello?",), (drawing(1), drawing(0), "What are they?")])
async def test_unusual_questions_are_answered(
    model: TransformersGenerator, parts: tuple[str | Image, ...]
) -> None:
    usual = PROMPT(question(3), demonstrations()).messages[:-1]
    assert await ask(model, Prompt((*usual, Message("user", parts))))


@pytest.mark.parametrize(("text", "topic"), [(COLOUR, "colour"), (SHAPE, "shape")])
async def test_the_master_names_scene_attributes_with_reasons(
    master: TransformersGenerator, text: str, topic: str
) -> None:
    answer = parsed(await ask(master, PROMPT(Query(text, (scene("ring", "green"),)), [])))
    word = {"colour": "green", "shape": "ring"}[topic]
    assert (answer.text, answer.rationale) == (word, f"{topic} {word}")


@pytest.mark.parametrize(("text", "answer"), [(COLOUR, "zimol"), (SHAPE, "tarkon")])
async def test_the_master_uses_the_demonstrated_words(
    master: TransformersGenerator, text: str, answer: str
) -> None:
    assert await ask(master, PROMPT(Query(text, (scene("disc", "blue"),)), WORDS)) == answer


async def test_the_master_answers_unknown_outside_its_training(
    master: TransformersGenerator,
) -> None:
    queries = [
        Query(text, item.query.images)
        for item in GlyphTask(ways=4).generate(0).items[:4]
        for text in (WHICH_CHARACTER, "What colour is it?", "What shape is it?")
    ]
    answers = await asyncio.gather(*(ask(master, PROMPT(query, [])) for query in queries))
    assert answers == ["unknown"] * 12


def some(examples: Sequence[Example]) -> list[Candidate]:
    return [Candidate(example, 0.0) for example in examples]


def parsed(reply: str) -> Answer:
    return LabelParser()(Query(""), Completion(reply))


def scene(shape: str, colour: str) -> Image:
    """Return an image of two such figures in the southwest, on a dotted background."""
    words = {"shape": shape, "colour": colour, "texture": "dotted", "count": "two"}
    words["place"] = "southwest"
    values = [VALUES[attribute].index(words[attribute]) for attribute in ATTRIBUTES]
    return to_images(render_scenes(seeded(sum(values)), torch.tensor([values])))[0]


def row(left: int, right: int) -> Image:
    return to_images(render_rows(seeded(left), torch.tensor([[left, 0, right]])))[0]


def glyph(name: str) -> Image:
    return to_images(render_named_glyphs(seeded(3), torch.tensor([NAMES.index(name)])))[0]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Invented words: a disc is "tarkon" and a cross "gelum", red is "brufa" and blue "zimol".
WORDS = some(
    [
        Example(Query(COLOUR, (scene("disc", "red"),)), "brufa"),
        Example(Query(SHAPE, (scene("disc", "red"),)), "tarkon"),
        Example(Query(COLOUR, (scene("cross", "blue"),)), "zimol"),
        Example(Query(SHAPE, (scene("cross", "blue"),)), "gelum"),
    ]
)


async def test_two_models_can_load_concurrently() -> None:
    both = [bundled("apprentice"), bundled("master")]
    await asyncio.gather(*(one.load() for one in both))
    for one in both:
        assert one._loaded is not None
        parameters = dict(one._loaded.model.named_parameters())
        assert not any(value.is_meta for value in parameters.values())
        reply = await one.generate(Prompt((Message("user", ("What?",)),)), Sampling(max_tokens=4))
        assert reply.completions[0].text == "unknown"
        await one.aclose()


WORDINGS = ("", "Which class?", "What is in the image?", "What is in the image above?")
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "frog",
    "horse",
    "ship",
    "truck",
    "abbey",
)


def blurred(seed: int) -> Image:
    """Return an image of smooth random colours. Like photographs, such images are about equally
    similar."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.from_pillow(Pillow.fromarray(noise).resize((32, 32), Pillow.Resampling.BICUBIC))


@pytest.mark.slow
async def test_the_wording_of_a_common_question_does_not_matter(
    model: TransformersGenerator,
) -> None:
    async def answers(text: str) -> list[str]:
        shown = [
            Candidate(Example(Query(text, (blurred(seed),)), label), 0.0)
            for seed, label in enumerate(CLASSES)
        ]
        queries = [Query(text, (blurred(100 + seed),)) for seed in range(16)]
        return await asyncio.gather(*(ask(model, PROMPT(one, shown)) for one in queries))

    first, *others = [await answers(text) for text in WORDINGS]
    for other in others:
        assert sum(a == b for a, b in zip(first, other, strict=True)) >= 15

"""The words of the drawn tasks: paraphrased questions, statements of facts, invented words."""

import random

Topic = str

# Every question holds exactly one of its topic's words; everything else in it is padding.
ASKED_BY: dict[Topic, tuple[str, ...]] = {
    "shape": ("shape", "form", "outline"),
    "colour": ("colour", "hue", "tint"),
    "texture": ("texture", "pattern", "backdrop"),
    "count": ("count", "many", "quantity"),
    "place": ("place", "corner", "quarter"),
    "symbol": ("symbol", "sign", "operator"),
    "home": ("home", "house", "dwelling"),
    "food": ("food", "meal", "dish"),
    "friend": ("friend", "companion", "ally"),
    "tool": ("tool", "instrument", "device"),
    "fear": ("fear", "dread", "terror"),
    "owner": ("owner", "keeper", "guardian"),
}
TOPICS = tuple(ASKED_BY)
RELATIONS = TOPICS[6:]

QUESTIONS: dict[str, tuple[str, ...]] = {
    "many": ("How many are there?", "Say how many you can see.", "How many things is that?"),
    "symbol": ("What does the symbol make of them?", "Use the symbol. What comes out?"),
    "sign": ("What does this sign stand for here?", "Apply the sign to both sides."),
    "operator": ("Work out what the operator gives.", "What is the value after the operator?"),
}
USUAL_QUESTIONS = (
    "What {} is it?",
    "Which {} do you see here?",
    "Tell me the {}.",
    "Look at the picture and name the {} of the things in it.",
)
RELATION_QUESTIONS = ("What is its {}?", "Tell me the {} of this one.", "Which {} does it have?")
STATEMENTS = (
    "The {} of {} is {}",
    "It was the {} of {} that people called {}",
    "In the end the {} of {} was named {}",
)
STATES = ("is", "called", "named")  # the word right before what a statement states

ONSETS = (
    "b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z",
    "br", "dr", "gl", "kr", "pl", "st", "tr",
)  # fmt: skip
VOWELS = tuple("aeiou")
ENDS = tuple("bdfgklmnprstvx")


def question(rng: random.Random, topic: Topic) -> str:
    """One of the topic's paraphrases."""
    word = rng.choice(ASKED_BY[topic])
    usual = RELATION_QUESTIONS if topic in RELATIONS else USUAL_QUESTIONS
    return rng.choice(QUESTIONS.get(word, usual)).format(word)


def statement(rng: random.Random, relation: Topic, name: str, thing: str) -> str:
    return rng.choice(STATEMENTS).format(rng.choice(ASKED_BY[relation]), name, thing)


def invented_words(rng: random.Random, count: int) -> list[str]:
    """`count` different words of two or three syllables that mean nothing."""
    words: dict[str, None] = {}
    while len(words) < count:
        opening = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.choice((1, 1, 2)))]
        last = rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(ENDS)
        words["".join(opening) + last] = None
    return list(words)

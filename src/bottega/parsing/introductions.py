"""Sentences around a label: "Based on the image, the animal is a **dog**. It has long ears." """

from __future__ import annotations

import re
from collections.abc import Iterator

ADJECTIVES = (
    "final|correct|best|right|predicted|main|dominant|primary|overall|most likely|most appropriate"
)
CLASSES = (
    "answer|breed|category|class|classification|diagnosis|domain|emotion|genre|intent|label|language"
    "|mood|option|sentiment|subject|tone|topic|type"
)
THINGS = (
    "animal|article|character|color|colour|digit|headline|image|letter|message|number|object"
    "|passage|photo|photograph|picture|question|review|scene|sentence|shape|species|text|thing|word"
)
NOUN = rf"(?:(?:{ADJECTIVES})\s+)?(?:{CLASSES}|{THINGS}|choice|fit|match|prediction)"
PART = (
    r"(?:\s+(?:shown|depicted|expressed|(?:(?:shown|depicted|expressed)\s+)?(?:in|of|for|to|from)\s+"
    r"(?:the|this|that|your)\s+\w+))"
)
SUBJECT = rf"(?:(?:the|this|that|my|your|its)\s+{NOUN}{PART}{{0,2}}|it|this|that|there)"
VERB = (
    r"(?:['’]s(?:\s+written\s+in)?|\s+(?:is\s+about|is\s+(?:written\s+)?in|is\s+classified\s+as|is|would\s+be|should\s+be|appears\s+to\s+be"
    r"|seems\s+to\s+be|looks\s+like|shows|depicts|displays|contains|features|belongs\s+(?:to|in)"
    r"|falls\s+(?:under|into)|expresses|conveys|expects|asks\s+for))(?!\w)"
    r"(?:\s+(?:clearly|definitely|certainly|obviously))?"
)
SPEAKER = (
    r"(?:i|we)\s+(?:(?:can\s+)?see|think|believe|choose|predict|would\s+say"
    rf"|would\s+classify\s+(?:it|this|that|(?:the|this)\s+{NOUN})\s+as)(?:\s+that)?"
)
LEAD = (
    r"(?:(?:sure|okay|ok|certainly|of\s+course|absolutely|great|alright|well|so|thus|therefore"
    r"|hence|overall|finally)\b[,.!:]*|(?:based\s+on|looking\s+at|according\s+to|given|in)\s+[^,.\n]{1,80},)"
)
MEDIUM = r"(?:photo|photograph|image|picture)"
CLASS_OF = rf"(?:(?:the|an?)\s+(?:{CLASSES}|digit|number|letter|{MEDIUM}\s+of)\b)"
INTRODUCTION = re.compile(
    r"\s*(?:这张图片|答案|标签|类别|动物|这)(?:应该)?(?:是|为)\s*[:：]?\s*(?:一[只个匹条张])?"
    rf"|\s*(?:{LEAD}\s*){{0,2}}(?:{SPEAKER}\s*)?"
    rf"(?:here(?:['’]s|\s+is)\s+(?:the|my|your)\s+{NOUN}|{SUBJECT}{VERB})?"
    rf"\s*:?\s*(?:{CLASS_OF}\s*:?\s*)?",
    re.IGNORECASE,
)
ARTICLE = re.compile(r"\s*(?:an?|the)\s+", re.IGNORECASE)
CLASS_NAME = re.compile(rf"(?<!\s)\s+(?:{CLASSES})\W*\Z", re.IGNORECASE)
BOX = re.compile(r"\$?\\boxed\{(?:\\text(?:bf)?\{)?([^{}]*)\}{1,2}\$?")
EMPHASIS = re.compile(r"\*\*|`")
# Arrows, pictographs and emoji with their joiners; full stops of Chinese and Japanese.
DECORATION = re.compile("[\u2190-\u21ff\u2600-\u27bf\ufe0f\u200d\U0001f000-\U0001faff。！]+")
# Possible ends of a label. A full stop must follow a letter: "1. 5" may be 1.5.
BREAK = re.compile(
    r"(?<=[^\W\d])[.!;]\s+|(?<=\w)\s+[-–—]\s+|(?<=\w):\s+|(?<=\w)\s+(?=\()"
    r"|(?<=\w),?\s+(?=(?:because|since|due\s+to)\b)|(?<=\w),\s+(?=as\b)"
    rf"|(?<=\w)\s+(?=is\s+(?:shown\s+|visible\s+)?in\s+(?:the|this)\s+{MEDIUM}\b)"
)
SCENE = re.compile(
    r"(?<=\w)\s+(?=(?:in|on|at|with|near|under|sitting|standing|lying|running|walking|looking)\b)"
)
COMMA = re.compile(r",\s+")
MAX_BREAKS = 4
MAX_LENGTH = 300


def plain_line(line: str) -> str:
    """Return the line without emphasis, boxes and emoji."""
    return DECORATION.sub("", EMPHASIS.sub("", BOX.sub(r"\1", line))).strip()


def only_introduces(line: str) -> bool:
    """Return whether the line is an introduction without a label, as in "Here is the label:"."""
    line = plain_line(line)
    return len(line) <= MAX_LENGTH and INTRODUCTION.fullmatch(line) is not None


def possible_labels(line: str, *, is_yes_or_no: bool) -> Iterator[tuple[str, str]]:
    """Yield possible labels that the line introduces, each with the text after it.

    A comma ends a label only if the choices are yes and no: "Yes, there is".
    """
    line = plain_line(line)
    introduction = INTRODUCTION.match(line[:MAX_LENGTH])
    said = line[introduction.end() :] if introduction else line
    breaks = [match.span() for match in BREAK.finditer(said[:MAX_LENGTH])]
    # "The image shows a dog in a garden", but not a bare "dog in a garden".
    if introduction and introduction[0].strip() and (scene := SCENE.search(said[:MAX_LENGTH])):
        breaks.insert(0, scene.span())
    if is_yes_or_no and (comma := COMMA.search(said[:MAX_LENGTH])):
        breaks.insert(0, comma.span())
    for start, end in ((len(said), len(said)), *breaks[:MAX_BREAKS]):
        head, rest = said[:start], said[end:]
        yield head, rest
        if article := ARTICLE.match(head):
            yield head[article.end() :], rest
        if class_name := CLASS_NAME.search(head):
            bare = head[: class_name.start()]
            yield ARTICLE.sub("", bare, count=1), rest

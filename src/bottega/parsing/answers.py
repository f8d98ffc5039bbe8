"""Text of a reply without markup and dialogue, its parts, and parsers of free text."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

from bottega.types import Answer, Completion, Query

# Some chat templates write the opening tag, and the reply contains only the closing one.
THINKING = re.compile(r"\A.*</think>", re.DOTALL)
UNFINISHED = "<think>"
WORDS = re.compile(r"\w")
# Some servers return the tokens that end a reply as text.
END_MARKERS = (
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    " ",
    "\n",
)
NEXT_TURN = re.compile(
    r"<\|im_start\|>|<start_of_turn>|<\|start_header_id\|>|<\|user\|>|\[INST\]|<s>|<bos>"
    r"|<\|begin_of_text\|>"
)
ROLE = re.compile(
    r"\s*(?:<\|im_start\|>|<start_of_turn>|<\|start_header_id\|>)?(?:assistant|model|ai)"
    r"(?:<\|end_header_id\|>|[ \t]*:|[ \t]*(?=\n))\s*",
    re.IGNORECASE,
)
# Names of fields that begin the next example of a few-shot prompt.
FIELDS = (
    "article|context|customer|document|example|headline|human|image|input|instruction|message"
    "|passage|photo|premise|q|question|review|sentence|text|tweet|user"
)
FIELD = re.compile(rf"[#*\s]*(?:(?:{FIELDS})(?: ?\d{{1,3}})?[ *]*:|(?:human|user)\s*\Z)", re.I)
QUERY_FIELD = re.compile(r"^([A-Za-z][\w ]{0,20}):", re.MULTILINE)
MARKS = " \t\r\n\"'*#>`"
FENCE = re.compile(r"^[ \t]*```\w*[ \t]*$", re.MULTILINE)
TAGGED = re.compile(
    r"<(answer|label|choice|option|class|category|prediction)>([^<]*)(?:</\1>|\Z)", re.IGNORECASE
)
OBJECT = re.compile(r"^[ \t]*\{([^{}]*)(?:\}|\Z)", re.MULTILINE)
# A list, a text in quotes or the rest of the line. Repetitions are bounded: linear time.
PAIR = re.compile(
    r"[\"']?([\w ]{1,30})[\"']?\s{0,9}:\s{0,9}"
    r"(\[[^\]]{0,500}\]|\"[^\"\n]{0,2000}\"?|'[^'\n]{0,2000}'?|[^,\n]*)"
)
# Keys of a label that the model rules out.
DENIAL = re.compile(
    r"\s*(?:excluded?|incorrect|never|no|not|rejected|ruled out|wrong)(?: \w+)?\s*", re.IGNORECASE
)
NUMERIC = re.compile(r"\s*[\d.]*%?\s*")

# Only punctuation of the same line may precede these words: otherwise a reply of punctuation alone
# takes quadratic time.
STATED_ANSWER = re.compile(r"^[^\w\n]*answer(?: choice)?\W*:\s*(.*)$", re.IGNORECASE | re.MULTILINE)
STATED_CONFIDENCE = re.compile(
    r"^[^\w\n]*confidence(?: score)?[^\w:]*:[^\d\n-]*?(\d*\.?\d+)\s*(%?)",
    re.IGNORECASE | re.MULTILINE,
)
TEMPLATE_OPENS = re.compile(r"^[^\w\n]*BEGIN FORMAT TEMPLATE[^\w\n]*$", re.MULTILINE)
CONFIDENCE_LINE = re.compile(
    r"^[^\w\n]*confidence(?: score)?[^\w\n]*:.*$", re.IGNORECASE | re.MULTILINE
)
ANSWER_PHRASE = re.compile(r"\bthe (?:final |correct )?answer is\b:?\s*", re.IGNORECASE)
DASHES = str.maketrans(dict.fromkeys("‐‑‒–—―−", "-"))
POINT = re.compile(r"(?<![\w.])\.(?=\d)")  # the decimal point of ".5"
QUOTES = "\"'`*_[]().,;:!?“”‘’«» \t\n"


def strip_thinking(reply: str) -> str:
    """Return the reply without its thinking, or an empty text if the thinking was cut off."""
    text = THINKING.sub("", reply)
    return "" if UNFINISHED in text else text.strip()


def strip_end_markers(reply: str) -> str:
    """Return the reply without spaces and the tokens that end a reply."""
    end = len(reply)
    while marker := next((one for one in END_MARKERS if reply.endswith(one, 0, end)), None):
        end -= len(marker)
    return reply[:end]


def first_turn(reply: str) -> str:
    """Return the reply without its role name, further turns of a chat template and end markers."""
    if role := ROLE.match(reply):
        reply = reply[role.end() :]
    turns = (one.start() for one in NEXT_TURN.finditer(reply))
    end = next((start for start in turns if WORDS.search(reply, 0, start)), len(reply))
    return strip_end_markers(reply[:end])


def unwrap(reply: str) -> str:
    """Return the first turn without fences. An object `{"answer": "dog"}` becomes lines
    `answer: dog`, as does `<answer>dog</answer>` or `<label>dog</label>`."""
    text = FENCE.sub("", first_turn(reply)).strip()
    return OBJECT.sub(_lines, _untagged(text)).strip()


def _untagged(text: str) -> str:
    """Return the text with one line `answer: ...` in place of all tagged answers."""
    tagged = list(TAGGED.finditer(text))
    if not tagged:
        return text
    answers = ", ".join(dict.fromkeys(one[2].strip() for one in tagged))
    return f"{text[: tagged[0].start()]}\nanswer: {answers}\n{text[tagged[-1].end() :]}"


def _lines(found: re.Match[str]) -> str:
    """Return the pairs of an object as lines. A single value becomes the answer; an object without
    pairs is returned unchanged."""
    pairs = PAIR.findall(found[1])
    names_answer = len(pairs) == 1 and not DENIAL.fullmatch(pairs[0][0])
    if names_answer and not NUMERIC.fullmatch(_value(pairs[0][1])):
        return f"answer: {_value(pairs[0][1])}"
    lines = (f"{key.strip()}: {_value(value)}" for key, value in pairs)
    return "\n".join(lines) if pairs else found[0]


def _value(text: str) -> str:
    bare = text.strip().strip("\"'")
    return "" if bare == "null" else bare


def cut_dialogue(reply: str, query: Query) -> str:
    """Return the reply up to the line that begins the next turn of a dialogue or few-shot prompt.

    Such a line begins with a field ("Question:", "Human:", "Review 2:"), with a field of the query,
    or with the query's text. A base model writes it after its answer. Such lines at the beginning
    of a reply repeat the query and do not end it.
    """
    end, has_content = 0, False
    own, choices = _query_starts(query), {choice.lower() for choice in query.choices}
    for line in reply.splitlines(keepends=True):
        bare = line.strip(MARKS).lower()
        if bare not in choices and (FIELD.match(line) or bare.startswith(own)):
            if has_content:
                return reply[:end].strip()
        elif WORDS.search(line):
            has_content = True
        end += len(line)
    return reply


def _query_starts(query: Query) -> tuple[str, ...]:
    """Return the beginnings, in lower case, of lines that repeat the query or one of its fields."""

    def starts() -> Iterator[str]:
        first = query.text.strip().partition("\n")[0].lower()
        if len(first.split()) > 1:
            yield first
        yield from (f"{field}:".lower() for field in QUERY_FIELD.findall(query.text))

    return tuple(starts())


def find_stated_answers(reply: str) -> list[re.Match[str]]:
    """Return the lines `Answer: ...`. The last one counts: a model may repeat the template
    first."""
    return list(STATED_ANSWER.finditer(reply))


def rationale_before(reply: str, stated: Sequence[re.Match[str]]) -> str | None:
    """Return the text before the first stated answer, which is the rationale."""
    if not stated:
        return None
    lines = TEMPLATE_OPENS.sub("", reply[: stated[0].start()]).split("\n")
    while lines and not WORDS.search(lines[-1]):  # a horizontal rule above the answer
        lines.pop()
    return "\n".join(lines).strip() or None


def drop_confidence(reply: str) -> str:
    """Return the reply without its confidence line."""
    return CONFIDENCE_LINE.sub("", reply).strip()


def read_confidence(reply: str, completion: Completion) -> float | None:
    """Return the confidence stated in the reply, or else the probability of its tokens."""
    stated = STATED_CONFIDENCE.findall(reply)
    if stated:
        number, percent = stated[-1]
        value = float(number) / (100 if percent else 1)
        if 0 <= value <= 1:
            return value
    if completion.logprob is None or math.isnan(completion.logprob):
        return None
    return math.exp(min(0.0, completion.logprob))


class ChoiceIndex:
    """Index of choices by their normalized text, for repeated look-ups."""

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = choices
        self.texts = [normalize(choice) for choice in choices]
        counts = Counter(self.texts)
        pairs = zip(self.texts, choices, strict=True)
        self._by_text = {text: choice for text, choice in pairs if text and counts[text] == 1}
        self._exact = frozenset(choices)
        self._signed = frozenset(map(_signed, self.texts))

    def find(self, text: str) -> str | None:
        """Return the choice that equals the text up to case, outer punctuation and spacing. Return
        None if there is no such choice, or more than one."""
        return text if text in self._exact else self._by_text.get(normalize(text))

    def has_signed(self, text: str) -> bool:
        """Return whether a choice equals the text if all dashes are equal and spaces ignored."""
        return _signed(normalize(text)) in self._signed


@lru_cache(64)
def choice_index(choices: tuple[str, ...]) -> ChoiceIndex:
    """Return the index of choices; those of a task are the same for all of its replies."""
    return ChoiceIndex(choices)


def _signed(text: str) -> str:
    return "".join(text.translate(DASHES).split())


def find_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that equals the text, as `ChoiceIndex.find` does."""
    return text if text in choices else ChoiceIndex(choices).find(text)


def normalize(text: str) -> str:
    """Return the text without case, outer punctuation and repeated spaces, in NFKC form."""
    folded = unicodedata.normalize("NFKC", text).casefold().replace("_", " ")
    if "." in folded:
        folded = POINT.sub("0.", folded)
    return " ".join(folded.strip(QUOTES).split())


def plain_text(query: Query, completion: Completion, /) -> Answer:
    """Return the reply without its thinking; an empty reply is invalid."""
    text = strip_thinking(completion.text)
    return Answer(text, valid=bool(text))


def last_answer(query: Query, completion: Completion, /) -> Answer:
    """Return the closing line `Answer: ...` with the text above it as rationale, or else the whole
    reply without its thinking. An empty reply is invalid.

    `{"answer": ...}` counts as such a line. Dialogue after it is ignored.
    """
    whole = first_turn(strip_thinking(completion.text))
    reply = cut_dialogue(unwrap(whole), query)
    stated = find_stated_answers(reply)
    closes = stated and not WORDS.search(drop_confidence(reply[stated[-1].end() :]))
    text = stated[-1][1].strip("*_` \t") if closes else ""
    if not text:
        return Answer(whole, valid=bool(whole))
    return Answer(text, rationale=rationale_before(reply, stated))

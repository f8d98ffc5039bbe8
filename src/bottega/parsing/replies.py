"""Removal of markup around an answer and of dialogue that continues after it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bottega.types import Query

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

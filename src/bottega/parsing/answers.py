"""Parts of a reply, and the parsers of labels and final answers."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase

from bottega.parsing.formulas import values_differ
from bottega.types import Answer, Completion, Query

# Some chat templates write the opening tag, and the reply contains only the closing one.
THINKING = re.compile(r"\A.*</think>", re.DOTALL)
UNFINISHED = "<think>"
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
WORDS = re.compile(r"\w")
DASHES = str.maketrans(dict.fromkeys("‐‑‒–—―−", "-"))
POINT = re.compile(r"(?<![\w.])\.(?=\d)")  # the decimal point of ".5"
QUOTES = "\"'`*_[]().,;:!?“”‘’«» \t\n"


def strip_thinking(reply: str) -> str:
    """Return the reply without its thinking, or an empty text if the thinking was cut off."""
    text = THINKING.sub("", reply)
    return "" if UNFINISHED in text else text.strip()


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


# A character outside ASCII is a token of its own: Chinese, Japanese and Thai have no spaces.
WORD = re.compile(r"[a-z]+|[0-9]+|[^\W_]")
TOKEN = re.compile(rf"{WORD.pattern}|[^\s\w]")
ARTICLE = re.compile(r"\ba(?=[ \t]+[a-z])")
# With an "s", shorter words become other words: "as", "is", "its".
LAST_WORD = re.compile(r" [a-z]{3,} \Z")
# After a label, these words may retract it. The "t" is from "isn't".
DOUBTS = re.compile(
    " (?:actually|but|cannot|correction|false|however|incorrect|instead|mistake|mistaken|never|no"
    "|nor|not|rather|sorry|t|wait|wrong|不|错|錯) "
)


def contradicts(text: str, labels: Sequence[str], index: ChoiceIndex) -> bool:
    """Return whether the text contains a word of doubt, or a choice that is not one of the labels,
    in the singular or plural. The comparison runs with and without punctuation: the first
    distinguishes "C" from "C++", the second finds "salt-and-pepper"."""
    folded = normalize(text)
    if not folded:
        return False
    for pattern in (TOKEN, WORD):
        own = [_tokens(normalize(label), pattern) for label in labels]
        choices = zip(index.choices, (_tokens(one, pattern) for one in index.texts), strict=True)
        others = [(choice, other) for choice, other in choices if other and other not in own]
        named = {other for _, other in others}
        owned = [form for one in own if one for form in _forms(one) if form not in named]
        said = rest = _tokens(folded, pattern)
        for form in sorted(owned, key=len, reverse=True):
            rest = rest.replace(form, "\n")
        if DOUBTS.search(rest):
            return True
        for choice, other in others:
            if other == " a " and not choice.islower():
                if other in _tokens(normalize(ARTICLE.sub("", text)), pattern):
                    return True
                continue
            # "hot dog" contains "dog", so only a "dog" outside it counts.
            for form in _forms(other):
                if form in (rest if any(form in one for one in owned) else said):
                    return True
    return False


def _tokens(text: str, pattern: re.Pattern[str]) -> str:
    """Return each token between two spaces; adjacent matches then never overlap."""
    return "".join(f" {token} " for token in pattern.findall(text))


def _forms(tokens: str) -> tuple[str, ...]:
    """Return the tokens, also in the plural if the last one is a word."""
    if not LAST_WORD.search(tokens):
        return (tokens,)
    return tokens, f"{tokens[:-1]}s ", f"{tokens[:-1]}es "


SEPARATORS = re.compile(r"([,;|\n]+(?: and )?| and )")
NO_LABEL = "none"
# Markdown at the start of a line. The blank after it distinguishes a bullet from a minus sign.
BULLET = re.compile(r"\A[\s*_]*(?:[-–—•·▪◦>]|#{1,6})\s+")
# The letter or the number of a choice, as in "(B) dog", "**B:** dog" and "2. dog".
ENUMERATOR = re.compile(r"\A[\s*_(\[]*([a-zA-Z]|[0-9]{1,3})[*_]*[.):\]]{1,2}[\s*_]+")
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


def plain_text(query: Query, completion: Completion, /) -> Answer:
    """Return the reply without its thinking; an empty reply is invalid."""
    text = strip_thinking(completion.text)
    return Answer(text, valid=bool(text))


def last_answer(query: Query, completion: Completion, /) -> Answer:
    """Return the closing line `Answer: ...` with the text above it as rationale, or else the whole
    reply without its thinking. An empty reply is invalid."""
    whole = plain_text(query, completion)
    stated = find_stated_answers(whole.text)
    if not stated or WORDS.search(whole.text[stated[-1].end() :]):
        return whole
    text, rationale = stated[-1][1].strip("*_` \t"), rationale_before(whole.text, stated)
    return Answer(text, rationale=rationale) if text else whole


class LabelParser:
    """Parser of `Answer Choice: ...` and `Confidence Score: ...`, or else of the whole reply.

    The last of each line counts, because a model may repeat the template before it answers.

    The label must equal one of the query's choices up to case, outer punctuation and spacing, with
    or without a bullet before it. It may be the whole first line of a longer reply ("biology" above
    "Which of"), follow "the answer is" or its own letter or number ("B. dog" if dog is the second
    choice), or be a letter before other text ("B. Because"). Text after the label must not name
    another choice or express doubt. With no choices, any text is an answer. The text before the
    first answer is the rationale. With `multi_label` the reply may list several choices separated
    by commas, or say "none". Everything else is `Answer(valid=False)`.
    """

    def __init__(self, *, multi_label: bool = False) -> None:
        self.multi_label = multi_label

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        reply = strip_thinking(completion.text)
        whole = reply in query.choices
        reply = reply if whole else _without_end_markers(reply)
        stated = [] if whole else find_stated_answers(reply)
        text = (stated[-1][1] if stated else reply).strip()
        later = drop_confidence(reply[stated[-1].end() :]) if stated else ""
        rationale = rationale_before(reply, stated)
        labels = self._labels(text, later, query.choices)
        if labels is None:
            return Answer(text, valid=False, rationale=rationale)
        shown = ", ".join(labels) or NO_LABEL
        sure = read_confidence(reply, completion)
        return Answer(shown, labels=labels, confidence=sure, rationale=rationale)

    def _labels(self, text: str, later: str, choices: Sequence[str]) -> tuple[str, ...] | None:
        """Return the labels in the text, unless `later` text may contradict them."""
        if not choices:
            bare = text.strip(QUOTES)
            return (bare,) if bare else None
        index = ChoiceIndex(choices)
        one = _listed(text, index)
        if one is None and not self.multi_label:
            one = _first_line(text, index)
        labels: tuple[str, ...] | None = None if one is None else (one,)
        if labels is None and self.multi_label:
            labels = () if normalize(text) == NO_LABEL else _split(text, index)
        return None if labels is None or contradicts(later, labels, index) else labels


def _without_end_markers(reply: str) -> str:
    end = len(reply)
    while marker := next((one for one in END_MARKERS if reply.endswith(one, 0, end)), None):
        end -= len(marker)
    return reply[:end]


def _listed(text: str, index: ChoiceIndex) -> str | None:
    """Return the choice that equals the text, with or without a bullet. Return None for "- 5" if
    "-5" is a choice, with any dash in either."""
    label = index.find(text)
    bullet = BULLET.match(text)
    if label is not None or bullet is None:
        return label
    return None if index.has_signed(text) else index.find(text[bullet.end() :])


def _first_line(text: str, index: ChoiceIndex) -> str | None:
    """Return the choice that the first line states, unless later text may contradict it."""
    lines = [line for line in text.splitlines() if WORDS.search(line)]
    if not lines:
        return None
    label, rest = _introduced(lines[0], index)
    if label is None or contradicts("\n".join((rest, *lines[1:])), (label,), index):
        return None
    return label


def _introduced(line: str, index: ChoiceIndex) -> tuple[str | None, str]:
    """Return the choice that is the line, less "the answer is" and an enumerator; or the choice
    that is the enumerator's letter, and the text after it."""
    bare = line.lstrip(QUOTES)
    phrase = ANSWER_PHRASE.match(bare)
    said = bare[phrase.end() :] if phrase else line
    label = _listed(said, index)
    enumerator = ENUMERATOR.match(said)
    if label is not None or enumerator is None:
        return label, ""
    mark, rest = enumerator[1], said[enumerator.end() :]
    named = index.find(mark)
    if named is not None:
        return (named, rest) if mark.isalpha() else (None, "")
    if mark.isdigit() and rest[:1].isdigit():  # "1. 5" may be 1.5
        return None, ""
    label = index.find(rest)
    position = int(mark) - 1 if mark.isdigit() else ascii_lowercase.index(mark.lower())
    return (label if label in index.choices[position : position + 1] else None), ""


def _split(text: str, index: ChoiceIndex) -> tuple[str, ...] | None:
    """Return the labels of a list, or None if any part belongs to no choice.

    A label may contain a separator, so the longest run of parts that is a choice wins.
    """
    parts = SEPARATORS.split(text)  # captured separators are at the odd indices
    # An upper bound: each separator is at least one character of a choice.
    max_length = 2 * max(map(len, index.texts)) + 1
    found: list[str] = []
    start = 0
    while start < len(parts):
        for end in range(min(len(parts), start + max_length), start, -2):
            label = _listed("".join(parts[start:end]), index)
            if label is not None:
                found.append(label)
                start = end + 1
                break
        else:
            return None
    return tuple(dict.fromkeys(found))


BOXED = re.compile(r"\\?boxed\s*\{")
PHRASE = re.compile(r"\banswer(?:\W{0,3}:| (?:is|should be)\b:?)", re.IGNORECASE)
SENTENCE_ENDS = re.compile(r"\.\s|\n|\Z")
ONLY_A_LETTER = re.compile(r"\W*(?:\\text(?:bf)?\{\W*)?([A-Za-z])\W*")
LETTER_FIRST = re.compile(r"\(([A-Z])\)|([A-Z])[.):]\s|([A-Z])\n")
LETTER_LAST = re.compile(r"\s\(?([A-Z])\)?\.?\Z")
AROUND = " \t\n*:$"


class FinalAnswerParser:
    r"""Parser of the final answer of a worked solution; options may be formulas.

    The answer is the last `\boxed{...}` of the reply, else the line `Answer: ...`, else the text
    after "the answer is" up to the end of the sentence, else the whole reply. For a query with
    choices a letter means its option; so does the first or last letter of a reply without a stated
    answer. A letter before another value than its option's does not count: "(B) 10 pi" is not the
    option 2 pi. Other answers stay unchanged: 0.5 may equal the option \frac{1}{2}, which a metric
    checks.
    """

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        reply = strip_thinking(completion.text)
        stated = find_stated_answers(reply)
        rationale, sure = rationale_before(reply, stated), read_confidence(reply, completion)
        reply = drop_confidence(reply)
        line = stated[-1][1] if stated else None
        candidates = (_boxed(reply), line, _after_phrase(reply))
        found = next((one for one in candidates if one is not None), None)
        said = (reply if found is None else found).strip(AROUND).removesuffix(".").strip(AROUND)
        if not said:
            return Answer("", valid=False, rationale=rationale)
        letter = _letter(said, query.choices)
        if letter is None and found is None and (last := LETTER_LAST.search(reply)):
            letter = last[1]
        said = _option(letter, said, query.choices)
        return Answer(said, labels=(said,), confidence=sure, rationale=rationale)


def _boxed(reply: str) -> str | None:
    """Return the content of the last box, up to its closing brace."""
    opened = list(BOXED.finditer(reply))
    if not opened:
        return None
    start, depth = opened[-1].end(), 1
    for at in range(start, len(reply)):
        depth += {"{": 1, "}": -1}.get(reply[at], 0)
        if depth == 0:
            return reply[start:at]
    return reply[start:]


def _after_phrase(reply: str) -> str | None:
    phrases = list(PHRASE.finditer(reply))
    if not phrases:
        return None
    rest = reply[phrases[-1].end() :].strip(AROUND)
    end = SENTENCE_ENDS.search(rest)
    return rest[: end.start()] if end else rest


def _letter(said: str, choices: Sequence[str]) -> str | None:
    """Return the letter of an option, unless a value follows that is not the option's."""
    match = ONLY_A_LETTER.fullmatch(said) or LETTER_FIRST.match(said)
    if match is None:
        return None
    letter = next(filter(None, match.groups()), "").upper()
    rest = SENTENCE_ENDS.split(said[match.end() :], maxsplit=1)[0]
    option = dict(zip(ascii_uppercase, choices, strict=False)).get(letter, "")
    same_line = not match[0].endswith("\n")
    return None if same_line and values_differ(rest, option) else letter


def _option(letter: str | None, said: str, choices: Sequence[str]) -> str:
    """Return the option with this letter or text, or else the text unchanged."""
    options = dict(zip(ascii_uppercase, choices, strict=False))
    if letter in options:
        return options[letter]
    bare = [choice.strip(AROUND) for choice in choices]
    named = find_choice(said, bare)
    return said if named is None else choices[bare.index(named)]

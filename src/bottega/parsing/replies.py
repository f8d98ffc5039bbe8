"""Parts of a reply (thinking, rationale, confidence, choices) and votes over samples."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from bottega.protocols import Parser
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


# The number of asterisks is bounded: otherwise a reply of asterisks alone takes quadratic time.
THOUGHT = re.compile(r"\*{0,2}THOUGHT PROCESS\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
FINAL = re.compile(r"\*{0,2}FINAL ANSWER\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
BECAUSE = re.compile(r"\*{0,2}BECAUSE\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
SENTENCE_ENDS = re.compile(r"\.\s|\n")
FENCE = re.compile(r"^[ \t]*```\w*[ \t]*$", re.MULTILINE)


class RationaleParser:
    """Parser of the reply formats of RCTS: `The answer is X. BECAUSE: ...`.

    `THOUGHT PROCESS: ...` and `FINAL ANSWER:` may precede the answer. `parse` reads the answer; the
    text before and after it is the rationale. The last of several final answers counts. A reply
    without these marks goes to `parse` unchanged.
    """

    def __init__(self, parse: Parser) -> None:
        self._parse = parse

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        reply = FENCE.sub("", strip_thinking(completion.text)).strip()
        thought, said, reason = _parts(reply)
        if said == reply:
            return self._parse(query, replace(completion, text=reply))
        answer = self._parse(query, replace(completion, text=said))
        first = SENTENCE_ENDS.split(said, maxsplit=1)[0]
        if not answer.valid and first != said:
            answer = self._parse(query, replace(completion, text=first))
        why = "\n".join(part for part in (thought, reason) if WORDS.search(part))
        return replace(answer, rationale=why or answer.rationale)


def _parts(reply: str) -> tuple[str, str, str]:
    """Split a reply into thoughts, answer and reasons."""
    final = next(reversed(list(FINAL.finditer(reply))), None)
    thought, said = (reply[: final.start()], reply[final.end() :]) if final else ("", reply)
    said, reason = _cut(said)
    phrases = list(ANSWER_PHRASE.finditer(said))
    if phrases and (final or reason or THOUGHT.search(said)):
        thought += said[: phrases[-1].start()]
        said = said[phrases[-1].end() :]
    return THOUGHT.sub("", thought).strip(), said.strip(), reason.strip()


def _cut(said: str) -> tuple[str, str]:
    """Split at the first reason that has text before it."""
    for mark in BECAUSE.finditer(said):
        if WORDS.search(said[: mark.start()]):
            return said[: mark.start()], said[mark.end() :]
    return said, ""


def most_frequent(answers: Sequence[Answer]) -> Answer:
    """Return the most frequent answer (self-consistency); its confidence is its share of samples.

    The first answer wins a tie. Invalid samples count only if there are no valid ones.
    """
    valid = [answer for answer in answers if answer.valid]
    if not valid:
        return answers[0]
    votes = Counter(_vote(answer) for answer in valid)
    vote, count = votes.most_common(1)[0]
    chosen = next(answer for answer in valid if _vote(answer) == vote)
    return replace(chosen, confidence=count / len(answers))


def most_confident(answers: Sequence[Answer]) -> Answer:
    """Return the answer with the highest confidence (best of n); the first one without any."""
    return max(answers, key=lambda answer: (answer.valid, answer.confidence or 0.0))


def _vote(answer: Answer) -> tuple[str, ...]:
    """Return the labels, or the text without case and repeated spaces."""
    return answer.labels or (" ".join(answer.text.casefold().split()),)

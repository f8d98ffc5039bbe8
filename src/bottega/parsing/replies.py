"""Parts of a reply: text after thinking, rationale, confidence; votes over samples."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from bottega.protocols import Parser
from bottega.types import Answer, Completion, Query

# Some templates write the opening tag themselves, so that a reply only closes it.
THINKING = re.compile(r"\A.*</think>", re.DOTALL)
UNFINISHED = "<think>"
# Before these words only marks of their own line may stand: a reply of marks alone would be read to
# its end from each of its lines.
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
POINT = re.compile(r"(?<![\w.])\.(?=\d)")  # that of ".5", which is no punctuation
QUOTES = "\"'`*_[]().,;:!?“”‘’«» \t\n"


def spoken(reply: str) -> str:
    """The reply without its thinking; nothing if it was cut off while still thinking."""
    said = THINKING.sub("", reply)
    return "" if UNFINISHED in said else said.strip()


def stated_answers(reply: str) -> list[re.Match[str]]:
    """The lines `Answer: ...`. A model that repeats the template answers last."""
    return list(STATED_ANSWER.finditer(reply))


def before(reply: str, stated: Sequence[re.Match[str]]) -> str | None:
    """What was said before the first answer, if there is one: the rationale."""
    if not stated:
        return None
    lines = TEMPLATE_OPENS.sub("", reply[: stated[0].start()]).split("\n")
    while lines and not WORDS.search(lines[-1]):  # a rule above the answer
        lines.pop()
    return "\n".join(lines).strip() or None


def without_confidence(reply: str) -> str:
    """The reply less the line of the template that is no part of the answer."""
    return CONFIDENCE_LINE.sub("", reply).strip()


def confidence(reply: str, completion: Completion) -> float | None:
    """As stated in the reply, or else the probability of the completion's tokens."""
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
    """The choices by their plain text, built once for many look-ups."""

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = choices
        self.texts = [plain(choice) for choice in choices]
        counts = Counter(self.texts)
        pairs = zip(self.texts, choices, strict=True)
        self._by_text = {text: choice for text, choice in pairs if text and counts[text] == 1}
        self._exact = frozenset(choices)
        self._signed = frozenset(map(_signed, self.texts))

    def find(self, text: str) -> str | None:
        """Return the choice that equals the text up to case, outer punctuation and spacing. Return
        None if there is no such choice, or more than one."""
        return text if text in self._exact else self._by_text.get(plain(text))

    def has_signed(self, text: str) -> bool:
        """Return whether a choice equals the text with any dash as minus sign, without spaces."""
        return _signed(plain(text)) in self._signed


def _signed(text: str) -> str:
    return "".join(text.translate(DASHES).split())


def match(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that equals the text, as `ChoiceIndex.find` does."""
    return text if text in choices else ChoiceIndex(choices).find(text)


def plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold().replace("_", " ")
    if "." in folded:
        folded = POINT.sub("0.", folded)
    return " ".join(folded.strip(QUOTES).split())


# Marks around them are counted: a reply of asterisks alone would be read anew from each of them.
THOUGHT = re.compile(r"\*{0,2}THOUGHT PROCESS\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
FINAL = re.compile(r"\*{0,2}FINAL ANSWER\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
BECAUSE = re.compile(r"\*{0,2}BECAUSE\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
SENTENCE_ENDS = re.compile(r"\.\s|\n")
FENCE = re.compile(r"^[ \t]*```\w*[ \t]*$", re.MULTILINE)


class RationaleParser:
    """Reads `The answer is X. BECAUSE: ...`, also below `THOUGHT PROCESS: ...` and behind `FINAL
    ANSWER:`, as the prompts of RCTS want it: `parse` is given what the answer is, and what stands
    before and behind it is the rationale. Of several final answers the last one counts, of several
    reasons behind it all belong to it.

    A reply without these marks is read as `parse` reads it.
    """

    def __init__(self, parse: Parser) -> None:
        self._parse = parse

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        reply = FENCE.sub("", spoken(completion.text)).strip()
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
    """What was thought before, the answer, and the reasons behind it."""
    final = next(reversed(list(FINAL.finditer(reply))), None)
    thought, said = (reply[: final.start()], reply[final.end() :]) if final else ("", reply)
    said, reason = _cut(said)
    phrases = list(ANSWER_PHRASE.finditer(said))
    if phrases and (final or reason or THOUGHT.search(said)):
        thought += said[: phrases[-1].start()]
        said = said[phrases[-1].end() :]
    return THOUGHT.sub("", thought).strip(), said.strip(), reason.strip()


def _cut(said: str) -> tuple[str, str]:
    """At the first reason that something was said before."""
    for marked in BECAUSE.finditer(said):
        if WORDS.search(said[: marked.start()]):
            return said[: marked.start()], said[marked.end() :]
    return said, ""


def most_frequent(answers: Sequence[Answer]) -> Answer:
    """Self-consistency: what most samples say, its confidence their share. Of several the one that
    was said first; invalid samples count for nothing, unless there are no others."""
    valid = [answer for answer in answers if answer.valid]
    if not valid:
        return answers[0]
    votes = Counter(_said(answer) for answer in valid)
    said, count = votes.most_common(1)[0]
    chosen = next(answer for answer in valid if _said(answer) == said)
    return replace(chosen, confidence=count / len(answers))


def most_confident(answers: Sequence[Answer]) -> Answer:
    """Best of n by the model's own confidence, stated or the probability of its tokens; the first
    where there is none."""
    return max(answers, key=lambda answer: (answer.valid, answer.confidence or 0.0))


def _said(answer: Answer) -> tuple[str, ...]:
    """Texts without labels are compared up to case and spacing."""
    return answer.labels or (" ".join(answer.text.casefold().split()),)

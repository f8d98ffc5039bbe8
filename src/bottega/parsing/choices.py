"""Parsers of multiple choice and of RCTS's rationales; votes over samples."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from bottega.parsing.answers import (
    ANSWER_PHRASE,
    FENCE,
    WORDS,
    cut_dialogue,
    drop_confidence,
    find_stated_answers,
    rationale_before,
    read_confidence,
    strip_thinking,
    unwrap,
)
from bottega.parsing.option_reader import option_reader
from bottega.protocols import Parser
from bottega.types import Answer, Completion, Query

ENDS = ",.!?;:'"
LEADS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    # Without the look-behind, a long row of digits takes quadratic time.
    re.compile(r"-?(?<!\d)\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:(?<!\d)\d+\.\d+|\.\d+|(?<!\d)\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)

Unparsable = Literal["none", "random"]
# The number of asterisks is bounded: otherwise a reply of asterisks alone takes quadratic time.
THOUGHT = re.compile(r"\*{0,2}THOUGHT PROCESS\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
FINAL = re.compile(r"\*{0,2}FINAL ANSWER\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
BECAUSE = re.compile(r"\*{0,2}BECAUSE\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
SENTENCE_END = re.compile(r"\.\s|\n")


class ChoiceParser:
    """Parser of option letters (A to Z) and option texts.

    It reads the last statement of one option ("Answer: B", `\\boxed{B}`, "the answer is B", "B is
    correct"), unless the reply takes it back; else the label that `LabelParser` reads; else the
    line that is only a letter or an option; else the only option that the reply names and does not
    deny. Several options without a statement, and a refusal, are invalid. A repetition of the
    query and its options before the answer is ignored, and so is dialogue after it. An option text
    may be part of a word ("cat" in "caterpillar") unless `whole_words` is set.

    Any other reply is invalid. With `unparsable="random"` it becomes a random choice, seeded by
    `seed` and the query, without a confidence. For a query without choices the answer is the stated
    answer or the whole reply, for `open_candidates`.
    """

    def __init__(
        self, *, unparsable: Unparsable = "none", seed: int = 0, whole_words: bool = False
    ) -> None:
        self.whole_words = whole_words
        self.unparsable = unparsable
        self.seed = seed

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        reply = self.prepare(strip_thinking(completion.text), query)
        stated = find_stated_answers(reply)
        rationale = rationale_before(reply, stated)
        sure = read_confidence(reply, completion)
        reply = drop_confidence(reply)
        last = stated[-1][1].strip() if stated else reply
        if not query.choices:
            labels = (last,) if last else ()
            return Answer(last, bool(last), labels, sure if last else None, rationale)
        chosen = self.read(reply, query)
        if chosen is not None:
            return Answer(chosen, labels=(chosen,), confidence=sure, rationale=rationale)
        if self.unparsable == "none":
            return Answer(last, valid=False, rationale=rationale)
        sampled = random.Random(f"{self.seed} {query.id or query.text}").choice(query.choices)
        return Answer(sampled, labels=(sampled,), rationale=rationale)

    def prepare(self, reply: str, query: Query) -> str:
        """Return the part of the reply that may contain the answer."""
        return cut_dialogue(unwrap(reply), query)

    def read(self, reply: str, query: Query) -> str | None:
        """Return the option that the reply chooses, None if it chooses none or several."""
        found = option_reader(query.choices, whole_words=True).read(reply, query)
        if found is not None or self.whole_words:
            return found
        return option_reader(query.choices, whole_words=False).read(reply, query)


def open_candidates(reply: str) -> list[str | float]:
    """Return candidate texts and numbers of an open answer, by the official rules of MMMU.

    These are the shortest tail of each line after "is", "so", "therefore" and similar words (or the
    whole reply), in lower case, and the numbers in the tails, rounded to two decimals.
    """
    tails = _tails(reply.strip().strip(".").lower())
    numbers = [found for tail in tails for pattern in NUMBERS for found in pattern.findall(tail)]
    return list(dict.fromkeys(form for text in (*tails, *numbers) for form in open_forms(text)))


def open_forms(text: str) -> list[str | float]:
    """Return the forms of an open answer for comparison: a number, or texts in lower case.

    A single letter gets a space before or after it, because most words contain it.
    """
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
    return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def _tails(reply: str) -> list[str]:
    lines = reply.split("\n")
    tails: list[str] = []
    for number, line in enumerate(lines, 1):
        leads = (*LEADS, "=") if number == len(lines) else LEADS
        shortest = ""
        for tail in (line.rpartition(lead)[2].strip() for lead in leads if lead in line):
            # As in the official code, any later tail replaces an empty one.
            if not shortest or len(tail) < len(shortest):
                shortest = tail
        if shortest and shortest not in tuple(ENDS):
            tails.append(shortest)
    return tails or [reply]


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
        thought, chosen, reason = _parts(reply)
        if chosen == reply:
            return self._parse(query, replace(completion, text=reply))
        answer = self._parse(query, replace(completion, text=chosen))
        first = SENTENCE_END.split(chosen, maxsplit=1)[0]
        if not answer.valid and first != chosen:
            answer = self._parse(query, replace(completion, text=first))
        why = "\n".join(part for part in (thought, reason) if WORDS.search(part))
        return replace(answer, rationale=why or answer.rationale)


def _parts(reply: str) -> tuple[str, str, str]:
    """Split a reply into thoughts, answer and reasons."""
    final = next(reversed(list(FINAL.finditer(reply))), None)
    thought, chosen = (reply[: final.start()], reply[final.end() :]) if final else ("", reply)
    reason = ""
    for mark in BECAUSE.finditer(chosen):
        if WORDS.search(chosen[: mark.start()]):  # a reason before the answer is no reason for it
            chosen, reason = chosen[: mark.start()], chosen[mark.end() :]
            break
    phrases = list(ANSWER_PHRASE.finditer(chosen))
    if phrases and (final or reason or THOUGHT.search(chosen)):
        thought += chosen[: phrases[-1].start()]
        chosen = chosen[phrases[-1].end() :]
    return THOUGHT.sub("", thought).strip(), chosen.strip(), reason.strip()


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

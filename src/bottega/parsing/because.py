"""Replies that say why: the reasons become the rationale, and are not searched for the answer."""

from __future__ import annotations

import re
from dataclasses import replace

from bottega.parsing.replies import ANSWER_PHRASE, WORDS, spoken
from bottega.protocols import Parser
from bottega.types import Answer, Completion, Query

# Marks around them are counted: a reply of asterisks alone would be read anew from each of them.
THOUGHT = re.compile(r"\*{0,2}THOUGHT PROCESS\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
FINAL = re.compile(r"\*{0,2}FINAL ANSWER\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
BECAUSE = re.compile(r"\*{0,2}BECAUSE\*{0,2}\s*:\*{0,2}\s*", re.IGNORECASE)
SENTENCE_ENDS = re.compile(r"\.\s|\n")
FENCE = re.compile(r"^[ \t]*```\w*[ \t]*$", re.MULTILINE)


class BecauseParser:
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

"""Reading of the option that a multiple-choice reply chooses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from string import ascii_letters, ascii_uppercase

from bottega._util.refusals import declines
from bottega.parsing.answers import QUOTES, choice_index, normalize
from bottega.parsing.final_answers import last_box
from bottega.parsing.labels import REJECTED, STRUCK_OUT, contradicts, stated_label
from bottega.types import Completion, Query

WIDE = str.maketrans(
    dict(zip("（）：；．。！？【】", "():;..!?[]", strict=True))
    | {"，": ", ", "、": ", "}
    | {chr(ord("Ａ") + at): letter for at, letter in enumerate(ascii_uppercase)}
)
ANSWER = "answer|antwort|respuesta|opción|réponse|risposta|resposta|alternativa|ответ"
QUALIFIER = "final|correct|right|best|predicted|my|most likely|most appropriate|most suitable"
LINE = re.compile(
    rf"^[^\w\n]*(?:(?:{QUALIFIER})[ \t]+){{0,3}}(?:{ANSWER})(?:[ \t]+(?:choice|option|key|letter))?"
    r"[^\w\n:]{0,9}(?:[:=]|\n)\s*(?=(\S.{0,299}))",
    re.IGNORECASE | re.MULTILINE,
)
PHRASE = re.compile(
    rf"\b(?:(?:{ANSWER})(?:\s+(?:choice|option|correc?ta|correcte|corretta))?|(?:{QUALIFIER})\s+"
    r"(?:option|choice|one|letter|match|description|label))\s*"
    r"(?:(?:here\s+)?(?:is|would be|should be|must be|has to be|ist|es|est|è|é)\b|[:=–—])\s*"
    r"[:\-]?\s*(?:(?:indeed|therefore|thus|clearly|again|la|le|el|o|die|a(?=\s+(?-i:[A-Z])\b))\s+)?(?=(\S.{0,299}))",
    re.IGNORECASE,
)
CHOOSE = re.compile(
    r"\bI(?:['’](?:d|ll)|\s+(?:would|will))?\s+(?:go with|choose|select|pick)\s+(?=(\S.{0,299}))"
    r"|(?:答案|选项)\s*(?:应该|应)?(?:是|为|选|:)\s*(?=(\S.{0,299}))|(?:故|应|因此|所以|本题)?选择?\s*:?\s*"
    r"(?=([(\[]?[A-Z](?![A-Za-z]).{0,299}))"
    r"|(?:答え|正解|正答|(?<!\w)(?:정답|답)|उत्तर|الإجابة|الجواب)(?:\s+الصحيح\w*)?"
    r"(?:は|은|는|\s+(?:है|هي|هو)(?!\w))?\s*:?\s*(?=(\S.{0,299}))",
    re.IGNORECASE,
)
RIGHT = re.compile(
    r"(?<![A-Za-z0-9_])[(\[*]{0,4}([A-Z])[)\]*.]{0,4}\s+(?:is|would be|must be|should be)\s+"
    r"(?:(?:clearly|therefore|thus|indeed)\s+)?(?:the\s+)?(?:only\s+)?(?:correct|right|best|answer)\b"
)
CONDITION = re.compile(
    r"\b(?:if|whether|unless|suppose|assum\w+|why|not sure|unsure|think|thought)\b[^.\n]{0,40}\Z",
    re.IGNORECASE,
)
ONE_OF_BOXES = re.compile(r"\}\W{0,9}(?:or|and)?\W{0,9}boxed\s*\{\Z")
TAKES_BACK = re.compile(
    r"(?:\A|[.!?]\s|\n)\W{0,9}(?:(?:oh|no|hm+)\W{1,9})?(?:wait|actually|sorry|correction|oops|rather"
    r"|my mistake|scratch that)\b|\b(?:that|this) (?:is|was) (?:wrong|incorrect|a mistake)\b",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n")
# A choice before such a word is complete: "dog, since a cat has other ears".
CONNECTIVE = re.compile(
    r"[,;]?\s+(?:because|since|as|although|though|but|unlike|not|while|rather|instead|for|due|which"
    r"|whereas|and not)\b|[,;]?\s+[-–—(]",
    re.IGNORECASE,
)
CLAUSE = re.compile(r"[.!?;:]\s+|\.\Z|\n|,\s+|\b(?:but|so|because|since|while|hence|thus)\b", re.I)
DENIAL = re.compile(
    r"\b(?:not|none|nor|never|neither|cannot|except|unless|until|unlikely|nicht"
    r"|rul(?:e[sd]?|ing) out|exclud\w*|eliminat\w*|wrong|incorrect|unlike|rather than|instead of)\b"
    r"|n['’]t\b|[不非错]|ليس",
    re.IGNORECASE,
)
CONTRAST = re.compile(r"\b(?:not|rather|instead)\b", re.IGNORECASE)
NO_OPTION = re.compile(r"\b(?:no|if)\s+(?:\w+\s+)?\Z", re.IGNORECASE)
MIN_WORDS = 7  # of a reply in which an option may stand before another noun
PART_OF_NAME = re.compile(
    r"['’]s\b|[ \t]+(?!(?:the|an?|and|as|at|by|for|from|in|is|it|of|on|or|than|to|was|with)\b)\w",
    re.IGNORECASE,
)
MAX_STATEMENTS = 20
NEARBY = 120  # characters around an option that may deny it
BRIEF = 20  # words of a reply in which a doubt concerns the option
LATEX = re.compile(r"\\(?:text(?:bf|rm)?|math(?:rm|bf|sf)|boxed)\s*\{([^{}]*)\}")
AROUND = QUOTES + "$<>{}\\#-–—>✅👉"
LETTER = re.compile(
    rf"[{re.escape(AROUND)}]{{0,20}}(?:(?i:the\s+)?(?i:option|choice|letter|answer|选项)\s*)?"
    rf"[{re.escape(AROUND)}]{{0,20}}([A-Z])(?:选项)?(?![\w'’+#♯-])|[(\[]([a-z])[)\]]"
)
ONLY_LETTER = re.compile(
    rf"[{re.escape(AROUND)}]{{0,20}}(?:(?i:option|choice|letter)\s+)?[{re.escape(AROUND)}]{{0,20}}([A-Za-z])"
    rf"(?:选项)?[{re.escape(AROUND)}]*"
)
# "A" before other words is an article, and "I" a pronoun.
AFTER_A = (
    "is|was|and|or|because|since|as|but|would|can|seems|looks|fits|matches|shows|best|for|with"
)
NAMED_LETTER = re.compile(
    r"\(([A-Z])\)|\[([A-Z])\]|(?<![A-Za-z0-9_'’.°-])(?<!vitamin )(?<!hepatitis )(?:"
    rf"([B-HJ-Z]|A(?!\s+(?!(?:{AFTER_A})\b)[a-z])|(?<=option )I|(?<=choice )I)"
    r"(?![A-Za-z0-9_'’+#♯-]|\.\w))"
)
FIRST_LETTER = re.compile(r"[\s*(\[]*([A-Z])\**[.):\]]+\**\s(?!\s*(?:or|and|und|o|ou|oder)\b)")
ENUMERATED = re.compile(r"(?:^|[.;?!]\s)[\s*(\[>#-]*([A-Z])\**[.):\]]", re.MULTILINE)
# A Chinese or Japanese character is no part of a word. Ignoring case, the range compiles slowly.
BEFORE, AFTER = r"(?-i:(?<![^\W\u3040-\u9fff]))", r"(?-i:(?![^\W\u3040-\u9fff]))"
BEFORE_DIGIT, AFTER_DIGIT = r"(?<![\d][.,/:])(?<![.\-−^/])", r"(?![.,/:]\d|\s?%)"


class OptionReader:
    """Reader of the option that a reply chooses, for one tuple of options."""

    def __init__(self, choices: Sequence[str], *, whole_words: bool) -> None:
        self.choices = tuple(dict.fromkeys(choices))
        self.options = dict(zip(ascii_uppercase, choices, strict=False))
        self.has_letters = any(len(one) == 1 and one in ascii_letters for one in choices)
        texts = {
            bare.casefold(): one
            for one in choices
            if len(bare := one.strip(QUOTES)) > 1 or (bare and not self.has_letters)
        }
        self.by_text = texts
        parts = [_pattern(text, whole_words) for text in sorted(texts, key=len, reverse=True)]
        self.named = re.compile("|".join(parts) or r"(?!)", re.IGNORECASE)
        self.find = choice_index(self.choices).find

    def read(self, reply: str, query: Query) -> str | None:
        """Return the chosen option, None if the reply chooses none or several."""
        reply = STRUCK_OUT.sub("", reply).translate(WIDE).strip()
        if (letter := ONLY_LETTER.fullmatch(reply)) and letter[1] in self.options:
            return self.options[letter[1]]
        if reply in self.choices:
            return reply
        reply = self._without_query(reply, query)
        for start, text in sorted(_statements(reply), reverse=True)[:MAX_STATEMENTS]:
            if (stated := self._stated(text)) is not None:
                later = SENTENCE.split(reply[start:], maxsplit=1)[1:]
                return None if any(map(TAKES_BACK.search, later)) else stated
        if (label := stated_label(query, Completion(reply))) is not None:
            return label.text
        if declines(reply) or REJECTED.search(reply):
            return None
        lines = {line: one for line in reply.splitlines() if (one := self._only(line)) is not None}
        chosen = set(lines.values()) or self._first(reply)
        if not chosen:
            chosen = self._affirmed(reply, is_short=len(reply.split()) < MIN_WORDS)
        if len(chosen) != 1:
            return None
        option = chosen.pop()
        rest = reply.replace(next(iter(lines)), "", 1) if lines else ""
        if not lines and len(reply.split()) < BRIEF:
            rest = reply[max((end for _, end, _ in self._named_spans(reply)), default=0) :]
        return None if self._doubts(rest, option) else option

    def _doubts(self, text: str, option: str) -> bool:
        """Return whether a text after an option takes it back. Sentences about other options may
        deny them."""
        sentences = SENTENCE.split(text)
        about = [any(one != option for *_, one in self._named_spans(part)) for part in sentences]
        other = [one for one, named in zip(sentences, about, strict=True) if not named]
        return any(map(TAKES_BACK.search, sentences)) or contradicts(
            "\n".join(other), (option,), choice_index((option,))
        )

    def _without_query(self, reply: str, query: Query) -> str:
        """Return the reply without a repetition of the question and its options before the
        answer."""
        question = query.text.strip()
        if question and reply.casefold().startswith(question.casefold()):
            reply = reply[len(question) :].lstrip()
        folded = reply.casefold()
        if all(text in folded for text in self.by_text):
            return _list_pattern(self.options).sub("", reply, count=1).strip() or reply
        return reply

    def _stated(self, text: str) -> str | None:
        """Return the option that the text of a statement names."""
        line = LATEX.sub(r"\1", text).split("\n", maxsplit=1)[0].strip()
        sentence = SENTENCE.split(line, maxsplit=1)[0]
        lead = LETTER.match(line)
        if lead and self.find(line[lead.end() :].strip(AROUND)):
            return self._only(line)  # None if another option has the letter
        for part in (line, sentence, CONNECTIVE.split(sentence, maxsplit=1)[0]):
            if (only := self._only(part)) is not None:
                return only
        if lead and not _is_article(line, lead):
            option = self.options.get((lead[1] or lead[2]).upper())
            return option if option and self._affirmed(sentence) <= {option} else None
        named = self._affirmed(sentence)
        return named.pop() if len(named) == 1 else None

    def _only(self, line: str) -> str | None:
        """Return the option if the line is only its letter, its text or both."""
        line = LATEX.sub(r"\1", line).strip()
        if (letter := ONLY_LETTER.fullmatch(line)) and letter[1].upper() in self.options:
            named = self.find(line) if letter[1].islower() else None
            return named or self.options[letter[1].upper()]
        for text in (line, line.strip(AROUND)):
            if (named := self.find(text)) is not None:
                return named
        if lead := LETTER.match(line):
            option = self.options.get((lead[1] or lead[2]).upper())
            rest = line[lead.end() :].strip(AROUND)
            return option if option and normalize(rest) == normalize(option) else None
        return None

    def _first(self, reply: str) -> set[str]:
        """Return the option of a reply that begins with its letter: "B. Because ..."."""
        found = FIRST_LETTER.match(reply)
        if found is None or len(set(ENUMERATED.findall(reply)) & set(self.options)) > 1:
            return set()
        other = self.find(reply[found.end() :].split("\n")[0])
        return {self.options[found[1]]} if other is None and found[1] in self.options else set()

    def _affirmed(self, text: str, *, is_short: bool = False) -> set[str]:
        """Return the options that the text names and does not deny. An empty text beside them means
        that they are uncertain: one is also denied, or part of a name in a short text ("cat
        food")."""
        affirmed: set[str] = set()
        denied: set[str] = set()
        for start, end, option in self._named_spans(text):
            before = CLAUSE.split(text[max(0, start - NEARBY) : start])[-1]
            after = CLAUSE.split(text[end : end + NEARBY], maxsplit=1)[0]
            if is_short and text[start].isalpha() and PART_OF_NAME.match(after):
                affirmed.add("")
            contrast = CONTRAST.search(after)
            if contrast and any(self._named_spans(after[contrast.start() :])):
                after = after[: contrast.start()]  # "Paris, not Rome"
            denies = NO_OPTION.search(before) or DENIAL.search(f"{before} {after}")
            (denied if denies or text.startswith("?", end) else affirmed).add(option)
        affirmed |= {""} if affirmed & denied else set()
        return affirmed if affirmed != {""} else set()

    def _named_spans(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield the start, the end and the option of each text and letter of an option."""
        for found in self.named.finditer(text):
            if (option := self.by_text.get(found[0].casefold())) is not None:
                yield *found.span(), option
        rest = self.named.sub(lambda found: "x" * len(found[0]), text)
        for found in NAMED_LETTER.finditer(rest):
            letter = found[1] or found[2] or found[3]
            if letter in self.options:
                yield *found.span(), self.options[letter]


@lru_cache(64)
def option_reader(choices: tuple[str, ...], whole_words: bool) -> OptionReader:
    """Return the reader of these options; those of a task are the same for all of its replies."""
    return OptionReader(choices, whole_words=whole_words)


def _statements(reply: str) -> Iterator[tuple[int, str]]:
    """Yield the start and the text of each statement."""
    for pattern in (LINE, PHRASE, CHOOSE, RIGHT):
        for found in pattern.finditer(reply):
            if not CONDITION.search(reply[max(0, found.start() - 60) : found.start()]):
                group = next(at for at, text in enumerate(found.groups(), 1) if text)
                yield found.start(group), found[group]
    box = last_box(reply)
    if box is not None and not ONE_OF_BOXES.search(reply, 0, box[0]):
        yield box


def _is_article(line: str, lead: re.Match[str]) -> bool:
    """Return whether the letter is the article "A" or the pronoun "I"."""
    return lead[1] in ("A", "I") and NAMED_LETTER.match(line, lead.start(1)) is None


def _pattern(text: str, whole_words: bool) -> str:
    escaped = re.escape(text)
    if not whole_words:
        return escaped
    before = BEFORE_DIGIT if text[:1].isdigit() else ""
    after = AFTER_DIGIT if text[-1:].isdigit() else ""
    first = BEFORE if text[0] < "\u3040" else ""
    last = AFTER if text[-1] < "\u3040" else ""
    return f"{first}{before}{escaped}{last}{after}"


def _list_pattern(options: dict[str, str]) -> re.Pattern[str]:
    """Return the pattern of a list of all options by letter, on one line or several."""
    marks = r"[^\w]{0,6}"
    items = (rf"{letter}{marks}{re.escape(text.strip(QUOTES))}" for letter, text in options.items())
    return re.compile(rf"\A(?:(?:options|choices)\s*:)?{marks}" + marks.join(items), re.IGNORECASE)

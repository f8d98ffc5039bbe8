"""Values and words of answers, without introductions and explanations."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from bottega.parsing.answers import DASHES, normalize
from bottega.parsing.final_answers import TITLE
from bottega.parsing.formulas import COUNTED, RAISED, SIGNS, WRAPPED
from bottega.parsing.introductions import CLASSES, THINGS
from bottega.parsing.labels import RETRACTED, STATED_LABEL
from bottega.parsing.quantities import Moment, Quantity, StatedValue, read_value, word_set

MAX_LENGTH = 2000  # longer texts are compared as a whole
MAX_ITEMS = 50
NEGATIONS = word_set(
    "no not never none non nor neither nothing nobody without hardly barely scarcely"
    " nicht kein keine keinen keiner ohne pas aucun aucune sans sin ningún"
    " nunca jamais free 不 没 無 无 非 未"
)
COPULAS = word_set(
    "is are was were be equals equal shows show depicts contains see sees has have had costs weighs"
    " measures reads says = ist sind war est sont es 是 为"
)
ARTICLES = word_set("a an the")
# Fillers that say the same in any introduction; "he" and "she", or "height" and "width", do not.
LIGHT = ARTICLES | word_set(
    "it this that there here these those is are was were be = i we you can see sees think believe"
    " image picture photo photograph scene shown shows depicts contains answer so thus therefore"
    " hence sure okay 这 那 张 图 片 中 里 的 了 是 为"
)
# Fillers without which a value may be another one: "from 9:00".
RELATIONS = word_set("to by for from with could would will")
# Words that say nothing about the answer.
FILLER = COPULAS | LIGHT | RELATIONS | word_set(
    "they he she my your its of in on at and as do does did looking look based any some length"
    " width height depth distance weight mass size area volume speed temperature price cost age"
    " date time year value sum result final correct altogether exactly about place"
    " long tall high wide heavy old 答 案 ein eine der die das"
    f" {CLASSES} {THINGS}".replace("|", " ")
)  # fmt: skip
PREPOSITIONS = word_set("in on at during after before since for by")
# An article that is no letter or title: not in "A is", "A + b" or "The Image".
ARTICLE = re.compile(
    rf"(?<![\w-])(?:a|an|the)\s+(?=[^\s+/=<>-])(?!(?:{'|'.join(FILLER | PREPOSITIONS)})(?!\w))",
    re.I,
)
# A number after these words is a code: version 2.1 is not version 2.10.
VERSIONED = word_set("version section chapter release firmware figure v")
OPEN_ENDED = re.compile(
    r"\b(?:describe|explain|summari[sz]e|caption|write|translate|why|how (?:do|does|did|to)"
    r"|what (?:happens|happened))\b|描述|为什么",
    re.IGNORECASE,
)
WORD = rf"[{SIGNS}]|[^\W\d_{SIGNS}]+"
CODE = rf"[^\W\d_{SIGNS}]+[-.]?\d\w*(?:[-.]\w+)*|\d\w*(?:[-.:/]\w+)*"
# A sign is attached to a word: "B+", "C#", "-x", "x-y", but not "red-brown" or "dog - a pet".
SIGN = re.compile(
    r"(?<=\w)[-+#](?!\w\w)|(?<![\w\s])[-+#](?=\W|\Z)|(?<!\w)[-+](?=\w\b)|[=<>^|±\u2190-\u22ff]"
)
TOKEN = re.compile(f"{CODE}|{WORD}|{SIGN.pattern}")
# Punctuation that says nothing, unlike a point between words (a file name) or "!" after a number.
SILENT = re.compile(
    r"(?<![^\W_][^\W_])[.:]|[.:](?![^\W_]{2})|(?<!\d)!|#(?=[#\s])|[\s,;?…\"'•·、。，；：！¿¡،؟।~]"
)
UNREAD = word_set("Cc Cf Ps Pe Pi Pf Pd")  # categories of characters that say nothing
SENTENCE_BREAK = re.compile(
    r"[.!;](?=\s+\S)|[。！]|\n+|\s[-–—](?=\s)"
    r"|,?\s+(?=(?:because|since|due to|weil|parce que)\b)",
    re.IGNORECASE,
)
IN_IMAGE = re.compile(
    r"\s+(?:shown |depicted |visible )?(?:in|on) (?:the|this)"
    r" (?:image|picture|photo(?:graph)?|scene)\W*\Z",
    re.IGNORECASE,
)
NOTE = re.compile(r"\s*\([^()]*\d[^()]*\)\W*\Z")
QUOTED = re.compile(
    r"[\s*]*(?:\"([^\"]+)\"|'([^']+)'|“([^“”]+)”|‘([^‘’]+)’|«([^«»]+)»|`([^`]+)`)[.\s*]*"
)
LIST_BREAK = re.compile(
    r"(?:\s*[\n;、，]\s*|\s*,\s+|,(?=\D)|\s+(?:and|und|et|y|&|和|与)\s+|和|与)+(?:and\s+)?",
    re.IGNORECASE,
)
BULLET = re.compile(r"\A\s*(?:[-*•]\s+|\d{1,2}[.)]\s+)")
PACKED_NUMBERS = re.compile(r"\d+(?:,\d+){2,}")
NOTATIONS = RAISED | {
    r"\left": "", r"\right": "", r"\,": " ", r"\;": " ", r"\ ": " ", r"\%": "%", r"\$": "$",
    r"^{\circ}": "°", r"^\circ": "°", r"\degree": "°", r"\circ": "°", r"\times": "×",
    r"\cdot": "×", "{,}": ",", "µ": "u", "μ": "u", "’": "'", "′": "'", "″": '"', "\ufe0f": "",
    "*": "", "`": "", "_": " ", "&": " and ",
}  # fmt: skip
REWRITES = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"(?<!\d )\b(?:minus|negative)\s+(?=\W?\d)|\A\s*−\s+(?=\W?\d)", "-"),
        (r"(?<=\S)~|(?<=\d)(?=[¼-¾⅐-⅞]|\\[dt]?frac)", " "),
        (WRAPPED.pattern, r" \1 "),
        (r"\\[dt]?frac\s*\{(\d{1,30})\}\s*\{(\d{1,30})\}", r"\1/\2"),
        (r"\A\s*\$+([^$]*)\$+\.?\s*\Z", r"\1"),
        (r"\band a half\b|\b(?:a|one) half\b|\Ahalf\Z", "1/2"),
        (r"\b(?:a|one) third\b", "1/3"),
        (r"\b(?:a|one) quarter\b", "1/4"),
        (r"\bnoon\b", "12 pm"),
        (r"\bmidnight\b", "12 am"),
        (r"n't\b", " not"),
        (r"\bcannot\b", "can not"),
        (r"\b(it|that|there|here|he|she|what)'s\b", r"\1 is"),
        (r"(?<=\w)-free\b", " free"),
    )
)
ONES = f"{COUNTED} thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
NUMBERS = {word: n for n, word in enumerate(ONES)} | {w: 10 * n for n, w in enumerate(TENS, 2)}
ORDINALS = {"first": 1, "second": 2, "third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12}
ORDINALS |= {
    f"{word.removesuffix('y')}{'ie' if word.endswith('y') else ''}th": number
    for word, number in NUMBERS.items()
    if number and number not in ORDINALS.values()
}
_ONES, _TENS = "|".join(sorted(ONES, reverse=True)), "|".join(TENS)
_BELOW_100 = rf"(?:(?:{_TENS})(?:[ -](?:{_ONES}))?|{_ONES})"
_HUNDREDS = rf"(?:(?:{_BELOW_100}|a)[ -]hundred(?:(?: and |[ -]){_BELOW_100})?|{_BELOW_100})"
# "second" after a number is a unit of time.
SPELLED = re.compile(
    rf"(?<!\d )(?<!one )\b(?:(?:{_TENS})[ -])?(?:{'|'.join(sorted(ORDINALS, reverse=True))})\b"
    rf"|\b(?:(?:{_HUNDREDS}|a)[ -]thousand(?:(?: and |[ -]){_HUNDREDS})?|{_HUNDREDS})\b",
    re.IGNORECASE,
)
MEASURES = "只个条张匹辆位名头"
CHINESE_DIGITS = {sign: number for number, sign in enumerate("零一二三四五六七八九十")} | {"两": 2}
CHINESE = re.compile(
    rf"\A([零一二两三四五六七八九十]{{1,3}})[{MEASURES}]?[。.]*\Z|([二两三四五六七八九])(?=[{MEASURES}])"
)
Atom = StatedValue | str


@dataclass(frozen=True)
class Phrase:
    """Text as a sequence of values and words in lower case; a code such as AB-12 is a word."""

    text: str
    atoms: tuple[Atom, ...]

    @property
    def values(self) -> list[StatedValue]:
        return [atom for atom in self.atoms if not isinstance(atom, str)]

    @property
    def words(self) -> list[str]:
        return [atom for atom in self.atoms if isinstance(atom, str)]


def unquoted(text: str) -> str:
    """Return the text without emphasis and quotation marks around all of it."""
    found = QUOTED.fullmatch(text)
    return next(filter(None, found.groups())).strip() if found else text.strip()


def retracts(text: str) -> bool:
    tokens = re.findall(r"[^\W_]+", text.lower())
    return RETRACTED.search("".join(f" {token} " for token in tokens)) is not None


def split_explanation(text: str, question: str) -> tuple[str, str]:
    """Return a short answer and the explanation after it, or the text and nothing."""
    stated = [found[1] for found in STATED_LABEL.finditer(text) if found[1].strip()]
    text = IN_IMAGE.sub("", (stated or [text])[-1].strip())
    if OPEN_ENDED.search(question):
        return text, ""
    titles = {found.end() for found in TITLE.finditer(text)}
    for found in SENTENCE_BREAK.finditer(text):
        head, rest = text[: found.start()], text[found.end() :]
        if found.end() + 1 in titles or head[-1:].isdigit():
            continue
        answer = _split_lead(parse_phrase(head).atoms, frozenset())[1]
        short = 0 < len(answer) <= 4 and COPULAS.isdisjoint(answer)
        if short and len(rest.split()) > 2 and not BULLET.match(text) and not retracts(rest):
            return head, rest
        break
    noted = NOTE.search(text)
    return text[: noted.start()] if noted and parse_phrase(
        text[: noted.start()]
    ).values else text, ""


def plain_notation(text: str) -> str:
    """Return the text in NFKC form without TeX and Markdown, with spelled numbers in digits."""
    for notation, replacement in NOTATIONS.items():
        text = text.replace(notation, replacement)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = unicodedata.normalize("NFKC", text).translate(DASHES).replace("⁄", "/")
    text = " ".join(text.split())
    return SPELLED.sub(_spelled_number, CHINESE.sub(_chinese_number, text))


def _chinese_number(found: re.Match[str]) -> str:
    total = 0
    for sign in found[1] or found[2]:
        digit = CHINESE_DIGITS[sign]
        total = (total or 1) * 10 if digit == 10 else total + digit
    return str(total)


def _spelled_number(found: re.Match[str]) -> str:
    """Return 25 for "twenty-five" and 21th for "twenty-first"."""
    total = current = 0
    *_, last = spelled = re.split(r"[ -]", found[0].lower())
    for word in spelled:
        if word == "hundred":
            current = 100 * (current or 1)
        elif word == "thousand":
            total, current = 1000 * (current or 1), 0
        else:
            current += NUMBERS.get(word, ORDINALS.get(word, 0))
    return f"{total + current}{'th' if last in ORDINALS else ''}"


def parse_phrase(text: str) -> Phrase:
    """Return the values and words of a text. A text over `MAX_LENGTH` is one word."""
    if len(text) > MAX_LENGTH:
        return Phrase(text, (normalize(text),))
    plain = ARTICLE.sub("", plain_notation(text))
    atoms: list[Atom] = []
    at = 0
    while at < len(plain):
        readable = not plain[at - 1 : at].isalnum() and (not atoms or atoms[-1] not in VERSIONED)
        if readable and (value := read_value(plain, at)):
            atoms.append(value[0])
            at = value[1]
        elif found := TOKEN.match(plain, at):
            atoms.append(found[0].casefold())
            at = found.end()
        else:
            if not SILENT.match(plain, at) and unicodedata.category(plain[at]) not in UNREAD:
                atoms.append(plain[at])
            at += 1
    return Phrase(text, tuple(atoms))


def without_leads(
    one: Phrase, other: Phrase, question_words: frozenset[str], *, offers: bool
) -> tuple[Phrase, Phrase]:
    """Remove introductions such as "it is", unless they name different things of the question, or
    the alternative that the other phrase names: "Anna is" before "the winner"."""
    (lead, rest), (other_lead, other_rest) = (
        _split_lead(phrase.atoms, question_words, offers=offers) for phrase in (one, other)
    )
    named, other_named = set(lead) - LIGHT, set(other_lead) - LIGHT
    chosen = offers and not (named.isdisjoint(other.atoms) and other_named.isdisjoint(one.atoms))
    if chosen or (named and other_named and named != other_named):
        return one, other
    return Phrase(one.text, rest), Phrase(other.text, other_rest)


def _split_lead(
    atoms: tuple[Atom, ...], question_words: frozenset[str], *, offers: bool = False
) -> tuple[tuple[Atom, ...], tuple[Atom, ...]]:
    """Split off words of the question and fillers up to a copula. The rest must say more, except
    for an alternative that the question offers."""
    end = 0
    for at, atom in enumerate(atoms):
        if atom in ARTICLES and COPULAS.intersection(atoms[at + 1 : at + 2]):
            break  # the letter A
        if atom in NEGATIONS or atom not in FILLER | question_words:
            break
        end = at + 1 if atom in COPULAS else end
    lead, rest = atoms[:end], atoms[end:]
    while (
        rest[0:1]
        and rest[0] in ("on", "in", "at", "am", "um")
        and isinstance((*rest, "")[1], Moment | Quantity)
    ):
        rest = rest[1:]
    if rest[:1] == ("一",) and len(rest) > 2 and str(rest[1]) in MEASURES:
        rest = rest[2:]
    if end and len(rest) > 1 and rest[0] in ARTICLES:
        rest = rest[1:]
    known = FILLER | NEGATIONS if offers else FILLER | NEGATIONS | question_words
    return (lead, rest) if set(rest) - known else ((), atoms)


def split_list(text: str) -> list[str]:
    """Return the items of a list in a text; a single one if it is no list."""
    bare = text.strip().strip("[]*. ")
    if bare.startswith("(") and bare.endswith(")"):  # a tuple
        return [text]
    if PACKED_NUMBERS.fullmatch(bare) and not read_value(bare):
        return bare.split(",")
    lines = (BULLET.sub("", line) for line in bare.split("\n"))
    parts = [part.strip(" .'\"`") for line in lines for part in LIST_BREAK.split(line)]
    parts = [part for part in parts if part]
    is_list = len(parts) <= MAX_ITEMS and all(len(part.split()) <= 5 for part in parts)
    return parts if is_list else [text]

"""Values and words of answers, without introductions and explanations."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from bottega.parsing.answers import DASHES, normalize
from bottega.parsing.formulas import COUNTED, RAISED, SIGNS, WRAPPED
from bottega.parsing.introductions import CLASSES, THINGS
from bottega.parsing.labels import RETRACTED, STATED_LABEL
from bottega.parsing.quantities import Moment, Quantity, StatedValue, read_value


def words(text: str) -> frozenset[str]:
    """Return the set of words of a text."""
    return frozenset(text.split())


MAX_LENGTH = 2000  # longer texts are compared as a whole
MAX_ITEMS = 50
NEGATIONS = words(
    "no not never none non nor neither nothing nobody without hardly barely scarcely"
    " nicht kein keine keinen keiner ohne pas aucun aucune sans sin ningún"
    " nunca jamais free 不 没 無 无 非 未"
)
COPULAS = words(
    "is are was were be equals equal shows show depicts contains see sees has have had costs weighs"
    " measures reads says = ist sind war est sont es 是 为"
)
# Words that say nothing about the answer.
FILLER = COPULAS | words(
    "a an the it this that there here they these those he she i we you my your its of in on at to"
    " by for from with and as can could do does did will would think believe looking look based"
    " image picture photo photograph scene shown any some so thus therefore hence sure okay length"
    " width height depth distance weight mass size area volume speed temperature price cost age"
    " date time year value sum result final correct altogether exactly about place"
    " long tall high wide heavy old 这 那 张 图 片 中 里 的 答 案 了 ein eine der die das"
    f" {CLASSES} {THINGS}".replace("|", " ")
)
UNREAD = words("Cc Cf Ps Pe Pi Pf Pd")  # categories of characters that say nothing
ARTICLES = words("a an the")
# Fillers that say the same in any introduction; "he" and "she", or "height" and "width", do not.
LIGHT = ARTICLES | words(
    "it this that there here these those is are was were be = i we you can see sees think believe"
    " image picture photo photograph scene shown shows depicts contains answer so thus therefore"
    " hence sure okay 这 那 张 图 片 中 里 的 了 是 为"
)
# Fillers without which a value may be another one: "from 9:00".
RELATIONS = words("to by for from with could would will")
# A question that offers alternatives; its words distinguish them in the answers.
ALTERNATIVES = re.compile(
    r"\b(?:and|or|nor|not|no|than|vs|versus|without|und|oder|nicht|et|ou|y|o)\b|[和或与不]|还是",
    re.I,
)
MEASURES = frozenset("只个条张匹辆位名头")
OPEN_ENDED = re.compile(
    r"\b(?:describe|explain|summari[sz]e|caption|write|translate|why|how (?:do|does|did|to)"
    r"|what (?:happens|happened))\b|描述|为什么",
    re.IGNORECASE,
)
CONTRACTIONS = (
    (re.compile(r"n't\b", re.I), " not"), (re.compile(r"\bcannot\b", re.I), "can not"),
    (re.compile(r"\b(it|that|there|here|he|she|what)'s\b", re.I), r"\1 is"),
    (re.compile(r"(?<=\w)-free\b", re.I), " free"), (re.compile(r"&"), " and "),
)  # fmt: skip
WORD = re.compile(rf"[{SIGNS}]|[^\W\d_{SIGNS}]+")
CODE = re.compile(rf"[^\W\d_{SIGNS}]+[-.]?\d\w*(?:[-.]\w+)*|\d\w*(?:[-.:/]\w+)*")
CHUNK = re.compile(r"\d+|[^\W\d_]+|[.:/]")
# Punctuation that says nothing, unlike a point between words (a file name) or "!" after a number.
SILENT = re.compile(
    r"(?<![^\W_][^\W_])[.:]|[.:](?![^\W_]{2})|(?<!\d)!|#(?=[#\s])|[,;?…\"'•·、。，；：！？¿¡،؟।()\[\]{}\-~]"
)
# A sign is attached to a word: "B+", "C#", "-x", "x-y", but not "red-brown" or "dog - a pet".
SIGN = re.compile(
    r"(?<=\w)[-+#](?!\w\w)|(?<![\w\s])[-+#](?=\W|\Z)|(?<!\w)[-+](?=\w\b)|[=<>^|±\u2190-\u22ff]"
)
SENTENCE_BREAK = re.compile(
    r"[.!;](?=\s+\S)|[。！]|\n+|\s[-–—](?=\s)"
    r"|,?\s+(?=(?:because|since|due to|weil|parce que)\b)",
    re.IGNORECASE,
)
ABBREVIATION = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|st|no|vs|prof|inc|jr|sr|approx|ca|e\.g|i\.e|\w)|\d)\Z", re.I
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
# A number after these words is a code: version 2.1 is not version 2.10.
VERSIONED = words("version section chapter release firmware figure v")
PREPOSITIONS = words("in on at during after before since for by")
TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
CARDINALS = {word: number for number, word in enumerate(f"{COUNTED} {TEENS}".split())}
CARDINALS |= {word: 10 * number for number, word in enumerate(TENS.split(), 2)}
ORDINALS = {"first": 1, "second": 2, "third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12}
ORDINALS |= {
    f"{word[:-1]}ieth" if word.endswith("y") else f"{word}th": number
    for word, number in CARDINALS.items()
    if number and number not in ORDINALS.values()
}
_CARDINAL = "|".join(sorted(CARDINALS, reverse=True))
SPELLED = re.compile(
    rf"\b(?:{_CARDINAL}|a (?=hundred|thousand)(?:hundred|thousand))"
    rf"(?:(?:[ -]|(?<=hundred) and |(?<=thousand) and )(?:{_CARDINAL}|hundred|thousand))*\b",
    re.IGNORECASE,
)
# "second" after a number is a unit of time.
ORDINAL_WORD = re.compile(
    rf"(?<!\d )(?<!one )\b(?:({TENS.replace(' ', '|')})[ -])?"
    rf"({'|'.join(sorted(ORDINALS, reverse=True))})\b",
    re.IGNORECASE,
)
PARTS = re.compile(r"\b(?:a|one) (half|third|quarter)\b|\A(half)\Z", re.IGNORECASE)
PART_OF = {"half": "1/2", "third": "1/3", "quarter": "1/4"}
CHINESE_DIGITS = {sign: str(number) for number, sign in enumerate("零一二三四五六七八九")}
CHINESE_DIGITS |= {"两": "2", "": "0"}
CHINESE = re.compile(r"([一二两三四五六七八九]?)(十?)([一二三四五六七八九]?)[个只条张匹辆位名头]?")
CHINESE_COUNT = re.compile(r"[二两三四五六七八九](?=[只个条张匹辆位名头])")
VULGAR = re.compile(r"[¼-¾⅐-⅞]")
TEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{(\d{1,30})\}\s*\{(\d{1,30})\}")
NOTATIONS = {
    r"\left": "", r"\right": "", r"\,": " ", r"\;": " ", r"\ ": " ", r"\%": "%", r"\$": "$",
    r"^{\circ}": "°", r"^\circ": "°", r"\degree": "°", r"\circ": "°", r"\times": "×",
    r"\cdot": "×", "{,}": ",", "µ": "u", "μ": "u", "’": "'", "′": "'", "″": '"', "\ufe0f": "",
}  # fmt: skip
NEGATIVE = re.compile(r"(?<!\d )\b(?:minus|negative)\s+(?=\W?\d)|\A\s*−\s+(?=\W?\d)", re.IGNORECASE)
MATH_DOLLARS = re.compile(r"\$+([^$]*)\$+\.?")
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
    stated = list(STATED_LABEL.finditer(text))
    text = stated[-1][1] if stated and stated[-1][1].strip() else text
    text = IN_IMAGE.sub("", text.strip())
    if OPEN_ENDED.search(question):
        return text, ""
    for found in SENTENCE_BREAK.finditer(text):
        head, rest = text[: found.start()], text[found.end() :]
        if ABBREVIATION.search(head) and found[0] == ".":
            continue
        words = _without_lead(phrase(head).atoms, frozenset())[1]
        short = 0 < len(words) <= 4 and COPULAS.isdisjoint(
            word for word in words if isinstance(word, str)
        )
        if short and len(rest.split()) > 2 and not BULLET.match(text) and not retracts(rest):
            return head, rest
        break
    noted = NOTE.search(text)
    return (
        (text[: noted.start()], "")
        if noted and phrase(text[: noted.start()]).values
        else (text, "")
    )


def plain_notation(text: str) -> str:
    """Return the text in NFKC form without TeX and Markdown, with spelled numbers in digits."""
    text = re.sub(r"(?<=\S)~", " ", NEGATIVE.sub("-", text))
    for notation, replacement in (RAISED | NOTATIONS).items():
        text = text.replace(notation, replacement)
    text = VULGAR.sub(lambda found: f" {unicodedata.normalize('NFKC', found[0])}", text)
    text = unicodedata.normalize("NFKC", WRAPPED.sub(r" \1 ", text)).translate(DASHES)
    text = TEX_FRACTION.sub(_fraction, text.replace("⁄", "/"))
    text = text.replace("*", "").replace("`", "").strip()
    if dollars := MATH_DOLLARS.fullmatch(text):
        text = dollars[1].strip()
    found = CHINESE.fullmatch(text.rstrip("。."))
    if found and any(found.groups()):
        tens = 10 * int(CHINESE_DIGITS[found[1] or "一"]) if found[2] else 0
        ones = found[3] if found[2] else found[1] or found[3]
        return str(tens + int(CHINESE_DIGITS[ones]))
    text = CHINESE_COUNT.sub(lambda found: CHINESE_DIGITS[found[0]], text)
    text = PARTS.sub(lambda found: PART_OF[(found[1] or found[2]).lower()], text)
    return SPELLED.sub(_cardinals, ORDINAL_WORD.sub(_ordinal, text))


def _fraction(found: re.Match[str]) -> str:
    mixed = found.string[: found.start()][-1:].isdigit()
    return f"{' ' if mixed else ''}{found[1]}/{found[2]}"


def _cardinals(found: re.Match[str]) -> str:
    """Return the numbers of a run of words: 25 for "twenty-five", 2 3 for "two three"."""
    numbers: list[int] = []
    total, current, limit = 0, 0, 0
    for word in re.split(r"[ -](?:and )?", found[0].lower()):
        value = CARDINALS.get(word, 1)
        if word in {"hundred", "thousand"}:
            limit = {"hundred": 100, "thousand": 1000}[word]
            current *= limit
        elif value < limit:
            current += value
        else:
            numbers += [total + current] if limit else []
            total, current = 0, value
        if word == "thousand":
            total, current = total + current, 0
        elif word != "hundred":
            limit = 10 if value >= 20 else 1
    return " ".join(map(str, [*numbers, total + current]))


def _ordinal(found: re.Match[str]) -> str:
    tens = CARDINALS[found[1].lower()] if found[1] else 0
    return f"{tens + ORDINALS[found[2].lower()]}th"


def phrase(text: str) -> Phrase:
    """Return the values and words of a text. A text over `MAX_LENGTH` is one word."""
    if len(text) > MAX_LENGTH:
        return Phrase(text, (normalize(text),))
    plain = plain_notation(text)
    for pattern, replacement in CONTRACTIONS:
        plain = pattern.sub(replacement, plain)
    plain = plain.replace("_", " ")
    atoms: list[Atom] = []
    at = 0
    while at < len(plain):
        before = plain[at - 1 : at]
        if plain[at].isspace():
            at += 1
        elif atoms and atoms[-1] in VERSIONED and (found := CODE.match(plain, at)):
            atoms.append(found[0].casefold())
            at = found.end()
        elif not before.isalnum() and (value := read_value(plain, at)):
            atoms.append(value[0])
            at = value[1]
        elif found := CODE.match(plain, at) or WORD.match(plain, at) or SIGN.match(plain, at):
            atoms.append(found[0].casefold())
            at = found.end()
        else:
            if not SILENT.match(plain, at) and unicodedata.category(plain[at]) not in UNREAD:
                atoms.append(plain[at])
            at += 1
    kept = [
        atom
        for atom, following in zip(atoms, [*atoms[1:], ""], strict=False)
        if atom not in ARTICLES or not following or following in FILLER | PREPOSITIONS
    ]
    return Phrase(text, tuple(kept))


def without_leads(one: Phrase, other: Phrase, asked: frozenset[str]) -> tuple[Phrase, Phrase]:
    """Remove introductions such as "it is", unless they name different things of the question."""
    (lead, rest), (other_lead, other_rest) = (_without_lead(p.atoms, asked) for p in (one, other))
    named, other_named = ({w for w in words if w not in LIGHT} for words in (lead, other_lead))
    if named and other_named and named != other_named:
        return one, other
    return Phrase(one.text, rest), Phrase(other.text, other_rest)


def _without_lead(
    atoms: tuple[Atom, ...], asked: frozenset[str]
) -> tuple[tuple[Atom, ...], tuple[Atom, ...]]:
    """Split off words of the question and fillers up to a copula. The rest must say more."""
    end = 0
    for at, atom in enumerate(atoms):
        if atom in ARTICLES and atoms[at + 1 : at + 2] and atoms[at + 1] in COPULAS:
            break  # the letter A
        if not isinstance(atom, str) or atom in NEGATIONS or not (atom in FILLER or atom in asked):
            break
        end = at + 1 if atom in COPULAS else end
    lead, rest = atoms[:end], atoms[end:]
    while (
        len(rest) > 1
        and rest[0] in ("on", "in", "at", "am", "um")
        and isinstance(rest[1], Moment | Quantity)
    ):
        rest = rest[1:]
    if len(rest) > 2 and rest[0] == "一" and rest[1] in MEASURES:
        rest = rest[2:]
    if end and len(rest) > 1 and rest[0] in ARTICLES:
        rest = rest[1:]
    says_more = any(a not in asked | FILLER | NEGATIONS for a in rest)
    return (lead, rest) if says_more else ((), atoms)


def split_list(text: str) -> list[str]:
    """Return the items of a list in a text; a single one if it is no list."""
    bare = text.strip().strip("[]*. ")
    if bare.startswith("(") and bare.endswith(")"):  # a tuple
        return [text]
    if PACKED_NUMBERS.fullmatch(bare) and not read_value(bare):
        return bare.split(",")
    items = [BULLET.sub("", line) for line in bare.split("\n")]
    parts = [part.strip(" .'\"`") for item in items for part in LIST_BREAK.split(item)]
    parts = [part for part in parts if part]
    is_list = len(parts) <= MAX_ITEMS and all(len(part.split()) <= 5 for part in parts)
    return parts if is_list else [text]

"""Rules that decide whether two texts say the same: values, negations, codes, names, order."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from bottega.parsing.answers import normalize
from bottega.parsing.final_answers import TAKEN_BACK
from bottega.parsing.formulas import formula_tokens, formula_value
from bottega.parsing.phrases import (
    ALTERNATIVES,
    CHUNK,
    COPULAS,
    FILLER,
    LIGHT,
    MAX_ITEMS,
    MAX_LENGTH,
    NEGATIONS,
    PREPOSITIONS,
    RELATIONS,
    SIGN,
    Phrase,
    phrase,
    plain_notation,
    retracts,
    split_explanation,
    split_list,
    unquoted,
    without_leads,
)
from bottega.parsing.quantities import (
    ASKS_TEXT,
    DECREASE,
    DIFFERENT,
    SAME,
    UNDECIDED,
    Quantity,
    Sameness,
    StatedValue,
    combined,
    compare_values,
)

SHORT = 8  # words of a text that states one thing
YES = "yes|yeah|yep|true|correct|ja|oui|sí|да|はい"
NO = "no|nope|false|incorrect|nein|non|нет|いいえ"
POLARITY = re.compile(
    rf"\W*(?:(?P<yes>{YES})|(?P<no>{NO}))(?:(?=\s*(?:[^\w\s]|\Z|\n))(?!\.?\s*\d)"
    r"|(?=\s+(?:it|there|they|this|that|he|she|i|we|you|the)\b)|(?<=yes)(?=\s))"
    r"|\W*(?:(?P<yes2>是的?|对的?|有)|(?P<no2>不是|不对|不|否|没有))\W*\Z",
    re.IGNORECASE,
)
# Yes or no as a clause of its own, and not in "has no helmet".
OPPOSITE = re.compile(
    rf"(?:\A|[^\w\s'])\s*(?:(?:and|but|so|or)\s+)?(?:{YES}|{NO})\b|\b(?:{YES}|{NO})\W*\Z", re.I
)
ASKS_MORE = re.compile(
    r"\bif so\b|(?:,|\band)\s+(?:at |in |for |by )?(?:which|what|who|where|when|how|why)\b", re.I
)
NEGATIVE_PREFIXES = ("un", "in", "im", "il", "ir", "non", "dis")
# Words of which each pair from different sides, divided by "/", excludes the other.
EXCLUSIVE = (
    "red/orange/yellow/green/blue/purple violet/pink/brown/black/white/gray grey",
    "红/绿/蓝/黄/黑/白/灰/紫", "rot rote/grün grüne/blau blaue/gelb gelbe/schwarz/weiß",
    "monday/tuesday/wednesday/thursday/friday/saturday/sunday", "spring/summer/autumn fall/winter",
    "january/february/march/april/may/june/july/august/september/october/november/december",
    "left/right", "左/右", "上/下", "男/女", "up/down", "top upper/bottom lower", "above/below",
    "north/south/east/west", "northern/southern/eastern/western", "front/back rear",
    "inside indoors indoor/outside outdoors outdoor", "open opened/closed shut", "he/she",
    "on/off/under underneath/behind", "male man men boy/female woman women girl", "day/night",
    "hot warm/cold cool", "wet/dry", "more/less fewer", "high higher/low lower", "before/after",
    "large big larger bigger/small smaller", "present/absent", "safe/unsafe dangerous",
    "pass passed passes/fail failed fails",
    "increase increases increasing increased/decrease decreases decreasing decreased", "full/empty",
    "positive/negative", "alive/dead", "same/different", "old older/new young newer younger",
    "long longer/short shorter", "fast faster/slow slower", "horizontal/vertical", "odd/even",
    "clockwise/counterclockwise anticlockwise", "good/bad", "success/failure", "clean/dirty",
    "accept accepted/reject rejected", "true/false", "correct/incorrect wrong", "win won/lose lost",
    "always/never", "all/none", "morning/afternoon/evening", "benign/malignant",
)  # fmt: skip
SIDE_OF = {
    word: (group, side)
    for group, sides in enumerate(EXCLUSIVE)
    for side, words in enumerate(sides.split("/"))
    for word in words.split()
}
ORDERED = re.compile(
    r"\b(?:rank\w*|order\w*|sequence\w*|steps?|sort\w*|first|chronolog\w*|alphabetical\w*|ascending"
    r"|descending|coordinates?|points?|vector|matrix|interval|tuple|bbox|box|bounding|positions?"
    r"|left to right|right to left|top to bottom|bottom to top|front to back|respectively"
    r"|clockwise|reihenfolge|nacheinander)\b|顺序|排序|步骤",
    re.IGNORECASE,
)
ASKS_NAME = re.compile(
    r"\b(?:who|whom|whose|where (?:was|were|did|does)|named?|called|capital|city|country|author"
    r"|artist|brand|company|person|president|wer|qui|quién)\b|谁",
    re.IGNORECASE,
)
GERMAN = re.compile(r"\b(?:welche[rsnm]?|ist|wie|der|das|und|ein|eine)\b", re.IGNORECASE)
ROMAN = re.compile(r"[ivx]{2,}|[a-hj-z]")  # also single letters, except the word i
MATH = re.compile(r"[\\^=<>±√π×÷]|\w\s*[+*]\s*\w|\d\s*/\s*\d|[(\[]\s*-?[\d.]+\s*,")
PRODUCT = re.compile(r"[\d.,]\s*\S{0,6}\s*(?:[x×*·÷]|\\times|\\cdot|\\div)\s*[\d.,(]")
FORMULA_UNIT = re.compile(r"(?<![\\\w])[^\W\d_]+|%|\\text\w*")
DECIMAL = re.compile(r"-?0*(\d*)\.(\d{2,})")
BRACKETED_NUMBER = re.compile(r"[(\[]\s*[$€£¥]?\s?\d[\d.,]*\s?[$€£¥]?\s*[)\]]")
# Case and order matter to the answers of these questions.
ASKS_CASE = re.compile(r"\b(?:formula|symbol|element|compound|molecule|variable|password)\b", re.I)
ASKS_SEVERAL = re.compile(r"\b(?:and|und|et|y)\b|\bname (?:is|of|on|in)\b|\bname\W*\Z|和|与", re.I)
SPELLING = re.compile(r"\d+|[^\W\d_]+|[,;:.!?/@]")
NUMBERED_LINE = re.compile(r"\s*1[.)]\s")
TUPLE = re.compile(r"[(\[]\s*[-−]?[\d.]+\s*,[^()\[\]]*[)\]]")
NAME = re.compile(r"\b[A-ZÀ-ÖØ-Þ][\w'’]*")


def compare_phrases(one: str, other: str, question: str) -> Sameness:
    """Compare two texts that answer a question.

    The same are texts with equal words and values in order, without case, punctuation, articles,
    an introduction ("The car is", if the question names the car) and an explanation after a short
    answer; equal lists; and yes or no. Different are opposite polarities, different values, codes,
    names, orders of the same words, and words that exclude each other. Anything else is undecided:
    synonyms, paraphrases, singular and plural.
    """
    one, other = unquoted(one), unquoted(other)
    if one == other:
        return SAME
    found = _compare_unquoted(one, other, question)
    if found is not SAME:
        return found
    bracketed = [BRACKETED_NUMBER.fullmatch(text) is not None for text in (one, other)]
    other_case = ASKS_CASE.search(question) and one.casefold() == other.casefold()
    as_text = not ASKS_TEXT.search(question) or _is_spelled_alike(one, other)
    return SAME if as_text and not other_case and bracketed[0] == bracketed[1] else UNDECIDED


def _is_spelled_alike(one: str, other: str) -> bool:
    """Return whether two texts have equal words, digits and points, after an introduction."""
    short, long = sorted((SPELLING.findall(normalize(text)) for text in (one, other)), key=len)
    at = len(long) - len(short)
    return long[at:] == short and (not at or not COPULAS.isdisjoint(long[:at]))


def _compare_unquoted(one: str, other: str, question: str) -> Sameness:
    if max(len(one), len(other)) > MAX_LENGTH:
        return SAME if normalize(one) == normalize(other) else UNDECIDED
    polarity = _compare_polarity(one, other, question)
    if polarity is not None:
        return polarity
    (ours, our_rest), (theirs, their_rest) = (
        split_explanation(each, question) for each in (one, other)
    )
    found = _compare_stated(ours, theirs, question)
    if found is SAME and our_rest and their_rest and _values_conflict(our_rest, their_rest):
        return UNDECIDED
    return found


def _compare_stated(ours: str, theirs: str, question: str) -> Sameness:
    one, other = phrase(ours), phrase(theirs)
    offers = ALTERNATIVES.search(question)
    asked = frozenset(() if offers else phrase(question[:MAX_LENGTH]).words)
    if _is_negated(one, other) or _is_negated(other, one):
        return DIFFERENT
    one, other = without_leads(one, other, asked)
    tuples = any(TUPLE.search(text) for text in (ours, theirs))
    if len(one.atoms) == len(other.atoms) == 1 and one.values and other.values and not tuples:
        return compare_values(one.values[0], other.values[0], question)
    if _is_math(ours) or _is_math(theirs):
        return compare_formulas(ours, theirs)
    numbered = all(NUMBERED_LINE.match(text) for text in (ours, theirs))
    lists = split_list(ours), split_list(theirs)
    listed = compare_lists(*lists, question, numbered=numbered)
    if listed is not UNDECIDED or numbered or (not one.words and min(map(len, lists)) > 1):
        return listed
    return _compare_atoms(one, other, question, asked)


def _compare_polarity(one: str, other: str, question: str) -> Sameness | None:
    """Compare answers that begin with yes or no; None if one of them does not."""
    said = POLARITY.match(one), POLARITY.match(other)
    if said[0] is None or said[1] is None:
        return None
    rests = one[said[0].end() :], other[said[1].end() :]
    if any(TAKEN_BACK.search(rest) or OPPOSITE.search(rest) for rest in rests):
        return UNDECIDED
    if bool(said[0]["yes"] or said[0]["yes2"]) != bool(said[1]["yes"] or said[1]["yes2"]):
        return DIFFERENT
    doubtful = any(map(retracts, rests))
    contradictory = all(phrase(rest).atoms for rest in rests) and (
        _compare_stated(*rests, question) is DIFFERENT
    )
    more = ASKS_MORE.search(question) and phrase(rests[0]).atoms != phrase(rests[1]).atoms
    return UNDECIDED if doubtful or contradictory or more or _values_conflict(*rests) else SAME


def _values_conflict(one: str, other: str) -> bool:
    ours, theirs = phrase(one[:MAX_LENGTH]).values, phrase(other[:MAX_LENGTH]).values
    return bool(ours and theirs) and ours != theirs


def _is_math(text: str) -> bool:
    plain = text if "\\" in text else plain_notation(text)
    return MATH.search(plain) is not None


def compare_formulas(one: str, other: str) -> Sameness:
    """Compare formulas by their tokens, or by value to two decimals or more.

    Formulas that differ only in numbers, signs or brackets are different; others may be equal in
    another form. Dimensions (2 × 6) are no product, and units must be equal.
    """
    ours, theirs = formula_tokens(one), formula_tokens(other)
    units = [sorted(FORMULA_UNIT.findall(text.casefold())) for text in (one, other)]
    if ours == theirs:
        return SAME if units[0].count("%") == units[1].count("%") else UNDECIDED
    values = formula_value(one), formula_value(other)
    if values[0] is not None and values[1] is not None:
        if not _equal_values(values[0], values[1], one, other):
            return DIFFERENT if round(values[0], 2) != round(values[1], 2) else UNDECIDED
        sizes = any(PRODUCT.search(text) for text in (one, other))
        return UNDECIDED if sizes or units[0] != units[1] else SAME
    changed = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b]
    unsigned = [[token for token in tokens if token not in "+-"] for tokens in (ours, theirs)]
    if unsigned[0] == unsigned[1]:
        return DIFFERENT
    swapped = Counter(ours) == Counter(theirs) and "," not in one
    letters = any(a.isalpha() or b.isalpha() for a, b in changed)
    return UNDECIDED if len(ours) != len(theirs) or swapped or letters else DIFFERENT


def _equal_values(one: float, other: float, text: str, other_text: str) -> bool:
    """Return whether two values are equal, or one is a decimal to which the other one rounds."""
    for value, decimal in ((one, other_text), (other, text)):
        found = DECIMAL.fullmatch(decimal.strip(" $"))
        digits = len((found[1] + found[2]).lstrip("0")) if found else 0
        if found and digits > 1 and round(value, len(found[2])) == float(found[0]):
            return True
    return math.isclose(one, other, rel_tol=1e-6)


def compare_lists(
    ours: Sequence[str], theirs: Sequence[str], question: str, *, numbered: bool = False
) -> Sameness:
    """Compare lists as sets, or in order if the question asks for an order or a position.

    Another order is undecided if the lists are numbered or have bare numbers, or if the question
    asks for several things: a width and a height. Lists of different length are different, unless
    one repeats items. A list and one of its items are different, except for places such as "Paris,
    France".
    """
    if min(len(ours), len(theirs)) < 2:
        return _compare_item(ours, theirs) if max(len(ours), len(theirs)) > 1 else UNDECIDED
    long = max(len(ours), len(theirs)) > MAX_ITEMS
    read = normalize if long else _joined
    one, other = ([*map(read, each)] for each in (ours, theirs))
    if one == other:
        return SAME
    ordered = ORDERED.search(question)
    if len(ours) != len(theirs):
        return DIFFERENT if ordered or set(one) != set(other) else UNDECIDED
    if ordered and sorted(one) == sorted(other):
        return DIFFERENT
    if long:
        return UNDECIDED
    aligned = combined(map(lambda a, b: compare_phrases(a, b, question), ours, theirs))
    if ordered or aligned is SAME:
        return aligned
    same = _match_items(list(ours), list(theirs), question)
    bare = any(phrase(item).values and not phrase(item).words for item in ours)
    fixed = numbered or bare or ASKS_SEVERAL.search(question)
    return UNDECIDED if fixed and same is SAME else same


def _joined(text: str) -> str:
    return " ".join(map(str, phrase(text).atoms))


def _match_items(ours: list[str], theirs: list[str], question: str) -> Sameness:
    for item in tuple(ours):
        equal = next((t for t in theirs if compare_phrases(item, t, question) is SAME), None)
        if equal is not None:
            ours.remove(item)
            theirs.remove(equal)
    outcomes = [[compare_phrases(item, t, question) for t in theirs] for item in ours]
    if any(set(row) == {DIFFERENT} for row in outcomes):
        return DIFFERENT
    return UNDECIDED if outcomes else SAME


def _compare_item(ours: Sequence[str], theirs: Sequence[str]) -> Sameness:
    items, single = (ours, theirs) if len(ours) > 1 else (theirs, ours)
    places = len(items) == 2 and all(item[:1].isupper() for item in items)
    single_text = phrase(single[0]).atoms if single else ()
    part = any(phrase(item).atoms == single_text for item in items)
    return DIFFERENT if part and not places else UNDECIDED


def _compare_atoms(one: Phrase, other: Phrase, question: str, asked: frozenset[str]) -> Sameness:
    """Compare the words and values of two phrases, by the first rule that decides."""
    if one.atoms == other.atoms and one.atoms:
        return SAME
    if not one.words and not other.words and not (one.values or other.values):
        return SAME if normalize(one.text) == normalize(other.text) != "" else UNDECIDED
    if _flat(one) == _flat(other):
        return SAME
    if _kinds(one) == _kinds(other):
        pairs = zip(one.values, other.values, strict=True)
        return combined(compare_values(*pair, question) for pair in pairs)
    if _squashed(one.text) == _squashed(other.text):  # "3, 5" and "3,5"
        return UNDECIDED
    if _is_negated(one, other) or _is_negated(other, one) or _is_opposite(one, other):
        return DIFFERENT
    if Counter(map(str, one.atoms)) == Counter(map(str, other.atoms)):
        return _compare_order(one, other)
    values = _compare_single_values(one, other, question, asked)
    if values is not None:
        return values
    if _codes_differ(one, other) or _exclude(one, other) or _names_differ(one, other, question):
        return DIFFERENT
    return DIFFERENT if _both_named(one, other, question) else UNDECIDED


def _kinds(one: Phrase) -> list[str]:
    return [atom if isinstance(atom, str) else "" for atom in one.atoms]


def _flat(one: Phrase) -> list[str]:
    """Return the words with codes and whole numbers in parts: AB-12 equals AB 12."""
    flat: list[str] = []
    for atom in one.atoms:
        if isinstance(atom, str):
            flat += CHUNK.findall(atom) or [atom]
        else:
            plain = isinstance(atom, Quantity) and atom.text.isdecimal()
            flat.append(atom.text if plain and isinstance(atom, Quantity) else str(atom))
    return flat


def _squashed(text: str) -> str:
    return "".join(normalize(text).split())


def _content(one: Phrase) -> Counter[str]:
    """Return the words that carry meaning, in the singular, and the values."""
    words = (atom if isinstance(atom, str) else str(atom) for atom in one.atoms)
    return Counter(_stem(word) for word in words if word not in FILLER and word not in NEGATIONS)


def _stem(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _negations(one: Phrase) -> int:
    return sum(word in NEGATIONS for word in one.words)


def _is_negated(one: Phrase, other: Phrase) -> bool:
    """Return whether the first phrase denies the second: all that it names is in the second."""
    if _negations(one) % 2 == 0 or _negations(other) % 2:
        return False
    content = _content(one)
    bare = [atom for atom in one.atoms if atom not in NEGATIONS]
    size = len(other.atoms)
    denied = any(
        one.atoms[at] in NEGATIONS and one.atoms[at + 1 : at + 1 + size] == other.atoms
        for at in range(len(one.atoms) - size)
    )
    return denied or bare == list(other.atoms) or (bool(content) and content <= _content(other))


def _is_opposite(one: Phrase, other: Phrase) -> bool:
    """Return whether the phrases differ in one word, with and without a negative prefix."""
    ours, theirs = _content(one), _content(other)
    left, right = list((ours - theirs).elements()), list((theirs - ours).elements())
    if len(left) != 1 or len(right) != 1:
        return False
    short, long = sorted((left[0], right[0]), key=len)
    return any(long == prefix + short for prefix in NEGATIVE_PREFIXES)


def _compare_order(one: Phrase, other: Phrase) -> Sameness:
    """Compare equal words in another order. A name with its first name last, and a sentence that
    begins with its adverbial, are undecided."""
    if ("," in one.text) != ("," in other.text):
        return UNDECIDED
    ours, theirs = list(map(str, one.atoms)), list(map(str, other.atoms))
    for at in range(1, len(ours)):
        if ours[at:] + ours[:at] == theirs and {ours[0], ours[at]} & PREPOSITIONS:
            return UNDECIDED
    return DIFFERENT


def _compare_single_values(
    one: Phrase, other: Phrase, question: str, asked: frozenset[str]
) -> Sameness | None:
    """Compare the values of two phrases with other words around them. None if none decides.

    Equal values are the same only if one phrase has fillers or words of the question that the other
    one lacks, not if each has: "5 cm wide" and "5 cm high".
    """
    ours, theirs = one.values[:MAX_ITEMS], other.values[:MAX_ITEMS]
    outcomes = [[compare_values(a, b, question) for b in theirs] for a in ours]
    if not outcomes or not theirs:
        return None
    if len(ours) == len(theirs) == 1:
        said = [Counter(word for word in p.words if word not in LIGHT) for p in (one, other)]
        left, right = said[0] - said[1], said[1] - said[0]
        says_nothing = {*one.words, *other.words} <= (FILLER - RELATIONS) | LIGHT | asked
        if outcomes[0][0] is SAME and says_nothing and not (left and right):
            return SAME
        falls = [DECREASE.search(p.text) is not None for p in (one, other)]
        if falls[0] != falls[1] and _size(ours[0]) == _size(theirs[0]):
            return UNDECIDED  # "-5 %" and "a decrease of 5 %"
        return DIFFERENT if outcomes[0][0] is DIFFERENT else None
    ours_differ = any(set(row) == {DIFFERENT} for row in outcomes)
    theirs_differ = any(set(column) == {DIFFERENT} for column in zip(*outcomes, strict=True))
    short = max(len(one.words), len(other.words)) <= SHORT
    return DIFFERENT if ours_differ and theirs_differ and short else None


def _size(value: StatedValue) -> Fraction | None:
    """Return the size of a number without its sign."""
    return abs(value.base()) if isinstance(value, Quantity) else None


def _codes_differ(one: Phrase, other: Phrase) -> bool:
    """Return whether each phrase has a code, a letter or a Roman number that the other one lacks,
    or whether equal words have other signs or numbers in their codes."""

    def codes(said: Phrase) -> set[str]:
        last = {word for word in said.atoms[1:][-1:] if word == "i"}
        return last | {w for w in said.words if ROMAN.fullmatch(w) or any(map(str.isdigit, w))}

    ours, theirs = codes(one), codes(other)
    if ours - theirs and theirs - ours:
        return True
    bare = [[w for w in p.words if not SIGN.fullmatch(w) and w not in "+-#"] for p in (one, other)]
    same_parts = [re.sub(r"\d+", "0", " ".join(_flat(p))) for p in (one, other)]
    return bool(bare[0] and bare[0] == bare[1]) or same_parts[0] == same_parts[1]


def _exclude(one: Phrase, other: Phrase) -> bool:
    """Return whether the phrases differ in words that exclude each other, such as colours."""
    ours, theirs = set(one.words), set(other.words)
    sides = [
        {SIDE_OF[word] for word in words if word in SIDE_OF}
        for words in (ours - theirs, theirs - ours)
    ]
    rests = [{w for w in words if w not in SIDE_OF and w not in FILLER} for words in (ours, theirs)]
    related = rests[0] <= rests[1] or rests[1] <= rests[0]
    return related and any(a == c and b != d for a, b in sides[0] for c, d in sides[1])


def _names_differ(one: Phrase, other: Phrase, question: str) -> bool:
    """Return whether each phrase has a name that the other one lacks: words in capitals that do not
    only begin a sentence. An acronym may be the other name."""
    ours, theirs = (_names(p.text, question) for p in (one, other))
    our_words, their_words = set(one.words), set(other.words)
    left, right = ours - their_words, theirs - our_words
    if not left or not right or _is_acronym(one, other) or _is_acronym(other, one):
        return False
    short = max(len(our_words), len(their_words)) <= 4
    return short or our_words - ours == their_words - theirs


def _names(text: str, question: str) -> set[str]:
    found = list(NAME.finditer(text))
    if GERMAN.search(f"{question} {text}") and not ASKS_NAME.search(question):
        return set()
    words = text.split()
    all_capital = len(words) > 1 and all(word[:1].isupper() for word in words)
    names = set()
    for one in found:
        begins = not re.search(r"\w\s*\Z|,\s*\Z", text[: one.start()])
        acronym = one[0].isupper() and 2 <= len(one[0]) <= 3
        if not begins or all_capital or acronym or ASKS_NAME.search(question):
            names.add(one[0].casefold())
    return names - FILLER


def _is_acronym(one: Phrase, other: Phrase) -> bool:
    short = "".join(one.words)
    initials = "".join(word[0] for word in other.words if word not in FILLER)
    return len(one.words) == 1 and len(initials) > 1 and short.startswith(initials[:2])


def _both_named(one: Phrase, other: Phrase, question: str) -> bool:
    """Return whether the question names both answers, as alternatives."""
    asked = f" {' '.join(map(str, phrase(question[:MAX_LENGTH]).atoms))} "
    texts = [f" {' '.join(map(str, p.atoms))} " for p in (one, other)]
    apart = texts[0] not in texts[1] and texts[1] not in texts[0]
    return apart and all(text.strip() and text in asked for text in texts)

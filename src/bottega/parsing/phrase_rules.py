"""Rules that decide whether two texts say the same: values, negations, codes, names, order."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from bottega.parsing.answers import normalize
from bottega.parsing.final_answers import TAKEN_BACK
from bottega.parsing.formulas import formula_tokens, formula_value
from bottega.parsing.phrases import (
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
    parse_phrase,
    retracts,
    split_explanation,
    split_list,
    unquoted,
    without_leads,
)
from bottega.parsing.quantities import (
    DIFFERENT,
    SAME,
    UNDECIDED,
    Quantity,
    Sameness,
    asks_text,
    combined,
    compare_values,
    word_set,
)

SHORT = 8  # words of a text that states one thing
YES = word_set("yes yeah yep true correct ja oui sí да はい 是 是的 对 对的 有")
NO = word_set("no nope false incorrect nein non нет いいえ 不是 不对 不 否 没有")
FIRST_WORD = re.compile(r"\W*([^\W\d_]+)")
# What follows yes or no as an answer, unlike "No parking", "No. 5" or "has no helmet".
AFTER_POLARITY = re.compile(
    r"(?!\.?\s*\d)\s*(?:\Z|\n|[^\w\s])|\s+(?:it|there|they|this|that|he|she|i|we|you|the)\b", re.I
)
_POLARITY = "|".join(sorted(YES | NO, reverse=True))
OPPOSITE = re.compile(
    rf"(?:\A|[^\w\s'])\s*(?:(?:and|but|so|or)\s+)?(?:{_POLARITY})\b|\b(?:{_POLARITY})\W*\Z", re.I
)
YES_NO_QUESTION = re.compile(
    r"\s*(?:is|are|was|were|do|does|did|has|have|can|will|should)\b(?![^?]*\bor\b)[^?]{1,300}(?:\?|\Z)",
    re.IGNORECASE,
)
ASKS_MORE = re.compile(
    r"\bif so\b|(?:,|\band)\s+(?:at |in |for |by )?(?:which|what|who|where|when|how|why)\b", re.I
)
OFFERS = word_set(
    "and or nor not no than vs versus without und oder nicht et ou y o 和 或 与 不 还"
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
    "accept accepted/reject rejected", "correct/wrong", "win won/lose lost",
    "morning/afternoon/evening", "benign/malignant",
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
    r"|(?:left|right|top|bottom|front) to \w+|respectively|clockwise|reihenfolge|nacheinander)\b"
    r"|顺序|排序|步骤",
    re.IGNORECASE,
)
ASKS_NAME = re.compile(
    r"\b(?:who|whom|whose|where (?:was|were|did|does)|named?|called|capital|city|country|author"
    r"|artist|brand|company|person|president|wer|qui|quién)\b|谁",
    re.IGNORECASE,
)
# Case matters to the answers of these questions.
ASKS_CASE = re.compile(r"\b(?:formula|symbol|element|compound|molecule|variable|password)\b", re.I)
ASKS_SEVERAL = re.compile(r"\b(?:and|und|et|y)\b|\bname (?:is|of|on|in)\b|\bname\W*\Z|和|与", re.I)
GERMAN = word_set("welche welcher welches welchen welchem ist wie der das und ein eine")
FALLS = re.compile(
    r"\b(?:de|re)(?:creas|duc|clin)|\b(?:drop|fall|fell|lost|loss|lower|less|down|below|shr[au]nk)",
    re.IGNORECASE,
)
COMMUTATIVE = word_set("+ * × · =")
NAME = re.compile(r"\b[A-ZÀ-ÖØ-Þ][\w'’]*")
ROMAN = re.compile(r"[ivx]{2,}|[a-hj-z]")  # also single letters, except the word i
CHUNK = re.compile(r"\d+|[^\W\d_]+|[.:/]")
SPELLING = re.compile(r"\d+|[^\W\d_]+|[,;:.!?/@]")
# A number or a tuple of numbers in brackets.
BRACKETED = re.compile(r"(?:\\left)?[(\[]\s*[-−$€£¥]?\s?[\d.][^()\[\]]*[)\]]")
NUMBERED_LINE = re.compile(r"\s*1[.)]\s")
FORMULA = re.compile(r"\\[a-z]|\w\s*[+*^=<>≤≥]\s*[\w(\\-]|\d\(|\)\(")
PRODUCT = re.compile(r"[\d.,]\s*\S{0,6}\s*(?:[x×*·÷]|\\times|\\cdot|\\div)\s*[\d.,(]")
FORMULA_UNIT = re.compile(r"(?<![\\\w])[^\W\d_]+|%")
# A decimal with two digits or more that are significant.
DECIMAL = re.compile(r"-?(?=.*[1-9].*\d)\d*\.(\d{2,})")


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
    if max(len(one), len(other)) > MAX_LENGTH:
        return SAME if normalize(one) == normalize(other) else UNDECIDED
    found = _compare_polarity(one, other, question) or _compare_statements(
        split_explanation(one, question)[0], split_explanation(other, question)[0], question
    )
    brackets = {re.sub(r"[^()\[\]]", "", t) if BRACKETED.fullmatch(t) else "" for t in (one, other)}
    if found is SAME and len(brackets) > 1:
        return UNDECIDED if "" in brackets else DIFFERENT
    only_case = ASKS_CASE.search(question) and one.casefold() == other.casefold()
    unlike = only_case or (asks_text(question) and not _is_spelled_alike(one, other))
    return UNDECIDED if found is SAME and unlike else found


def _is_spelled_alike(one: str, other: str) -> bool:
    """Return whether two texts have equal words, digits and points, after an introduction."""
    short, long = sorted((SPELLING.findall(normalize(text)) for text in (one, other)), key=len)
    at = len(long) - len(short)
    return long[at:] == short and (not at or not COPULAS.isdisjoint(long[:at]))


def _compare_polarity(one: str, other: str, question: str) -> Sameness | None:
    """Compare answers that say yes or no; None if one of them says neither."""
    (ours, our_rest), (theirs, their_rest) = (_split_polarity(t, question) for t in (one, other))
    if ours is None or theirs is None:
        statement, rest = (one, their_rest) if ours is None else (other, our_rest)
        explained = YES_NO_QUESTION.match(question) and parse_phrase(rest).atoms
        found = _compare_statements(statement, rest, question) if explained else UNDECIDED
        return None if found is UNDECIDED else found
    rests = our_rest, their_rest
    if any(TAKEN_BACK.search(rest) or OPPOSITE.search(rest) for rest in rests):
        return UNDECIDED
    if ours != theirs:
        return DIFFERENT
    said = [parse_phrase(rest) for rest in rests]
    values_conflict = all(each.values for each in said) and said[0].values != said[1].values
    contradictory = all(each.atoms for each in said) and (
        _compare_statements(*rests, question) is DIFFERENT
    )
    more = ASKS_MORE.search(question) and said[0].atoms != said[1].atoms
    doubtful = values_conflict or contradictory or more or any(map(retracts, rests))
    return UNDECIDED if doubtful else SAME


def _split_polarity(text: str, question: str) -> tuple[bool | None, str]:
    """Return whether an answer says yes, and the text after that word. A statement in the words of
    a question for yes or no affirms or denies it: "The seal is not broken."."""
    found = FIRST_WORD.match(text)
    word, rest = (found[1].casefold(), text[found.end() :]) if found else ("", "")
    if word in YES | NO and (AFTER_POLARITY.match(rest) or (word == "yes" and rest[:1] == " ")):
        return word in YES, rest
    asks = YES_NO_QUESTION.match(question)
    if asks is None:
        return None, ""
    question_atoms, atoms = (
        [a for a in parse_phrase(each).atoms if a not in LIGHT and a not in ("any", "do", "does")]
        for each in (asks[0], text)
    )
    content = [atom for atom in atoms if atom not in NEGATIONS]
    if not content or content != question_atoms:
        return None, ""
    return (len(atoms) - len(content)) % 2 == 0, ""


def _compare_statements(ours: str, theirs: str, question: str) -> Sameness:
    one, other = parse_phrase(ours), parse_phrase(theirs)
    question_words = frozenset(parse_phrase(question[:MAX_LENGTH]).words)
    offers = not OFFERS.isdisjoint(question_words)
    one, other = without_leads(one, other, question_words, offers=offers)
    if len(one.atoms) == len(other.atoms) == 1 and one.values and other.values:
        return compare_values(one.values[0], other.values[0], question)
    if (by_value := compare_formulas(ours, theirs)) is not None:
        return by_value
    lengths = {len(formula_tokens(text)) for text in (ours, theirs)}
    if len(lengths) > 1 and (FORMULA.search(ours) or FORMULA.search(theirs)):
        return UNDECIDED  # maybe another form: 2(x + 1) and 2x + 2
    numbered = all(NUMBERED_LINE.match(text) for text in (ours, theirs))
    lists = split_list(ours), split_list(theirs)
    listed = compare_lists(*lists, question, numbered=numbered)
    if listed is not UNDECIDED or numbered or (not one.words and min(map(len, lists)) > 1):
        return listed
    silent = frozenset() if offers else question_words
    return _compare_atoms(one, other, question, silent)


def compare_formulas(one: str, other: str) -> Sameness | None:
    """Compare formulas by value to two decimals or more; None if one has no value.

    Dimensions (2 × 6) are no product, and units must be equal.
    """
    values = formula_value(one), formula_value(other)
    units = [sorted(FORMULA_UNIT.findall(text.casefold())) for text in (one, other)]
    if values[0] is None or values[1] is None:
        return None
    if not _equal_values(values[0], values[1], one, other):
        return DIFFERENT if round(values[0], 2) != round(values[1], 2) else UNDECIDED
    sizes = PRODUCT.search(one) or PRODUCT.search(other)
    return UNDECIDED if sizes or units[0] != units[1] else SAME


def _equal_values(one: float, other: float, text: str, other_text: str) -> bool:
    """Return whether two values are equal, or one is a decimal to which the other one rounds."""
    for value, decimal in ((one, other_text), (other, text)):
        found = DECIMAL.fullmatch(decimal.strip(" $"))
        if found and round(value, len(found[1])) == float(found[0]):
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
    long = max(len(ours), len(theirs)) > MAX_ITEMS
    one, other = (
        [normalize(t) if long else _joined(parse_phrase(t)) for t in ts] for ts in (ours, theirs)
    )
    if min(len(one), len(other)) < 2:
        is_place = len(one + other) == 3 and all(item[:1].isupper() for item in (*ours, *theirs))
        is_part = len(one) != len(other) and set(one) & set(other)
        return DIFFERENT if is_part and not is_place else UNDECIDED
    if one == other:
        return SAME
    ordered = ORDERED.search(question) is not None
    if len(one) != len(other):
        return DIFFERENT if ordered or set(one) != set(other) else UNDECIDED
    if ordered and sorted(one) == sorted(other):
        return DIFFERENT
    if long:
        return UNDECIDED
    aligned = combined(compare_phrases(*pair, question) for pair in zip(ours, theirs, strict=True))
    if ordered or aligned is SAME:
        return aligned
    found = _match_items(list(ours), list(theirs), question)
    bare = any(phrase.values and not phrase.words for phrase in map(parse_phrase, ours))
    fixed = numbered or bare or ASKS_SEVERAL.search(question)
    return UNDECIDED if fixed and found is SAME else found


def _joined(phrase: Phrase) -> str:
    return " ".join(map(str, phrase.atoms))


def _match_items(ours: list[str], theirs: list[str], question: str) -> Sameness:
    for item in tuple(ours):
        equal = next((t for t in theirs if compare_phrases(item, t, question) is SAME), None)
        if equal is not None:
            ours.remove(item)
            theirs.remove(equal)
    outcomes = [[compare_phrases(item, t, question) for t in theirs] for item in ours]
    unmatched = any(set(row) == {DIFFERENT} for row in (*outcomes, *zip(*outcomes, strict=True)))
    return DIFFERENT if unmatched else UNDECIDED if outcomes else SAME


def _compare_atoms(one: Phrase, other: Phrase, question: str, silent: frozenset[str]) -> Sameness:
    """Compare the words and values of two phrases, by the first rule that decides."""
    if not one.atoms and not other.atoms:
        return SAME if normalize(one.text) == normalize(other.text) != "" else UNDECIDED
    if _flat(one) == _flat(other):
        return SAME
    if _without_values(one) == _without_values(other):
        pairs = zip(one.values, other.values, strict=True)
        return combined(compare_values(*pair, question) for pair in pairs)
    if len({normalize(phrase.text).replace(" ", "") for phrase in (one, other)}) == 1:
        return UNDECIDED  # "3, 5" and "3,5"
    if _denies(one, other) or _denies(other, one) or _is_opposite(one, other):
        return DIFFERENT
    if Counter(map(str, one.atoms)) == Counter(map(str, other.atoms)):
        return _compare_order(one, other)
    if (by_value := _compare_single_values(one, other, question, silent)) is not None:
        return by_value
    apart = (
        _codes_differ(one, other)
        or _exclude(one, other)
        or _names_differ(one, other, question)
        or _are_alternatives(one, other, question)
    )
    return DIFFERENT if apart else UNDECIDED


def _without_values(phrase: Phrase) -> list[str]:
    return [atom if isinstance(atom, str) else "" for atom in phrase.atoms]


def _flat(phrase: Phrase) -> list[str]:
    """Return the words with codes and whole numbers in parts: AB-12 equals AB 12."""
    flat: list[str] = []
    for atom in phrase.atoms:
        if isinstance(atom, Quantity) and atom.text.isdecimal():
            flat.append(atom.text)
        else:
            flat += (isinstance(atom, str) and CHUNK.findall(atom)) or [str(atom)]
    return flat


def _content(phrase: Phrase) -> Counter[str]:
    """Return the words that carry meaning, in the singular, and the values."""
    words = (str(atom) for atom in phrase.atoms if atom not in FILLER | NEGATIONS)
    return Counter(re.sub(r"(?<=\w{3})(?<!s)s\Z", "", word) for word in words)


def _denies(one: Phrase, other: Phrase) -> bool:
    """Return whether the first phrase denies the second: all that it names is in the second."""
    negations = [sum(word in NEGATIONS for word in phrase.words) for phrase in (one, other)]
    if negations[0] % 2 == 0 or negations[1] % 2:
        return False
    content, said = _content(one), tuple(atom for atom in one.atoms if atom not in NEGATIONS)
    denied = any(
        word in NEGATIONS and one.atoms[at : at + len(other.atoms)] == other.atoms
        for at, word in enumerate(one.atoms, 1)
    )
    return denied or said == other.atoms or (bool(content) and content <= _content(other))


def _is_opposite(one: Phrase, other: Phrase) -> bool:
    """Return whether the phrases differ in one word, with and without a negative prefix."""
    ours, theirs = _content(one), _content(other)
    changed = sorted([*(ours - theirs).elements(), *(theirs - ours).elements()], key=len)
    return len(changed) == 2 and changed[1] in (p + changed[0] for p in NEGATIVE_PREFIXES)


def _compare_order(one: Phrase, other: Phrase) -> Sameness:
    """Compare equal words in another order. A name with its first name last, an exchange around a
    copula ("Anna is the winner"), and a sentence that begins with its adverbial are undecided."""
    if ("," in one.text) != ("," in other.text) or not COMMUTATIVE.isdisjoint(one.atoms):
        return UNDECIDED
    ours, theirs = list(map(str, one.atoms)), list(map(str, other.atoms))
    for at in range(1, len(ours)):
        moved = ours[at:] + ours[:at] == theirs and {ours[0], ours[at]} & PREPOSITIONS
        if moved or (ours[at] in COPULAS and [*ours[at + 1 :], ours[at], *ours[:at]] == theirs):
            return UNDECIDED
    return DIFFERENT


def _compare_single_values(
    one: Phrase, other: Phrase, question: str, silent: frozenset[str]
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
        words = [{*phrase.words} - LIGHT for phrase in (one, other)]
        says_nothing = words[0] | words[1] <= (FILLER - RELATIONS) | silent
        if (
            outcomes[0][0] is SAME
            and says_nothing
            and (words[0] <= words[1] or words[1] <= words[0])
        ):
            return SAME
        falls = [FALLS.search(phrase.text) is not None for phrase in (one, other)]
        sizes = [abs(v.base()) for v in (*ours, *theirs) if isinstance(v, Quantity)]
        if falls[0] != falls[1] and len(set(sizes)) == 1 and len(sizes) == 2:
            return UNDECIDED  # "-5 %" and "a decrease of 5 %"
        return DIFFERENT if outcomes[0][0] is DIFFERENT else None
    differ = [
        any(set(row) == {DIFFERENT} for row in rows)
        for rows in (outcomes, zip(*outcomes, strict=True))
    ]
    short = max(len(one.words), len(other.words)) <= SHORT
    return DIFFERENT if all(differ) and short else None


def _codes_differ(one: Phrase, other: Phrase) -> bool:
    """Return whether each phrase has a code, a letter or a Roman number that the other one lacks,
    or whether equal words have other signs or numbers in their codes."""
    ours, theirs = (
        {w for w in phrase.words if ROMAN.fullmatch(w) or any(map(str.isdigit, w))}
        | {word for word in phrase.atoms[1:][-1:] if word == "i"}
        for phrase in (one, other)
    )
    bare = [
        [w for w in phrase.words if not SIGN.fullmatch(w) and w not in "+-#"]
        for phrase in (one, other)
    ]
    parts = [re.sub(r"\d+", "0", " ".join(_flat(phrase))) for phrase in (one, other)]
    both = bool(ours - theirs and theirs - ours)
    return both or bool(bare[0] and bare[0] == bare[1]) or parts[0] == parts[1]


def _exclude(one: Phrase, other: Phrase) -> bool:
    """Return whether the phrases differ in words that exclude each other, such as colours."""
    ours, theirs = set(one.words), set(other.words)
    sides = [
        {SIDE_OF[w] for w in words if w in SIDE_OF} for words in (ours - theirs, theirs - ours)
    ]
    rests = [words - SIDE_OF.keys() - FILLER for words in (ours, theirs)]
    related = rests[0] <= rests[1] or rests[1] <= rests[0]
    return related and any(a == c and b != d for a, b in sides[0] for c, d in sides[1])


def _names_differ(one: Phrase, other: Phrase, question: str) -> bool:
    """Return whether each phrase has a name that the other one lacks. An acronym may be the other
    name."""
    ours, theirs = (_names(phrase.text, question) for phrase in (one, other))
    our_words, their_words = set(one.words), set(other.words)
    if ours <= their_words or theirs <= our_words:
        return False
    if _is_acronym(one, other) or _is_acronym(other, one):
        return False
    short = max(len(our_words), len(their_words)) <= 4
    return short or our_words - ours == their_words - theirs


def _names(text: str, question: str) -> set[str]:
    """Return words in capitals that do not only begin a sentence or, in German, are nouns."""
    asks_name, words = ASKS_NAME.search(question), text.split()
    if not asks_name and not GERMAN.isdisjoint(re.findall(r"\w+", f"{question} {text}".lower())):
        return set()
    all_capital = len(words) > 1 and all(word[:1].isupper() for word in words)
    names = {
        found[0].casefold()
        for found in NAME.finditer(text)
        if asks_name
        or all_capital
        or re.search(r"[\w,]\s*\Z", text[: found.start()])
        or (found[0].isupper() and len(found[0]) in (2, 3))
    }
    return names - FILLER


def _is_acronym(one: Phrase, other: Phrase) -> bool:
    initials = "".join(word[0] for word in other.words if word not in FILLER)
    return len(one.words) == 1 and len(initials) > 1 and one.words[0].startswith(initials[:2])


def _are_alternatives(one: Phrase, other: Phrase, question: str) -> bool:
    """Return whether the question names both answers, as alternatives."""
    offered = f" {_joined(parse_phrase(question[:MAX_LENGTH]))} "
    texts = [f" {_joined(phrase)} " for phrase in (one, other)]
    apart = texts[0] not in texts[1] and texts[1] not in texts[0]
    return apart and all(text.strip() and text in offered for text in texts)

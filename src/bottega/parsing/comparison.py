"""Comparison of two answers or replies: same, different or undecided."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from bottega.parsing.answers import find_choice, normalize
from bottega.parsing.choices import ChoiceParser
from bottega.parsing.final_answers import TAKEN_BACK, FinalAnswerParser, stated_part
from bottega.parsing.formulas import formula_value
from bottega.parsing.labels import LabelParser, stated_label
from bottega.parsing.phrase_rules import (
    ORDERED,
    compare_formulas,
    compare_lists,
    compare_phrases,
)
from bottega.parsing.phrases import MAX_LENGTH, phrase
from bottega.parsing.quantities import (
    DIFFERENT,
    SAME,
    UNDECIDED,
    Sameness,
    combined,
    compare_values,
)
from bottega.parsing.replies import FENCE, first_turn, strip_thinking, unwrap
from bottega.types import Answer, Completion, Query

# Version of these rules: stored outcomes of another version are not comparable.
COMPARISON_RULES = 2
# "B+", "C#", "F♯" and "-B" are not letters.
AROUND_LETTER = r"[\s*_()\[\].,:;!?`\"'“”]*"
LETTER = re.compile(
    rf"(?:(?i:option|choice)\s+)?{AROUND_LETTER}([A-Z])(?:(?P<bare>{AROUND_LETTER})|[.):]\s.*)",
    re.DOTALL,
)
OPTION = re.compile(r"^[ \t]*\(?([A-Z])[).:][ \t]+(\S.*)$", re.MULTILINE)
LISTED = re.compile(r"[,;|\n]+(?: ?and )?| and ", re.IGNORECASE)
REFUSAL = re.compile(
    r"\W*(?:(?:i\W?(?:a)?m )?(?:so |very )?sorry\b.*|as an ai\b.*|unknown|unclear|n/a|no answer"
    r"|(?:i have )?no idea"
    r"|not sure|(?:i|we|it|this)?\s*(?:can ?not|can't|could not|couldn't"
    r"|(?:am |'m )?(?:unable|not able) to)\s+(?:\w+ )?(?:be )?(?:determined?|answer(?:ed)?|identify"
    r"|identified|tell|say|help|assist|provide|view|process|access|comply|recogni[sz]e"
    r"|see (?:the|an|any|this) (?:image|picture|photo))\b.*"
    r"|i (?:do not|don't) (?:know|have enough)\b.*|i(?: am|'m) not sure\b.*"
    r"|(?:there is )?(?:not enough|insufficient) information\b.*"
    r"|.{0,4}(?:我不知道|不知道|无法|抱歉|对不起).*"
    r"|(?:es tut mir leid|ich wei(?:ß|ss) (?:es )?nicht|je ne sais pas|désolé|no (?:lo )?sé"
    r"|lo siento)\b.*)\W*",
    re.IGNORECASE | re.DOTALL,
)
STILL_ANSWERS = re.compile(
    r"\b(?:probably|likely|looks like|answer is)\b|\bbut\b(?!.{0,12}(?:not|n't|unable)\b)", re.I
)
# A sentence with such a word may name the options that it does not choose.
DENIES = re.compile(
    r"\b(?:not|no|nor|never|neither|either|or|without|cannot|unable|except|hardly|un\w*likely|kein\w*"
    r"|nicht|rule[sd]? out|exclud\w*|eliminat\w*|wrong|incorrect|instead|rather)\b|n['’]t\b|[不非]",
    re.I,
)
MAX_REFUSAL = 400
# Fields that hold the answer of an object with others, such as a confidence.
ANSWER_FIELDS = ("answer", "label", "result", "value", "class", "category", "prediction", "output")
MAX_DEPTH = 50


def compare_replies(one: str, other: str, query: Query) -> Sameness:
    """Compare two raw replies to a query by their final answers.

    Thinking is ignored. The final answer is the content of the last `\\boxed{}`, the text after
    "Answer:" or "the answer is", or the whole reply. An empty reply and a refusal ("I cannot tell")
    differ from any answer; two of them are undecided. See `same_answer` for the rules.
    """
    texts = [strip_thinking(reply) for reply in (one, other)]
    return _compare(texts[0], texts[1], with_options(query))


def decided_agreement(one: str, other: str, query: Query, /) -> float | None:
    """Return 1.0 if `compare_replies` finds two replies the same, 0.0 if different, else None."""
    return compare_replies(one, other, query).decided


def same_answer(one: Answer, other: Answer, query: Query, /) -> Sameness:
    """Compare two answers to a query.

    Two JSON objects or arrays are compared by field (`field_agreement` gives the share of equal
    fields). Otherwise, options are compared by `same_choice` if the query has choices or lists
    options by letter, and other texts by `same_words`. Equal sets of labels are the same. An
    invalid answer differs from a valid one.
    """
    if not (one.valid and other.valid):
        return _compare_missing(one, other)
    if len(one.labels) > 1 and set(one.labels) == set(other.labels):
        return SAME
    query = with_options(query)
    if not query.choices and one.labels and one.labels == other.labels:
        return SAME
    if query.choices and (_labels(one, query) or _labels(other, query)):
        return same_choice(one, other, query)
    return _compare(one.text, other.text, query)


def equal_answers(one: Answer, other: Answer, query: Query, /) -> float:
    """Return 1.0 if `same_answer` finds two valid answers the same, else 0.0.

    Undecided counts as different. Rewards and verification use this function.
    """
    return same_answer(one, other, query).score


def _compare_missing(one: Answer, other: Answer) -> Sameness:
    """Compare an invalid answer or a refusal: different from an answer, undecided with another."""
    answers = [answer.valid and not is_refusal(answer.text) for answer in (one, other)]
    return DIFFERENT if any(answers) else UNDECIDED


def _compare(one: str, other: str, query: Query) -> Sameness:
    if one.strip() == other.strip() and not is_refusal(final_answer(one, query)):
        return SAME
    ours, theirs = _json(one), _json(other)
    if (ours is not None or theirs is not None) and not _is_labelled((ours, theirs), query):
        pair = one if ours is None else ours, other if theirs is None else theirs
        return _compare_json(*pair, query)
    if query.choices:
        return same_choice(Answer(one), Answer(other), query)
    return same_words(Answer(one), Answer(other), query)


def same_choice(one: Answer, other: Answer, query: Query, /) -> Sameness:
    """Compare two answers by the options that they name.

    An answer names an option by its text, its letter, or a value equal to one option only (0.5
    names \\frac{1}{2}, and 0.12 m names 12 cm). Other answers are compared by `same_words`.
    """
    if not (one.valid and other.valid):
        return _compare_missing(one, other)
    query = with_options(query)
    if any(len(_labels(answer, query)) > 1 for answer in (one, other)):
        return SAME if _options_in(one, query) == _options_in(other, query) else DIFFERENT
    ours, theirs = _option_in(one, query), _option_in(other, query)
    lists = _options_in(one, query), _options_in(other, query)
    if max(map(len, lists)) > 1 and all(lists):
        return SAME if lists[0] == lists[1] else DIFFERENT
    if ours and theirs:
        return SAME if ours == theirs else DIFFERENT
    first, second = Answer(next(iter(ours), one.text)), Answer(next(iter(theirs), other.text))
    return same_words(first, second, Query(query.text))


def same_number(one: Answer, other: Answer, query: Query, /) -> Sameness:
    """Compare two values in any notation: 1,000 and 1000.0, five and 5, 12 cm and 0.12 m.

    Whole numbers must be equal, others within a millionth; formulas to two decimals, as in
    MathVision's metric: \\sqrt{2} and 1.41. See `compare_values` for units, percentages, dates and
    ambiguous notations. A text without a single value is undecided.
    """
    if not (one.valid and other.valid):
        return _compare_missing(one, other)
    return _compare_numbers(final_answer(one.text, query), final_answer(other.text, query), query)


def same_words(one: Answer, other: Answer, query: Query, /) -> Sameness:
    """Compare two texts by the rules of `compare_phrases`. A refusal differs from an answer."""
    if not (one.valid and other.valid):
        return _compare_missing(one, other)
    ours, theirs = (final_answer(answer.text, query) for answer in (one, other))
    refused = [is_refusal(text) for text in (ours, theirs)]
    if any(refused):
        return UNDECIDED if all(refused) else DIFFERENT
    bare = [text.upper() if len(text) == 1 else text.replace("*", "") for text in (ours, theirs)]
    letters = [LETTER.fullmatch(text) for text in bare]
    if letters[0] and letters[1] and any(found and found["bare"] is not None for found in letters):
        return SAME if letters[0][1] == letters[1][1] else DIFFERENT
    return compare_phrases(ours, theirs, query.text)


def is_refusal(text: str) -> bool:
    """Return whether a text is empty or declines to answer."""
    if not text.strip():
        return True
    brief = text.strip()[:MAX_REFUSAL]
    refused = REFUSAL.fullmatch(unicodedata.normalize("NFKC", brief).replace("’", "'"))
    return refused is not None and not STILL_ANSWERS.search(brief)


def field_agreement(one: str, other: str, query: Query) -> float | None:
    """Return the share of equal fields of two replies that are JSON objects, else None.

    Fields of nested objects count singly, and an array is one field. A field that only one object
    has counts as unequal, unless it is null.
    """
    ours, theirs = _json(strip_thinking(one)), _json(strip_thinking(other))
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return None
    outcomes = [found for _, found in _compare_fields(ours, theirs, query)]
    return sum(found.score for found in outcomes) / len(outcomes) if outcomes else 1.0


def _json(reply: str) -> object:
    """Return the object or array that a reply consists of, without fences and text before it."""
    text = FENCE.sub("", first_turn(reply)).strip()
    starts = [at for at in (text.find("{"), text.find("[")) if at >= 0]
    if not starts or text[-1] not in "]}":
        return None
    before = text[: min(starts)].strip()
    if before and not before.endswith(":"):
        return None
    try:
        found: object = json.loads(text[min(starts) :], parse_float=_float, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) else None


def _float(text: str) -> float | str:
    return float(text) if math.isfinite(float(text)) else text


def _is_labelled(data: Sequence[object], query: Query) -> bool:
    """Return whether a query with choices asks for less than these objects: for one field."""
    return bool(query.choices) and all(
        not isinstance(each, dict) or len(each) == 1 for each in data
    )


def _compare_json(
    one: object, other: object, query: Query, key: str = "", depth: int = 0
) -> Sameness:
    """Compare two parsed values, or one and the text of a reply.

    Objects are compared by field, in any order; a missing field equals null. Arrays are compared as
    lists of answers. A word in a field is a label: two different ones are different.
    """
    if one == other and type(one) is type(other) and not isinstance(one, dict | list):
        return SAME
    if depth > MAX_DEPTH:
        return UNDECIDED
    if isinstance(one, dict) and isinstance(other, dict):
        return combined(found for _, found in _compare_fields(one, other, query, depth))
    if isinstance(one, list) and isinstance(other, list):
        return _compare_arrays(one, other, query, key, depth)
    for each, text in ((one, other), (other, one)):
        if isinstance(each, dict):
            field = _answer_field(each)
            return (
                UNDECIDED
                if field is None or isinstance(text, list)
                else _compare_json(each[field], text, query, key, depth + 1)
            )
        if isinstance(each, list):
            scalars = all(not isinstance(item, dict | list) for item in each)
            return (
                _compare_texts(", ".join(map(_text, each)), _text(text), query, key)
                if scalars and not depth
                else DIFFERENT
            )
    if isinstance(one, int | float) and isinstance(other, int | float):
        same_type = isinstance(one, bool) == isinstance(other, bool)
        return (SAME if one == other else DIFFERENT) if same_type else UNDECIDED
    if one is None or other is None:
        return DIFFERENT
    return _compare_texts(_text(one), _text(other), query, key)


def _compare_fields(
    one: Mapping[str, object], other: Mapping[str, object], query: Query, depth: int = 0
) -> list[tuple[str, Sameness]]:
    """Return the outcome of each field of two objects; the names of fields have no case."""
    ours, theirs = _by_name(one), _by_name(other)
    found: list[tuple[str, Sameness]] = []
    for name in dict.fromkeys((*ours, *theirs)):
        pair = ours.get(name), theirs.get(name)
        if isinstance(pair[0], dict) and isinstance(pair[1], dict) and depth < MAX_DEPTH:
            found += _compare_fields(pair[0], pair[1], query, depth + 1)
        else:
            found.append((name, _compare_json(*pair, query, name, depth + 1)))
    return found


def _by_name(fields: Mapping[str, object]) -> Mapping[str, object]:
    named = {normalize(name): value for name, value in fields.items()}
    return named if len(named) == len(fields) else fields


def _answer_field(fields: Mapping[str, object]) -> str | None:
    if len(fields) == 1:
        return next(iter(fields))
    return next((name for name in fields if normalize(name) in ANSWER_FIELDS), None)


def _compare_arrays(
    one: Sequence[object], other: Sequence[object], query: Query, key: str, depth: int
) -> Sameness:
    if json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True):
        return SAME
    if len(one) == len(other) == 1:
        return _compare_json(one[0], other[0], query, key, depth + 1)
    if all(not isinstance(item, dict | list) for item in (*one, *other)):
        return compare_lists([*map(_text, one)], [*map(_text, other)], f"{query.text} {key}")
    if len(one) != len(other):
        return DIFFERENT
    ours, theirs = (
        sorted(json.dumps(item, sort_keys=True) for item in each) for each in (one, other)
    )
    if ours == theirs:
        is_set = all(isinstance(item, dict) for item in one)
        return SAME if is_set and not ORDERED.search(f"{query.text} {key}") else UNDECIDED
    return combined(
        _compare_json(a, b, query, key, depth + 1) for a, b in zip(one, other, strict=True)
    )


def _compare_texts(one: str, other: str, query: Query, key: str) -> Sameness:
    """Compare the texts of two fields, or of a field and a reply."""
    same = same_words(Answer(one), Answer(other), Query(f"{query.text} {key}"))
    is_label = key and same is UNDECIDED and not any(map(str.isdigit, one + other))
    labels = is_label and len(one.split()) == len(other.split()) == 1
    return DIFFERENT if labels else same


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def with_options(query: Query) -> Query:
    """Return the query with the options listed in its text, if it has no choices."""
    return query if query.choices else Query(query.text, choices=_options(query.text))


def final_answer(reply: str, query: Query) -> str:
    """Return the text of the chosen option, or else the final answer of the reply."""
    reply = unwrap(reply) if "<" in reply or "`" in reply else reply
    if (taken_back := _without_choice(reply, query)) is not None:
        return taken_back
    said = FinalAnswerParser()(query, Completion(reply)).text
    if said[:1].isdigit():  # the parser strips the dollar signs of formulas
        dollars = [form for form in (f"${said}", f"{said}$", f"{said} $") if form in reply]
        said = dollars[0] if len(dollars) == 1 else said
    if query.choices and said not in query.choices:  # an exact option needs no parsing
        read = ChoiceParser(whole_words=True)
        for text in (said, reply):
            answer = read(query, Completion(text))
            if answer.valid:
                return answer.text
    return said


def _without_choice(reply: str, query: Query) -> str | None:
    """Return the reply or its stated part if it names no option for certain: it takes the answer
    back, or denies an option or offers several."""
    stated = stated_part(reply)
    if stated and TAKEN_BACK.search(reply[reply.rfind(stated) + len(stated) :]):
        return reply
    said = (reply if stated is None else stated).strip()
    if not query.choices or not DENIES.search(said):
        return None
    denied = find_choice(said, query.choices) is None
    return said if denied and stated_label(query, Completion(reply)) is None else None


def _options(text: str) -> tuple[str, ...]:
    """Return the options that a question lists by letter, from A on; the last of several lists."""
    options: list[str] = []
    for letter, option in OPTION.findall(text):
        if letter == "A":
            options = [option.rstrip(" \t")]
        elif options and letter == ascii_uppercase[len(options) % 26]:
            options.append(option.rstrip(" \t"))
    return tuple(options) if len(options) > 1 else ()


def _labels(answer: Answer, query: Query) -> frozenset[str]:
    """Return the labels of an answer, or an empty set if they are not options."""
    labels = frozenset(answer.labels)
    return labels if labels.issubset(query.choices) else frozenset()


def _options_in(answer: Answer, query: Query) -> frozenset[str]:
    """Return the options of a list of texts or letters; empty if it contains anything else."""
    labels = _labels(answer, query)
    if labels or len(answer.text) > MAX_LENGTH or _without_choice(answer.text, query) is not None:
        return labels
    listed = LabelParser(multi_label=True)(query, Completion(answer.text))
    if listed.valid:
        return frozenset(listed.labels)
    parts = LISTED.split(answer.text)
    read = frozenset(FinalAnswerParser()(query, Completion(part)).text for part in parts)
    return read if read.issubset(query.choices) else frozenset()


def _option_in(answer: Answer, query: Query) -> frozenset[str]:
    """Return the option that the answer names, or an empty set."""
    options = frozenset(query.choices)
    if labels := _labels(answer, query):
        return labels
    if answer.text in options:  # first, because a text may look like a letter: "A. niger"
        return frozenset({answer.text})
    said = final_answer(answer.text, query)
    named = find_choice(said, query.choices)
    if named is not None:
        return frozenset({named})
    equal = [one for one in options if _compare_numbers(said, one, query) is SAME]
    return frozenset(equal if len(equal) == 1 else ())


def _compare_numbers(one: str, other: str, query: Query) -> Sameness:
    ours, theirs = phrase(one), phrase(other)
    if len(ours.atoms) == len(theirs.atoms) == 1 and ours.values and theirs.values:
        return compare_values(ours.values[0], theirs.values[0], query.text)
    return (
        compare_formulas(one, other)
        if formula_value(one) is not None is not formula_value(other)
        else UNDECIDED
    )

"""Comparison of two answers or replies: same, different or undecided."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from bottega._util.refusals import is_refusal
from bottega.parsing.answers import (
    FENCE,
    find_choice,
    first_turn,
    normalize,
    strip_thinking,
    unwrap,
)
from bottega.parsing.choices import ChoiceParser
from bottega.parsing.final_answers import TAKEN_BACK, FinalAnswerParser, stated_part
from bottega.parsing.labels import LabelParser, stated_label
from bottega.parsing.phrase_rules import ORDERED, compare_formulas, compare_lists, compare_phrases
from bottega.parsing.phrases import MAX_LENGTH, parse_phrase
from bottega.parsing.quantities import (
    DIFFERENT,
    SAME,
    UNDECIDED,
    Sameness,
    combined,
    compare_values,
)
from bottega.types import Answer, Completion, Query

# Version of these rules: stored outcomes of another version are not comparable.
COMPARISON_RULES = 4
# "B+", "C#", "F♯" and "-B" are not letters.
AROUND_LETTER = r"[\s*_()\[\].,:;!?`\"'“”]*"
LETTER = re.compile(
    rf"(?:(?i:option|choice)\s+)?{AROUND_LETTER}([A-Z])(?:(?P<bare>{AROUND_LETTER})|[.):]\s.*)",
    re.DOTALL,
)
OPTION = re.compile(r"^[ \t]*\(?([A-Z])[).:][ \t]+(\S.*)$", re.MULTILINE)
LISTED = re.compile(r"[,;|\n]+(?: ?and )?| and ", re.IGNORECASE)
# A sentence with such a word may name the options that it does not choose.
DENIES = re.compile(
    r"\b(?:not|no|nor|never|neither|either|or|if|unless|without|cannot|unable|except|hardly|kein\w*"
    r"|un\w*likely|nicht|rule[sd]? out|exclud\w*|eliminat\w*|wrong|incorrect|instead|rather)\b"
    r"|n['’]t\b|[不非]",
    re.I,
)
# Fields that hold the answer of an object with others, such as a confidence.
ANSWER_FIELDS = ("answer", "label", "result", "value", "class", "category", "prediction", "output")
# A star that is no emphasis: the grade "A*".
LONE_STAR = re.compile(r"\A([^*]*\w)\*(?!\w)([^*]*)\Z")


def compare_replies(one: str, other: str, query: Query) -> Sameness:
    """Compare two raw replies to a query by their final answers.

    Thinking is ignored. The final answer is the content of the last `\\boxed{}`, the text after
    "Answer:" or "the answer is", or the whole reply. An empty reply and a refusal ("I cannot tell")
    differ from any answer; two of them are undecided. See `same_answer` for the rules.
    """
    return _compare(strip_thinking(one), strip_thinking(other), with_options(query))


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
    query = with_options(query)
    equal_labels = one.labels and set(one.labels) == set(other.labels)
    if equal_labels and (len(one.labels) > 1 or not query.choices):
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
    ours, theirs = _parse_json(one), _parse_json(other)
    # A query with choices asks for one field.
    is_label = query.choices and not any(isinstance(v, dict) and len(v) > 1 for v in (ours, theirs))
    if (ours is not None or theirs is not None) and not is_label:
        try:
            return _compare_json(
                one if ours is None else ours, other if theirs is None else theirs, query
            )
        except RecursionError:
            return UNDECIDED
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
    ours, theirs = _named_options(one, query), _named_options(other, query)
    if (ours and theirs) or max(len(one.labels), len(other.labels)) > 1:
        return SAME if ours == theirs else DIFFERENT
    first, second = (
        Answer(next(iter(named))) if len(named) == 1 else answer
        for named, answer in ((ours, one), (theirs, other))
    )
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


def field_agreement(one: str, other: str, query: Query) -> float | None:
    """Return the share of equal fields of two replies that are JSON objects, else None.

    Fields of nested objects count singly, and an array is one field. A field that only one object
    has counts as unequal, unless it is null.
    """
    ours, theirs = _parse_json(strip_thinking(one)), _parse_json(strip_thinking(other))
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return None
    outcomes = _compare_fields(ours, theirs, query)
    return sum(found.score for found in outcomes) / len(outcomes) if outcomes else 1.0


def _parse_json(reply: str) -> object:
    """Return the object or array that a reply consists of, without fences and text before it."""
    text = FENCE.sub("", first_turn(reply)).strip()
    start = min((at for at in (text.find("{"), text.find("[")) if at >= 0), default=-1)
    is_introduced = not text[: max(start, 0)].strip().rpartition(":")[2]
    if start < 0 or text[-1] not in "]}" or not is_introduced:
        return None
    try:
        found: object = json.loads(text[start:], parse_float=_float, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) else None


def _float(text: str) -> float | str:
    return float(text) if math.isfinite(float(text)) else text


def _compare_json(one: object, other: object, query: Query, key: str = "") -> Sameness:
    """Compare two parsed values, or one and the text of a reply.

    Objects are compared by field, in any order; a missing field equals null. Arrays are compared as
    lists of answers. A word in a field is a label: two different ones are different.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return combined(_compare_fields(one, other, query))
    if isinstance(one, list) and isinstance(other, list):
        return _compare_arrays(one, other, query, key)
    if isinstance(other, dict) or (isinstance(other, list) and not isinstance(one, dict)):
        one, other = other, one
    if isinstance(one, dict):
        name = _answer_field(one)
        unclear = name is None or isinstance(other, list)
        return UNDECIDED if unclear else _compare_json(one[name], other, query, key)
    if isinstance(one, list):
        if any(isinstance(item, dict | list) for item in one):
            return DIFFERENT
        one = ", ".join(map(_text, one))
    if type(one) is type(other) and one == other:
        return SAME
    if one is None or other is None:
        return DIFFERENT
    if isinstance(one, int | float) and isinstance(other, int | float):
        same_type = isinstance(one, bool) == isinstance(other, bool)
        return (SAME if one == other else DIFFERENT) if same_type else UNDECIDED
    same = same_words(Answer(_text(one)), Answer(_text(other)), Query(f"{query.text} {key}"))
    is_label = (
        key
        and same is UNDECIDED
        and re.fullmatch(r"[^\s\d]+ [^\s\d]+", f"{_text(one)} {_text(other)}")
    )
    return DIFFERENT if is_label else same


def _compare_fields(
    one: Mapping[str, object], other: Mapping[str, object], query: Query
) -> list[Sameness]:
    """Return the outcome of each field of two objects; the names of fields have no case."""
    ours, theirs = _by_name(one), _by_name(other)
    found: list[Sameness] = []
    for name in dict.fromkeys((*ours, *theirs)):
        mine, yours = ours.get(name), theirs.get(name)
        if isinstance(mine, dict) and isinstance(yours, dict):
            found += _compare_fields(mine, yours, query)
        else:
            found.append(_compare_json(mine, yours, query, name))
    return found


def _by_name(fields: Mapping[str, object]) -> Mapping[str, object]:
    named = {normalize(name): value for name, value in fields.items()}
    return named if len(named) == len(fields) else fields


def _answer_field(fields: Mapping[str, object]) -> str | None:
    names = (
        list(fields) if len(fields) == 1 else [n for n in fields if normalize(n) in ANSWER_FIELDS]
    )
    return names[0] if names else None


def _compare_arrays(
    one: Sequence[object], other: Sequence[object], query: Query, key: str
) -> Sameness:
    ours, theirs = ([json.dumps(item, sort_keys=True) for item in each] for each in (one, other))
    question = f"{query.text} {key}"
    if ours == theirs:
        return SAME
    if len(one) == len(other) == 1:
        return _compare_json(one[0], other[0], query, key)
    if all(not isinstance(item, dict | list) for item in (*one, *other)):
        return compare_lists([*map(_text, one)], [*map(_text, other)], question)
    if len(one) != len(other):
        return DIFFERENT
    if sorted(ours) == sorted(theirs):
        is_set = all(isinstance(item, dict) for item in one) and not ORDERED.search(question)
        return SAME if is_set else UNDECIDED
    return combined(_compare_json(*pair, query, key) for pair in zip(one, other, strict=True))


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def with_options(query: Query) -> Query:
    """Return the query with the options listed in its text, if it has no choices."""
    return query if query.choices else Query(query.text, choices=_options(query.text))


def final_answer(reply: str, query: Query) -> str:
    """Return the text of the chosen option, or else the final answer of the reply."""
    reply = unwrap(reply) if "<" in reply or "`" in reply else reply
    reply = LONE_STAR.sub("\\1\u2217\\2", reply)
    stated = _affirmed_option(reply, query.choices) or _without_choice(reply, query)
    if stated is not None:
        return stated
    said = FinalAnswerParser()(query, Completion(reply)).text
    if said[:1].isdigit():  # the parser strips the dollar signs of formulas
        dollars = [form for form in (f"${said}", f"{said}$", f"{said} $") if form in reply]
        said = dollars[0] if len(dollars) == 1 else said
    if query.choices and said not in query.choices:  # an exact option needs no parsing
        read = ChoiceParser(whole_words=True)
        for text in dict.fromkeys((said, reply)):
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


def _affirmed_option(reply: str, choices: Sequence[str]) -> str | None:
    """Return the option that a reply names beside others that it denies: "A cat, not a dog."."""
    options = {choice.casefold(): choice for choice in choices if len(choice) > 1}
    if len(options) < max(len(choices), 1) or not DENIES.search(reply):
        return None
    named = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    denied = rf"\b(?:not|rather than|instead of)\s+(?:an?\s+|the\s+)?(?:{named})\b"
    rest, count = re.subn(denied, "", reply.casefold())
    found = set(re.findall(rf"\b(?:{named})\b", rest))
    return options[found.pop()] if count and len(found) == 1 and not DENIES.search(rest) else None


def _named_options(answer: Answer, query: Query) -> frozenset[str]:
    """Return the options that an answer names by their texts, letters or an equal value."""
    text, options = answer.text, frozenset(query.choices)
    if labels := _labels(answer, query):
        return labels
    if text in options:  # first, because a text may look like a letter: "A. niger"
        return frozenset({text})
    if len(text) <= MAX_LENGTH and _without_choice(text, query) is None:
        listed = LabelParser(multi_label=True)(query, Completion(text))
        parts = LISTED.split(text)
        read = frozenset(FinalAnswerParser()(query, Completion(part)).text for part in parts)
        named = (
            frozenset(listed.labels) if listed.valid else read if read <= options else frozenset()
        )
        if len(named) > 1:
            return named
    said = final_answer(text, query)
    option = find_choice(said, query.choices)
    equal = [one for one in options if _compare_numbers(said, one, query) is SAME]
    return frozenset([option] if option is not None else equal if len(equal) == 1 else ())


def _compare_numbers(one: str, other: str, query: Query) -> Sameness:
    ours, theirs = parse_phrase(one), parse_phrase(other)
    if len(ours.atoms) == len(theirs.atoms) == 1 and ours.values and theirs.values:
        return compare_values(ours.values[0], theirs.values[0], query.text)
    return compare_formulas(one, other) or UNDECIDED

"""Numbers, quantities, ranges, dates and times in answers, and their comparison."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from itertools import pairwise

from bottega.parsing.formulas import SIGNS
from bottega.parsing.units import (
    CURRENCIES,
    NO_UNIT,
    ORDINAL,
    MeasurementUnit,
    read_unit,
    units_by_name,
)


def word_set(text: str) -> frozenset[str]:
    """Return the set of words of a text."""
    return frozenset(text.split())


CLOSE = Fraction(1, 10**6)

# A number with thousands separators, or digits with a decimal point or comma.
DIGITS = (
    r"(?:\d{1,3}(?P<group>[,.' ])\d{3}(?:(?P=group)\d{3}){0,9}(?:(?!(?P=group))[.,]\d+)?(?!\d)"
    r"|\d+(?:[.,]\d+)?|[.,]\d+)"
)
POWER = r"(?:[eE](?P<power>[-+]?\d{1,3})|\s?[x×*]\s?10\^\{?(?P<power_of_ten>-?\d{1,3})\}?)"
SCALES = {
    "thousand": 10**3, "million": 10**6, "mn": 10**6, "billion": 10**9, "bn": 10**9,
    "trillion": 10**12, "m": 10**6, "b": 10**9, "万": 10**4, "亿": 10**8,
}  # fmt: skip
_SYMBOLS = "|".join(re.escape(name) for name in CURRENCIES if len(name) < 4)
QUANTITY = re.compile(
    rf"(?P<sign>[-+])?(?:(?P<currency>{_SYMBOLS})(?![^\W\d])\s?)?"
    rf"(?P<digits>(?!\d{{3}}0s\b){DIGITS}){POWER}?(?P<ordinal>(?:st|nd|rd|th)\b)?"
    r"(?:(?:\s(?P<over>\d{1,9}))?\s?/\s?(?P<under>\d{1,40}))?(?![.,/]?\d|\^)"
    rf"(?:(?P<scale>(?-i:[kKMB])|(?:\s?(?:{'|'.join(SCALES)})))(?![^\W\d]))?",
    re.IGNORECASE,
)
# An address, a telephone number or a version, but not 1.234.567.
IDENTIFIER = re.compile(r"\d+(?:[-.:/]\d+){2,}")
# A letter of a script with spaces directly after a number: part of a code such as 7F3A.
LETTER_AFTER = re.compile(rf"(?![{SIGNS}])[^\W\d_]")
BOUNDS = {
    "<=": "at most|up to|no more than|not more than|maximum of|≤|<=|höchstens",
    ">=": "at least|no less than|not less than|minimum of|≥|>=|mindestens",
    "<": "less than|fewer than|under|below|smaller than|<",
    ">": "more than|greater than|over|above|larger than|>",
    "≈": r"about|approximately|approx\.?|around|roughly|circa|ca\.|≈|~|etwa|ungefähr"
    "|environ|约|大约",
    "nearly": "nearly|almost|just under|presque|casi",
}
BOUND = re.compile(
    rf"(?:{'|'.join(f'({words})' for words in BOUNDS.values())})(?![^\W\d])\s*", re.IGNORECASE
)
JOINS = re.compile(r"\s?(?:-|to\b|bis\b|\.\.\.?)\s?(?=[\d$€£.+-])", re.IGNORECASE)
OPENS = re.compile(r"(?:between|from)\s+(?=[\d$€£.+-])", re.IGNORECASE)
AND = re.compile(r"\s(?:and|to)\s(?=[\d$€£.+-])", re.IGNORECASE)
MONTH_NAMES = (
    "jan january januar janvier enero", "feb february februar février febrero",
    "mar march märz mars marzo", "apr april avril abril", "may mai mayo",
    "jun june juni juin junio",
    "jul july juli juillet julio", "aug august août agosto",
    "sep sept september septembre septiembre", "oct october okt oktober octobre octubre",
    "nov november novembre noviembre", "dec december dez dezember décembre diciembre",
)  # fmt: skip
MONTHS = {name: n for n, names in enumerate(MONTH_NAMES, 1) for name in names.split()}
_MONTH = rf"(?P<month>{'|'.join(sorted(MONTHS, key=len, reverse=True))})\b\.?"
_DAY, _YEAR = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?", r"(?P<year>\d{4})(?!\d)"
WEEKDAY = r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s+)?"
DATES = tuple(
    re.compile(WEEKDAY + pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<year>\d{4})(?P<mark>[-/.])(?P<month>\d{1,2})(?P=mark)(?P<day>\d{1,2})(?!\d)",
        r"(?P<year>\d{4})年(?:(?P<month>\d{1,2})月(?:(?P<day>\d{1,2})日)?)?",
        rf"(?P<day>\d{{1,2}})(?:st|nd|rd|th|\.)?\s+(?:of\s+|de\s+)?{_MONTH}"
        rf"(?:,?\s+(?:de\s+)?{_YEAR})?",
        rf"{_MONTH}\s+{_DAY}(?![\d:]|[.,]\d)(?:,?\s+{_YEAR})?",
        rf"{_MONTH},?\s+(?:of\s+)?{_YEAR}",
        r"(?P<day>\d{1,2})(?P<mark>\.)(?P<month>\d{1,2})\.(?P<year>\d{4})(?!\d)",
        r"(?P<day>\d{1,2})(?P<either>[-/])(?P<month>\d{1,2})(?P=either)(?P<year>\d{4})(?!\d)",
    )
)
_HOUR, _MINUTE = r"(?P<hour>\d{1,2})", r"(?P<minute>\d{2})(?::(?P<second>\d{2}))?"
TIMES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_HOUR}(?:[:.]{_MINUTE})?\s*(?P<half>[ap])\.?m\b\.?",
        rf"{_HOUR}:{_MINUTE}(?![\d:])(?:\s*(?:uhr|h)\b)?",
        rf"{_HOUR}\s?(?:h|uhr)\s?{_MINUTE}\b(?!\s*m)",
        rf"{_HOUR}\s*(?:o'clock|uhr\b|点)",
    )
)
SUMS = {"length", "mass", "time", "months"}
ASKS_PERCENT = re.compile(r"per ?cent|%|prozent|pour cent|por ciento|百分", re.IGNORECASE)
ASKS_FRACTION = re.compile(
    r"fraction|probabilit|proportion|ratio|share|decimal|likelihood|anteil|wahrscheinlich", re.I
)
# Words of questions for a wording, and nouns that have a number or a name of their own.
WORDINGS = word_set(
    "serial sku barcode e-mail email url path password filename title say says spell spelled"
    " spelling written inscription caption zip"
)
IDENTIFIED = word_set(
    "part lot model account invoice order card ticket room gate reference flight phone telephone"
    " fax batch plate serial version section chapter release item article postal code id file"
)
IDENTIFIERS = word_set("no nr num number numbers name names code codes id version")
LEADING_ZERO = re.compile(r"\W*0\d")
UNIT_NAME = re.compile(
    r"[^\W\d_]{3,}|(?<=[_(])[^\W\d_]{2}(?![^\W\d_])|(?<= )(?:cm|mm|km|kg|mg|ml)\b"
)
COUNTS = re.compile(
    r"\bhow (?:many|much)\b|\bnumber of\b|wie ?viele?|combien|几|多少", re.IGNORECASE
)


class Sameness(Enum):
    """Outcome of a comparison. `UNDECIDED` if no rule shows that two answers are the same or
    different: synonyms, paraphrases, ambiguous notations."""

    SAME = "same"
    DIFFERENT = "different"
    UNDECIDED = "undecided"

    @property
    def score(self) -> float:
        """Return 1.0 for the same answers and else 0.0: undecided counts as different."""
        return float(self is Sameness.SAME)

    @property
    def decided(self) -> float | None:
        """Return 1.0 for the same and 0.0 for different answers, None if undecided."""
        return None if self is Sameness.UNDECIDED else self.score


SAME, DIFFERENT, UNDECIDED = Sameness.SAME, Sameness.DIFFERENT, Sameness.UNDECIDED


@dataclass(frozen=True)
class Quantity:
    """Number with a unit. `readings` are its possible values, the most likely one first: "1,234"
    is 1234, or 1.234 with a decimal comma. `bound` is a relation such as "<". `decimals` is None
    for fractions and powers, which are not rounded."""

    readings: tuple[Fraction, ...]
    unit: MeasurementUnit = NO_UNIT
    bound: str = ""
    decimals: int | None = 0
    text: str = ""

    def base(self, at: int = 0) -> Fraction:
        """Return a reading in the first unit of the kind."""
        return (self.readings[at] + self.unit.offset) * self.unit.factor


@dataclass(frozen=True)
class Interval:
    """Two quantities: a range such as "5-7 cm", a score or a difference."""

    low: Quantity
    high: Quantity


@dataclass(frozen=True)
class Moment:
    """Date or time of day with its possible readings, two for "03/04/2026". Missing parts are
    None."""

    readings: tuple[tuple[int | None, ...], ...]
    is_time: bool = False


StatedValue = Quantity | Interval | Moment


def read_value(text: str, start: int = 0) -> tuple[StatedValue, int] | None:
    """Return the value that begins at an index of a text in plain notation, and its end."""
    for pattern in DATES:
        if (found := pattern.match(text, start)) and (date := _date(found)):
            return date, found.end()
    for pattern in TIMES:
        if (found := pattern.match(text, start)) and (time := _time(found)):
            return time, found.end()
    if (found := IDENTIFIER.match(text, start)) and not QUANTITY.fullmatch(found[0]):
        return None
    opens = OPENS.match(text, start)
    low = _sum(text, opens.end() if opens else start)
    joins = low and (AND if opens else JOINS).match(text, low[1])
    high = _sum(text, joins.end()) if joins else None
    if low is None or high is None:
        return None if opens else low
    first = low[0] if low[0].unit.kind else replace(low[0], unit=high[0].unit)
    return Interval(first, high[0]), high[1]


def _date(found: re.Match[str]) -> Moment | None:
    parts = found.groupdict()
    year = int(parts["year"]) if parts["year"] else None
    month, day = parts["month"] or "", parts.get("day")
    name = MONTHS.get(month.lower())
    read = [(year, name or (int(month) if month else None), int(day) if day else None)]
    if parts.get("either"):  # the month is first in American notation
        read.append((year, read[0][2], read[0][1]))
    valid = [one for one in read if (one[1] or 1) in range(1, 13) and (one[2] or 1) in range(1, 32)]
    return Moment(tuple(dict.fromkeys(valid))) if valid else None


def _time(found: re.Match[str]) -> Moment | None:
    parts = found.groupdict()
    hour, minute, second = (int(parts.get(name) or 0) for name in ("hour", "minute", "second"))
    half = {"a": (0,), "p": (12,)}.get((parts.get("half") or "").lower())
    if hour > 24 or minute > 59 or second > 59 or (half and not 1 <= hour <= 12):
        return None
    hours = [hour] if not 1 <= hour <= 12 else [hour % 12 + more for more in half or (0, 12)]
    return Moment(tuple((one, minute, second) for one in hours), is_time=True)


def _sum(text: str, start: int) -> tuple[Quantity, int] | None:
    """Read a quantity, or the sum of quantities of one kind such as "5 ft 10 in"."""
    found = _quantity(text, start)
    while found and found[0].unit.kind in SUMS:
        total, end = found
        more = _quantity(text, end + text[end : end + 1].isspace())
        unit = total.unit
        if more is None or more[0].unit.kind != unit.kind or more[0].unit.factor >= unit.factor:
            break
        value = total.readings[0] + more[0].readings[0] * more[0].unit.factor / unit.factor
        found = Quantity((value,), unit, total.bound, None, text[start : more[1]]), more[1]
    return found


def _quantity(text: str, start: int) -> tuple[Quantity, int] | None:
    found = BOUND.match(text, start)
    bound = list(BOUNDS)[found.lastindex - 1] if found and found.lastindex else ""
    match = QUANTITY.match(text, found.end() if found else start)
    if match is None or (match["sign"] and text[: match.start()][-1:].isalnum()):
        return None
    places, readings = read_digits(match["digits"])
    decimals: int | None = places
    if match["under"]:
        if int(match["under"]) == 0:
            return None
        part = Fraction(int(match["over"] or 1), int(match["under"]))
        readings = (readings[0] + part if match["over"] else readings[0] * part,)
        decimals = None
    scale, end = (match["scale"] or "").strip().lower(), match.end()
    capital = match["scale"] in ("K", "M", "B") and not match["currency"]  # 5K is 5000 or 5 K
    if scale in {"m", "b"} and not match["currency"] and not capital:  # "5 m" are metres
        scale, end = "", match.start("scale")
    power = int(match["power"] or match["power_of_ten"] or 0)
    factor = (
        (1000 if scale == "k" else SCALES.get(scale, 1))
        * Fraction(10) ** power
        * (-1 if match["sign"] == "-" else 1)
    )
    decimals = None if power or scale else decimals
    currency = match["currency"] or ""
    unit, end = (ORDINAL, end) if match["ordinal"] else read_unit(text, end, currency)
    if LETTER_AFTER.match(text, end):
        return None
    values = tuple(one * factor for one in readings) + (readings[:1] if capital else ())
    return Quantity(values, unit, bound, decimals, text[start:end].strip()), end


def read_digits(digits: str) -> tuple[int, tuple[Fraction, ...]]:
    """Return the number of decimals and the possible values of digits with separators.

    A single separator before three digits may separate thousands or decimals: the comma is more
    likely the first and the point the second. The last of two separators separates decimals.
    """
    digits = digits.replace(" ", "").replace("'", "")
    marks = [sign for sign in digits if sign in ",."]
    thousands = Fraction(int(re.sub("[,.]", "", digits)))
    if not marks or (len(marks) > 1 and marks[0] == marks[-1]):
        return 0, (thousands,)
    whole, mark, part = digits.rpartition(marks[-1])
    decimal = Fraction(f"{re.sub('[,.]', '', whole) or '0'}.{part}")
    if len(marks) > 1 or len(part) != 3 or not 1 <= len(whole) <= 3 or whole.startswith("0"):
        return len(part), (decimal,)
    return (0, (thousands, decimal)) if mark == "," else (len(part), (decimal, thousands))


def compare_values(one: StatedValue, other: StatedValue, question: str) -> Sameness:
    """Compare two values: quantities, ranges, dates and times.

    A missing part of a date, or one of two readings, is undecided, and so is a number within a
    range. Other values of different types, such as a time and a number, are undecided, too.
    """
    if isinstance(one, Quantity) and isinstance(other, Quantity):
        return compare_quantities(one, other, question)
    if isinstance(one, Interval) and isinstance(other, Interval):
        ends = (one.low, other.low), (one.high, other.high)
        return combined(compare_quantities(*pair, question) for pair in ends)
    ours, theirs = _moment(one), _moment(other)
    if ours and theirs and ours.is_time == theirs.is_time:
        return _compare_moments(ours, theirs)
    number, found = (one, other) if isinstance(one, Quantity) else (other, one)
    if isinstance(number, Quantity) and isinstance(found, Interval) and not number.unit.kind:
        inside = found.low.readings[0] <= number.readings[0] <= found.high.readings[0]
        return DIFFERENT if number.readings[0] >= 0 and not inside else UNDECIDED
    return UNDECIDED


def combined(found: Iterable[Sameness]) -> Sameness:
    """Return SAME if all parts are the same, DIFFERENT if any part is, and else UNDECIDED."""
    parts = set(found)
    return DIFFERENT if DIFFERENT in parts else UNDECIDED if UNDECIDED in parts else SAME


def asks_text(question: str) -> bool:
    """Return whether a question, or a field at its end, asks for an identifier or a wording, in
    which 007 is not 7."""
    words = re.findall(r"[^\W\d_]+(?:-[^\W\d_]+)*", question.lower())
    pairs = pairwise(words)
    if not WORDINGS.isdisjoint(words) or any(
        after in IDENTIFIERS and (word in IDENTIFIED or word in ("what", "which"))
        for word, after in pairs
    ):
        return True
    *start, last = re.split(r"[^\w-]+", re.split(r"[.!?]\s", question.rstrip(" .?!:"))[-1].lower())
    of_another = {"how", "of", "on", "in", "for", "to", "from"}.intersection(start)
    return last.rpartition("_")[2].removesuffix("s") in IDENTIFIED and not of_another


def _moment(value: StatedValue) -> Moment | None:
    """Return the moment; a number of four digits is a year."""
    if isinstance(value, Quantity) and re.fullmatch(r"[12]\d{3}", value.text):
        return Moment(((int(value.text), None, None),))
    return value if isinstance(value, Moment) else None


def _compare_moments(one: Moment, other: Moment) -> Sameness:
    if one == other:
        return SAME
    pairs = ((ours, theirs) for ours in one.readings for theirs in other.readings)
    compatible = any(
        all(a is None or b is None or a == b for a, b in zip(ours, theirs, strict=True))
        for ours, theirs in pairs
    )
    return UNDECIDED if compatible else DIFFERENT


def compare_quantities(one: Quantity, other: Quantity, question: str) -> Sameness:
    """Compare two quantities.

    Units of one kind are converted, and a missing unit matches any; different kinds differ, as do
    two currencies. A percentage equals a number without unit by the wording of the question: 50 if
    it asks for per cent, 0.5 if it asks for a fraction, and else neither is decided. An ordinal
    equals its number unless the question counts.
    """
    kinds = {one.unit.kind, other.unit.kind} - {""}
    bare = replace(one, unit=NO_UNIT), replace(other, unit=NO_UNIT)
    if one.bound != other.bound:
        vague = "≈" in (one.bound, other.bound) and _compare_numbers(*bare) is not DIFFERENT
        return UNDECIDED if vague else DIFFERENT
    if kinds == {"degree", "temperature"}:
        return UNDECIDED if _compare_numbers(*bare) is SAME else DIFFERENT
    if len(kinds) > 1:
        return DIFFERENT
    same = _compare_units(one, other, kinds, question)
    zeros = [LEADING_ZERO.match(each.text) is not None for each in (one, other)]
    as_text = asks_text(question) or (zeros[0] != zeros[1] and not COUNTS.search(question))
    return UNDECIDED if same is SAME and as_text and one.text != other.text else same


def _compare_units(one: Quantity, other: Quantity, kinds: set[str], question: str) -> Sameness:
    if one.unit.kind == other.unit.kind:
        return _compare_numbers(one, other)
    same = _compare_numbers(replace(one, unit=NO_UNIT), replace(other, unit=NO_UNIT))
    if kinds == {"percent"}:
        hundredth = MeasurementUnit("", Fraction(1, 100))
        bare = (
            replace(each, unit=hundredth if each.unit.kind else NO_UNIT) for each in (one, other)
        )
        as_fraction = _compare_numbers(*bare)
        if ASKS_PERCENT.search(question):
            return same
        if ASKS_FRACTION.search(question):
            return as_fraction
        return DIFFERENT if same is as_fraction is DIFFERENT else UNDECIDED
    asked = {units_by_name().get(word) for word in UNIT_NAME.findall(question.casefold())} - {None}
    fitting = {unit for unit in asked if unit and unit.kind in kinds}
    if len(fitting) == 1:
        (unit,) = fitting
        filled = (each if each.unit.kind else replace(each, unit=unit) for each in (one, other))
        asks_unit = _compare_numbers(*filled)
        return UNDECIDED if asks_unit is DIFFERENT and same is SAME else asks_unit
    counted = kinds == {"ordinal"} and COUNTS.search(question)
    return UNDECIDED if same is SAME and (counted or asked) else same


def _compare_numbers(one: Quantity, other: Quantity) -> Sameness:
    """Compare numbers in units of one kind. Whole numbers must be equal, others within a
    millionth. Undecided are another reading, and a fraction or a conversion that is rounded."""
    if _close(one, other, 0, 0):
        return SAME if _may_be_thousands(one) == _may_be_thousands(other) else UNDECIDED
    pairs = [(i, k) for i in range(len(one.readings)) for k in range(len(other.readings))]
    if any(_close(one, other, *pair) for pair in pairs):
        return UNDECIDED
    return UNDECIDED if _rounded(one, other) or _rounded(other, one) else DIFFERENT


def _may_be_thousands(one: Quantity) -> bool:
    """Return whether the number is written like "1.000", which may be one or a thousand."""
    return bool(one.decimals) and len(one.readings) > 1 and one.readings[0] % 1 == 0


def _close(one: Quantity, other: Quantity, at: int, other_at: int) -> bool:
    ours, theirs = one.base(at), other.base(other_at)
    if one.decimals == other.decimals == 0 and at == other_at == 0:
        return ours == theirs
    return abs(ours - theirs) <= CLOSE * max(abs(ours), abs(theirs))


def _rounded(one: Quantity, other: Quantity) -> bool:
    """Return whether `other` is `one`, a fraction or in another unit, rounded to two digits or
    more."""
    if other.decimals is None or (one.unit == other.unit and one.decimals is not None):
        return False
    converted = one.base() / other.unit.factor - other.unit.offset
    has_digits = abs(other.readings[0]) * 10**other.decimals >= 10
    return has_digits and round(converted, other.decimals) == other.readings[0]

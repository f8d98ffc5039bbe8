"""Units of measurement, with their names in answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

PREFIXES = {
    "n": ("nano", -9), "u": ("micro", -6), "m": ("milli", -3), "c": ("centi", -2),
    "d": ("deci", -1), "h": ("hecto", 2), "k": ("kilo", 3), "M": ("mega", 6), "G": ("giga", 9),
    "T": ("tera", 12),
}  # fmt: skip
SI = {
    "m": ("length", "metre metres meter meters"), "g": ("mass", "gram grams gramm"),
    "s": ("time", "second seconds"), "l": ("volume", "litre litres liter liters"),
    "L": ("volume", ""),
    "W": ("power", "watt watts"), "V": ("voltage", "volt volts"),
    "A": ("current", "ampere amperes"), "Hz": ("frequency", "hertz"),
    "Pa": ("pressure", "pascal pascals"), "N": ("force", "newton newtons"),
    "J": ("energy", "joule joules"), "B": ("data", "byte bytes"), "Ω": ("resistance", "ohm ohms"),
}  # fmt: skip
# Multiples of the SI unit of a kind, or of the first unit of another kind.
OTHERS = {
    "length": {
        "0.0254": 'in inch inches "', "0.3048": "ft foot feet '", "0.9144": "yd yard yards",
        "1609.344": "mi mile miles", "1852": "nmi", "0.01": "厘米", "0.001": "毫米", "1": "米",
        "1000": "公里 千米",
    },
    "mass": {
        "453.59237": "lb lbs pound pounds", "28.349523125": "oz ounce ounces", "1": "克",
        "1000000": "t ton tons tonne tonnes", "6350.29318": "stone", "1000": "公斤 千克",
    },
    "time": {
        "1": "sec secs sek", "60": "min mins minute minutes minuten", "86400": "d day days tage",
        "3600": "h hr hrs hour hours stunden", "604800": "week weeks wk wochen",
    },
    "months": {"1": "month months monate", "12": "year years yr yrs jahre"},
    "volume": {"0.001": "cc", "3.785411784": "gal gallon gallons"},
    "area": {"10000": "ha hectare hectares", "4046.8564224": "acre acres"},
    "energy": {"4.184": "cal", "4184": "kcal", "3600000": "kWh", "3600": "Wh"},
    "pressure": {"100000": "bar", "101325": "atm", "6894.757293168": "psi"},
    "degree": {"1": "° deg degree degrees"}, "sound": {"1": "dB"}, "data": {"1000": "KB"},
    "bits": {"1": "bit bits", "1000": "kb kbit", "1000000": "Mb Mbit", "1000000000": "Gb Gbit"},
    "length/time": {"0.44704": "mph", "1/3.6": "kph kmh", "1852/3600": "kn knot knots"},
    "rotation": {"1": "rpm"}, "percent": {"1": "% percent pct prozent"},
}  # fmt: skip
TEMPERATURES = {
    "°C celsius": ("1", "273.15"), "°F fahrenheit": ("5/9", "459.67"), "K kelvin": ("1", "0"),
}  # fmt: skip
# Currencies are never converted.
CURRENCIES = {
    "$": "USD", "us$": "USD", "usd": "USD", "dollar": "USD", "dollars": "USD", "€": "EUR",
    "eur": "EUR", "euro": "EUR", "euros": "EUR", "£": "GBP", "gbp": "GBP", "¥": "JPY",
    "jpy": "JPY", "yen": "JPY", "₹": "INR", "inr": "INR", "rupees": "INR", "chf": "CHF",
    "cny": "CNY", "rmb": "CNY", "yuan": "CNY", "元": "CNY", "cad": "CAD", "aud": "AUD",
    "a$": "AUD", "au$": "AUD", "c$": "CAD", "ca$": "CAD", "hk$": "HKD", "nz$": "NZD", "s$": "SGD",
    "r$": "BRL", "cent": "cent", "cents": "cent", "¢": "cent",
}  # fmt: skip
UNIT = re.compile(
    r"[ -]?((?:(?:square|sq|cubic|degrees?|per|pour|por)\s|°\s?)?[^\W\d_]+(?:\^?[23])?(?!\w)"
    r"|[%°$€£¥₹¢\"'])",
    re.IGNORECASE,
)
PER = re.compile(r"\s?(?:/|per\b)\s?", re.IGNORECASE)


@dataclass(frozen=True)
class MeasurementUnit:
    """Unit of a kind, as a multiple of the kind's first unit, with a temperature's `offset`."""

    kind: str
    factor: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)


NO_UNIT = MeasurementUnit("")
ORDINAL = MeasurementUnit("ordinal")


@lru_cache(1)
def units_by_name() -> dict[str, MeasurementUnit]:
    """Return the units by name, and in lower case the names of several letters that only one unit
    has: CM, but not Mw (mW or MW) and G (g)."""
    units: dict[str, MeasurementUnit] = {}
    for symbol, (kind, names) in SI.items():
        units |= dict.fromkeys((symbol, *names.split()), MeasurementUnit(kind))
        for prefix, (word, power) in PREFIXES.items():
            forms = (prefix + symbol, *(word + name for name in names.split()))
            units |= dict.fromkeys(forms, MeasurementUnit(kind, Fraction(10) ** power))
    for kind, multiples in OTHERS.items():
        for factor, names in multiples.items():
            over, _, under = factor.partition("/")
            units |= dict.fromkeys(
                names.split(), MeasurementUnit(kind, Fraction(over) / Fraction(under or 1))
            )
    for name, unit in list(units.items()):
        if unit.kind == "length":
            area, volume = (
                MeasurementUnit("area", unit.factor**2),
                MeasurementUnit("volume", 1000 * unit.factor**3),
            )
            units |= dict.fromkeys((f"{name}^2", f"{name}2", f"square {name}", f"sq {name}"), area)
            units |= dict.fromkeys((f"{name}^3", f"{name}3", f"cubic {name}"), volume)
    for names, (factor, offset) in TEMPERATURES.items():
        scale = MeasurementUnit("temperature", Fraction(factor), Fraction(offset))
        symbol, word = names.split()
        letter = symbol.removeprefix("°")
        units |= dict.fromkeys((symbol, f"° {letter}", word, f"degrees {word}"), scale)
        units |= dict.fromkeys((letter, f"degrees {letter}"), scale)
    units |= {name: MeasurementUnit(kind) for name, kind in CURRENCIES.items()}
    units |= dict.fromkeys(("per cent", "pour cent", "por ciento"), MeasurementUnit("percent"))
    folded: dict[str, set[MeasurementUnit]] = {}
    for name, unit in units.items():
        folded.setdefault(name.casefold(), set()).add(unit)
    return {name: min(found, key=str) for name, found in folded.items() if len(found) == 1} | units


def read_unit(text: str, start: int, currency: str = "") -> tuple[MeasurementUnit, int]:
    """Return the unit after a number, such as "km/h", and its end; `NO_UNIT` without any."""
    unit, end = _read_name(text, start)
    if currency:
        unit, end = MeasurementUnit(CURRENCIES[currency.lower()]), start
    if unit.kind and (per := PER.match(text, end)):
        other, after = _read_name(text, per.end())
        if other.kind:
            return MeasurementUnit(f"{unit.kind}/{other.kind}", unit.factor / other.factor), after
    return unit, end


def _read_name(text: str, start: int) -> tuple[MeasurementUnit, int]:
    units = units_by_name()
    if match := UNIT.match(text, start):
        for name in (match[1], match[1].partition(" ")[0]):
            unit = units.get(name) or units.get(name.casefold() if len(name) > 1 else "")
            if unit is not None:
                return unit, match.start(1) + len(name)
    return NO_UNIT, start

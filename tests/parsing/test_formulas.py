from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.parsing.formulas import MAX_DEPTH, MAX_LENGTH, formula_value


@pytest.mark.parametrize(
    ("formula", "number"),
    [
        ("7", 7),
        ("-7.50", -7.5),
        (".5", 0.5),
        ("1,234.5", 1234.5),
        ("2 + 3*4", 14),
        ("(2 + 3)*4/10", 2),
        ("8/4/2", 1),
        ("-3^2", -9),
        ("2^{-1}", 0.5),
        ("2^10", 1024),
        (r"\frac{6-\sqrt{2}}{2}", 2.2929),
        (r"$\dfrac12$", 0.5),
        (r"\frac{15}4", 3.75),
        (r"1 \frac{1}{2} \mathrm{~cm}^{2}", 1.5),
        (r"3\frac{\sqrt{4}}{4}", 1.5),
        (r"\sqrt[3]{8}", 2),
        (r"\sqrt[1]{5}", 5),
        (r"\sqrt{0.25}", 0.5),
        (r"\sqrt{0}", 0),
        ("+-+-2", 2),
        ("(2) (3)", 6),
        ("√(16)", 4),
        (r"2\pi+4\sqrt{3}", 13.2114),
        (r"15/\pi", 4.7746),
        (r"6\left(\sqrt{2}-1\right)", 2.4853),
        (r"30^{\circ}", 30),
        ("30°", 30),
        (r"\textdollar 0.40", 0.4),
        (r"50\%", 50),
        ("40 cm^2", 40),
        ("3 × 4 − 2", 10),
    ],
)
def test_formula_has_its_value(formula: str, number: float) -> None:
    assert formula_value(formula) == pytest.approx(number, abs=1e-4)


@pytest.mark.parametrize(
    "formula",
    [
        "",
        "A",
        "3x",
        "2 3",
        "(2",
        "2)",
        "1/0",
        r"\frac{1}",
        r"\sqrt{-1}",
        r"\sqrt[-1]{4}",
        r"\sqrt[0.5]{4}",
        r"2 (3) 4",
        r"2\pix",
        r"\sqrtx4",
        r"\fracs12",
        r"\pii",
        "(-8)^{0.5}",
        "0^{-1}",
        "9^9^9^9",
        "2**9",
        "1e5",
        "10!",
        "2h 48m",
        "AB=3, CD=1",
        "__import__('os').getcwd()",
        "9" * (MAX_LENGTH + 1),
        "(" * 150,
        r"\sqrt" * 40,
        "(" * 60 + "1" + ")" * 60,
    ],
)
def test_other_texts_have_no_value(formula: str) -> None:
    assert formula_value(formula) is None


def test_length_and_depth_have_exact_limits() -> None:
    assert formula_value("0" * (MAX_LENGTH - 1) + "7") == 7
    assert formula_value("0" * MAX_LENGTH + "7") is None
    brackets = MAX_DEPTH - 1  # the formula itself is one level
    assert formula_value("(" * brackets + "7" + ")" * brackets) == 7
    assert formula_value("(" * MAX_DEPTH + "7" + ")" * MAX_DEPTH) is None


def test_adjacent_brackets_add_no_depth() -> None:
    assert formula_value("(1)" * (MAX_DEPTH + 1)) == 1


@given(st.text(alphabet=r"0123456789.+-*/^(){}[], \fracsqtpi$", max_size=MAX_LENGTH))
def test_no_formula_raises_or_takes_long(formula: str) -> None:
    started = time.thread_time()
    formula_value(formula)
    assert time.thread_time() - started < 1

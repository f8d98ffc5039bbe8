"""Mutation operators: small source edits that correct code should not survive.

Skipped by rule, since no test could or should notice them: docstrings, annotations, decorators,
assertions, log calls and warnings, the arguments of a raised error, arguments that change no result
(`IGNORED_ARGUMENTS`), module-level and class-level numbers and numeric defaults (tuning constants),
thread counts (`THREAD_COUNTS`), and the equality of a random number with a bound.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Tests check that these functions are symmetric in their arguments.
SYMMETRIC = {
    "same_answer",
    "same_choice",
    "same_number",
    "same_words",
    "agreement",
    "equal_answers",
    "compare_replies",
    "compare_values",
    "compare_quantities",
    "compare_phrases",
    "compare_formulas",
    "macro_f1",
    "equal",
}
SYMMETRIC_METHODS = {"maximum", "minimum"}  # of numpy and torch
THREAD_COUNTS = {"omp_set_num_threads", "set_num_threads"}  # no effect on results
LOGGERS = {"log", "logger", "logging", "warnings"}
IGNORED_ARGUMENTS = {
    "strict",
    "name",
    "daemon",
    "hint",
    "use_cache",
    "show_progress",
    "digest_size",
}
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Edit:
    """Replacement of `source[start:end]`, in characters."""

    operator: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def edits(source: str) -> list[Edit]:
    """Return every edit of the module in source order."""
    found = _Collector(source).collect()
    return sorted(set(found), key=lambda one: (one.start, one.end, one.operator, one.text))


class _Collector:
    def __init__(self, source: str) -> None:
        self._source = source
        lines = source.splitlines(keepends=True)
        self._lines = lines
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._found: list[Edit] = []

    def collect(self) -> list[Edit]:
        self._block(ast.parse(self._source).body, in_function=False)
        return self._found

    def _offset(self, line: int, column: int) -> int:
        """Character offset of an ast position, whose column counts UTF-8 bytes."""
        text = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(text)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._offset(node.lineno, node.col_offset)
        return start, self._offset(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end]

    def _add(self, operator: str, node: ast.expr | ast.stmt, text: str) -> None:
        start, end = self._span(node)
        self._found.append(Edit(operator, node.lineno, start, end, text))

    def _add_between(
        self, operator: str, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> None:
        """Replace the operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        match = re.search(old, re.sub(r"#[^\n]*", _blank, self._source[start:end]))
        assert match is not None, (old, self._source[start:end])
        self._found.append(
            Edit(operator, right.lineno, start + match.start(), start + match.end(), new)
        )

    def _block(self, body: list[ast.stmt], *, in_function: bool) -> None:
        for statement in body:
            self._statement(statement, in_function=in_function)

    def _statement(self, node: ast.stmt, *, in_function: bool) -> None:
        if isinstance(node, Function):
            self._defaults(node.args)
            self._block(node.body, in_function=True)
        elif isinstance(node, ast.ClassDef):
            self._block(node.body, in_function=False)
        elif isinstance(node, ast.Assert) or _is_docstring(node) or _is_ignored(node):
            return
        elif in_function:
            self._drops(node)
            self._inside(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            self._flag(node.value)

    def _inside(self, node: ast.stmt) -> None:
        """Mutate the expressions of a statement in a function, and its nested statements."""
        if isinstance(node, ast.Raise):
            return
        if isinstance(node, ast.If | ast.While):
            self._negate(node.test)
        for name, value in ast.iter_fields(node):
            if name == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    self._statement(child, in_function=True)
                elif isinstance(child, ast.expr):
                    self._expression(child)
                elif isinstance(child, ast.withitem):
                    self._expression(child.context_expr)
                elif isinstance(child, ast.ExceptHandler):
                    self._block(child.body, in_function=True)

    def _drops(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Return) and node.value is not None:
            if not (isinstance(node.value, ast.Constant) and not node.value.value):
                self._add("return None", node, "return None")
        elif isinstance(node, ast.Break):
            self._add("break to continue", node, "continue")
        elif _may_be_dropped(node):
            self._add("drop statement", node, "pass")

    def _defaults(self, arguments: ast.arguments) -> None:
        for default in [*arguments.defaults, *arguments.kw_defaults]:
            if default is not None:
                self._flag(default)

    def _flag(self, node: ast.expr) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            self._add("flip boolean", node, str(not node.value))

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.Name | ast.Attribute | ast.Call):
            self._add("negate condition", test, f"not {self._text(test)}")

    def _expression(self, node: ast.expr) -> None:
        for expression in _expressions(node):
            self._mutate(expression)

    def _mutate(self, node: ast.expr) -> None:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            if _is_random(node.left):  # equals the bound with probability 2 ** -53
                return
            old, new = COMPARISONS[type(node.ops[0])]
            self._add_between("comparison", node.left, node.comparators[0], old, new)
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            self._add_between("and/or", node.values[0], node.values[1], rf"\b{old}\b", new)
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            if not any(map(_is_text, (node.left, node.right))):
                old, new = ARITHMETIC[type(node.op)]
                self._add_between("arithmetic", node.left, node.right, re.escape(old), new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._add("remove not", node, f"({self._text(node.operand)})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            self._add("remove minus", node, f"({self._text(node.operand)})")
        elif isinstance(node, ast.Constant):
            self._flag(node)
            self._number(node)
        elif isinstance(node, ast.IfExp):
            body, orelse = self._text(node.body), self._text(node.orelse)
            self._add("swap branches", node, f"{orelse} if {self._text(node.test)} else {body}")
        elif isinstance(node, ast.Call):
            self._call(node)

    def _number(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if isinstance(value, int):
            self._add("number + 1", node, str(value + 1))
            self._add("number - 1", node, f"({value - 1})")
        else:
            self._add("number", node, repr(value * 1.5 if value else 1.0))

    def _call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            self._add("swap function", node.func, FUNCTIONS[node.func.id])
            return
        if isinstance(node.func, ast.Name) and node.func.id in SYMMETRIC:
            return
        if isinstance(node.func, ast.Attribute) and node.func.attr in SYMMETRIC_METHODS:
            return
        named = [one for one in node.args[:2] if isinstance(one, ast.Name | ast.Attribute)]
        if len(named) == 2 and len(set(texts := [*map(self._text, named)])) == 2:
            start, end = self._span(named[0])[0], self._span(named[1])[1]
            self._found.append(
                Edit("swap arguments", node.lineno, start, end, f"{texts[1]}, {texts[0]}")
            )


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the node and the expressions below it, except ignored arguments and text formatting."""
    yield node
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _is_cast(node)):
        return
    if ast.unparse(node).endswith(("[0][0]", "row[0]")):  # rows of one column: -1 is the same
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword):
            if child.arg not in IGNORED_ARGUMENTS:
                yield from _expressions(child.value)
        elif isinstance(child, ast.comprehension):
            for part in (child.iter, *child.ifs):
                yield from _expressions(part)
        elif isinstance(child, ast.expr):
            yield from _expressions(child)
        elif isinstance(child, ast.Slice):
            yield from (
                inner
                for part in (child.lower, child.upper, child.step)
                if part is not None
                for inner in _expressions(part)
            )


def _may_be_dropped(node: ast.stmt) -> bool:
    """Return whether the module keeps all its names without the statement."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    if isinstance(node, ast.Assign):
        return all(isinstance(one, ast.Attribute | ast.Subscript) for one in node.targets)
    return isinstance(node, ast.Raise | ast.Continue | ast.AugAssign)


def _is_cast(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "cast"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_ignored(node: ast.stmt) -> bool:
    """Return whether the statement logs something or sets a number of threads."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    logs = isinstance(call.func.value, ast.Name) and call.func.value.id in LOGGERS
    return logs or call.func.attr in THREAD_COUNTS


def _is_random(node: ast.expr) -> bool:
    """Return whether the expression is `rng.random()`, a number in [0, 1)."""
    if not isinstance(node, ast.Call) or node.args or node.keywords:
        return False
    return isinstance(node.func, ast.Attribute) and node.func.attr == "random"


def _blank(match: re.Match[str]) -> str:
    return " " * len(match.group())

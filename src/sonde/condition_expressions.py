"""Parses and evaluates conditions of the user: `grad_norm > 10 and step > 100`, `nan or not loss < 5`, `loss is not finite`.

A small closed language with its own parser: comparisons, `and`, `or`, `not`, parentheses, numbers and the names in `NAMES`. Nothing is
evaluated as Python. A name without a value makes the result unknown (None), never true by accident: without a loss, `loss > 3 or nan` is
true if there is a NaN and unknown if there is none.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from sonde.errors import SondeError

MAX_LENGTH = 500  # characters: use a callback for more
MAX_DEPTH = 20  # nested parentheses and `not`

STEP_NAMES: Mapping[str, str] = {
    "step": "number of the step, from 0",
    "epoch": "number of the epoch, if it is known",
    "loss": "the loss, if it is known",
    "lr": "learning rate of the optimizer's first group",
    "grad_norm": "L2 norm of the gradient at this layer, or of all gradients without a layer; not finite if an element is not",
}
"""Values of a step that need no tensor of a layer."""

TENSOR_NAMES: Mapping[str, str] = {
    "mean": "mean of the finite elements",
    "std": "standard deviation of the finite elements",
    "min": "smallest finite element",
    "max": "largest finite element",
    "mean_abs": "mean magnitude of the finite elements",
    "max_abs": "largest magnitude of the finite elements",
    "l1": "sum of the magnitudes of the finite elements",
    "l2": "root of the sum of squares of the finite elements",
    "norm": "the same as l2",
    "zeros": "number of elements that are zero",
    "zero_share": "share of elements that are zero, 0 to 1",
    "num": "number of elements",
    "nan": "number of NaN elements; alone: whether there is one",
    "inf": "number of infinite elements; alone: whether there is one",
    "finite": "whether no element is NaN or infinite",
}
"""Statistics of the current tensor: the output of a layer in the forward pass, the gradient of that output in the backward pass."""

NAMES: Mapping[str, str] = {
    **STEP_NAMES,
    **TENSOR_NAMES,
    "forward": "whether this is the forward pass",
    "backward": "whether this is the backward pass",
}
"""Every name that a condition may use, with its meaning."""

_USABLE_ALONE = frozenset({"nan", "inf", "finite", "forward", "backward"})  # conditions without a comparison
_BOOLEANS = frozenset({"finite", "forward", "backward"})  # and not numbers
_COUNTS = frozenset({"nan", "inf"})  # numbers of elements, not values to compare others with
_KINDS = ("nan", "inf", "finite")  # may follow `is`
_WORDS = frozenset({"and", "or", "not", "is"})
_COMPARISONS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne}
_OTHER_LANGUAGES = {"&": "and", "|": "or", "!": "not", "=": "=="}  # operators of other languages

_TOKEN = re.compile(
    r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>[<>=!]=|[<>()-])"
)


class _Token(NamedTuple):
    kind: str  # number | word | sign | end
    text: str
    column: int


@dataclass(frozen=True, slots=True)
class _Number:
    value: float


@dataclass(frozen=True, slots=True)
class _Name:
    name: str


@dataclass(frozen=True, slots=True)
class _Compare:
    """`0 < step <= 100`: one operand more than signs."""

    operands: tuple[_Number | _Name, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Is:
    operand: _Number | _Name
    kind: str


@dataclass(frozen=True, slots=True)
class _Not:
    part: _Node


@dataclass(frozen=True, slots=True)
class _Joined:
    parts: tuple[_Node, ...]
    decisive: bool  # the value of one part that decides the result: False for `and`, True for `or`


_Node = _Number | _Name | _Compare | _Is | _Not | _Joined
_OPERANDS = (_Number, _Name)


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition. `decide` evaluates it for given values."""

    text: str
    names: frozenset[str]
    _root: _Node

    def decide(self, values: Mapping[str, float]) -> bool | None:
        """Whether it holds; None if that depends on a name without a value."""
        return _truth(self._root, values)

    def __str__(self) -> str:
        return self.text


def parse_condition(text: str) -> Condition:
    """Parse a condition. A `SondeError` marks the invalid position."""
    if not isinstance(text, str):
        raise SondeError(f'a condition is a text such as "grad_norm > 10 and step > 100", not {type(text).__name__}.')
    if not text.strip():
        raise SondeError('the condition is empty. Write one such as "grad_norm > 10 and step > 100".')
    if len(text) > MAX_LENGTH:
        raise SondeError(f"the condition has {len(text)} characters; {MAX_LENGTH} is the most. Use a callback for more than that.")
    parser = _Parser(text)
    root = parser.parse()
    return Condition(text, frozenset(parser.names), root)


class _Parser:
    """Recursive descent, one method per level of precedence: or, and, not, comparison, operand."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.names: set[str] = set()
        self._tokens = list(self._split())
        self._at = 0
        self._depth = 0

    # -- tokens ------------------------------------------------------------------------------------

    def _split(self) -> list[_Token]:
        tokens, column = [], 0
        while column < len(self.text):
            if self.text[column] in " \t\r\n":
                column += 1
                continue
            match = _TOKEN.match(self.text, column)
            if match is None:
                sign = self.text[column]
                plain = "A condition is made of names, numbers, comparisons, and, or, not, ( )."
                advice = f"Write {_OTHER_LANGUAGES[sign]!r}." if sign in _OTHER_LANGUAGES else plain
                raise self._error(f"{_printable(sign)!r} has no meaning here", _Token("sign", sign, column), advice)
            tokens.append(_Token(str(match.lastgroup), match[0], column))
            column = match.end()
        tokens.append(_Token("end", "", len(self.text)))
        return tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, *texts: str) -> _Token | None:
        """The next token, if it is one of these words or signs."""
        token = self._next
        if token.kind not in ("word", "sign") or token.text not in texts:
            return None
        self._at += 1
        return token

    def _error(self, what: str, token: _Token, advice: str) -> SondeError:
        caret = " " * token.column + "^" * max(1, len(token.text))
        return SondeError(f"the condition cannot be read: {what}.\n  {_printable(self.text)}\n  {caret}\n{advice}")

    # -- grammar -----------------------------------------------------------------------------------

    def parse(self) -> _Node:
        first = self._next
        root = self._either()
        if self._next.kind != "end":
            plain = "Join two conditions by 'and' or 'or'; compare numbers by > < >= <= == !=."
            advice = "Remove it, or open one before." if self._next.text == ")" else plain
            raise self._error(f"{self._next.text!r} was not expected", self._next, advice)
        return self._as_truth(root, first)

    def _either(self) -> _Node:
        return self._joined("or", decisive=True)

    def _joined(self, word: str, *, decisive: bool) -> _Node:
        part = self._negation if word == "and" else lambda: self._joined("and", decisive=False)
        first, node = self._next, part()
        if self._next.text != word:
            return node
        parts = [self._as_truth(node, first)]
        while self._take(word):
            first = self._next
            parts.append(self._as_truth(part(), first))
        return _Joined(tuple(parts), decisive)

    def _negation(self) -> _Node:
        token = self._take("not")
        if token is None:
            return self._comparison()
        self._deeper(token)
        first = self._next
        part = self._as_truth(self._negation(), first)
        self._depth -= 1
        return _Not(part)

    def _comparison(self) -> _Node:
        first = self._next
        node = self._operand()
        if self._take("is"):
            negated = self._take("not") is not None
            kind = self._take(*_KINDS)
            if kind is None:
                raise self._error("after 'is' comes nan, inf or finite", self._next, "For instance: loss is not finite.")
            found = _Is(self._as_number(node, first), kind.text)
            return _Not(found) if negated else found
        operands, signs, starts = [node], [], [first]
        while sign := self._take(*_COMPARISONS):
            signs.append(sign.text)
            starts.append(self._next)
            operands.append(self._operand())
        if not signs:
            return node  # the caller checks a name without comparison, as in (step) > 3
        numbers = tuple(self._as_number(each, start) for each, start in zip(operands, starts))
        self._refuse_counts_as_values(numbers, starts)
        return _Compare(numbers, tuple(signs))

    def _operand(self) -> _Node:
        if opening := self._take("("):
            self._deeper(opening)
            node = self._either()
            if not self._take(")"):
                raise self._error("a ')' is missing", self._next, "Close the parenthesis.")
            self._depth -= 1
            return node
        sign = -1.0 if self._take("-") else 1.0
        if self._next.kind == "number":
            self._at += 1
            return _Number(sign * self._finite(self._tokens[self._at - 1]))
        if self._next.kind == "word" and sign > 0 and self._next.text not in _WORDS:
            return self._name()
        what = f"{self._next.text!r} was not expected" if self._next.text else "it ends too early"
        raise self._error(what, self._next, "Here comes a name or a number, as in: l2 > 10.")

    def _name(self) -> _Name:
        token = self._next
        if token.text not in NAMES:
            near = difflib.get_close_matches(token.text.lower(), [*NAMES, *_WORDS], n=3)
            advice = f"Nearest: {', '.join(near)}" if near else f"Known names: {', '.join(NAMES)}"
            raise self._error(f"{token.text!r} is not a name that conditions know", token, advice)
        self._at += 1
        self.names.add(token.text)
        return _Name(token.text)

    # -- checks ------------------------------------------------------------------------------------

    def _deeper(self, token: _Token) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"it is nested more than {MAX_DEPTH} deep", token, "Write it with fewer parentheses.")

    def _finite(self, token: _Token) -> float:
        value = float(token.text)
        if math.isinf(value):
            raise self._error(f"{token.text} is larger than any number here", token, "The largest is about 1.8e308; infinities: inf.")
        return value

    def _as_truth(self, node: _Node, start: _Token) -> _Node:
        if isinstance(node, _Number):
            raise self._error("a number alone is neither true nor false", start, "Compare it with a name, as in: step > 100.")
        if isinstance(node, _Name) and node.name not in _USABLE_ALONE:
            raise self._error(f"{node.name} is a number, neither true nor false", start, f"Compare it, as in: {node.name} > 10.")
        return node

    def _as_number(self, node: _Node, start: _Token) -> _Number | _Name:
        if not isinstance(node, _OPERANDS):
            raise self._error("only names and numbers can be compared", start, "Join conditions by 'and' or 'or'.")
        if isinstance(node, _Name) and node.name in _BOOLEANS:
            raise self._error(f"{node.name} is true or false, not a number", start, f"Write it alone: {node.name}, or: not {node.name}.")
        return node

    def _refuse_counts_as_values(self, operands: tuple[_Number | _Name, ...], starts: list[_Token]) -> None:
        """`loss == nan` would compare a loss with a number of elements, without an error."""
        others = [each.name for each in operands if isinstance(each, _Name) and each.name not in _COUNTS]
        for operand, start in zip(operands, starts):
            if others and isinstance(operand, _Name) and operand.name in _COUNTS:
                what = f"{operand.name} is the number of such elements, not a value to compare {others[0]} with"
                raise self._error(what, start, f"Write: {others[0]} is {operand.name}.")


def _printable(text: str) -> str:
    """Replaces unprintable characters one by one, so that the caret stays aligned."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


# -- evaluation --------------------------------------------------------------------------------------


def _value(node: _Number | _Name, values: Mapping[str, float]) -> float | None:
    return node.value if isinstance(node, _Number) else values.get(node.name)


def _truth(node: _Node, values: Mapping[str, float]) -> bool | None:
    match node:
        case _Compare(operands, signs):
            return _compared([_value(each, values) for each in operands], signs)
        case _Joined(parts, decisive):
            unknown = False
            for part in parts:
                result = _truth(part, values)
                if result is decisive:
                    return decisive
                unknown = unknown or result is None
            return None if unknown else not decisive
        case _Not(part):
            result = _truth(part, values)
            return None if result is None else not result
        case _Is(operand, kind):
            value = _value(operand, values)
            return None if value is None else _IS[kind](value)
        case _Name("finite"):
            num_nan, num_inf = values.get("nan"), values.get("inf")
            return None if num_nan is None or num_inf is None else not (num_nan or num_inf)
        case _Name(name):
            value = values.get(name)
            return None if value is None else value > 0
    return _unreachable(node)


def _unreachable(node: _Node) -> NoReturn:
    raise AssertionError(f"a condition without a truth value passed the checks: {node}")


def _compared(numbers: list[float | None], signs: tuple[str, ...]) -> bool | None:
    unknown = False
    for left, sign, right in zip(numbers, signs, numbers[1:]):
        if left is None or right is None:
            unknown = True
        elif not _COMPARISONS[sign](left, right):
            return False
    return None if unknown else True


_IS = {"nan": math.isnan, "inf": math.isinf, "finite": math.isfinite}

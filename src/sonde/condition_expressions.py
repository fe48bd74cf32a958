"""Parses and evaluates conditions of the user: `grad_norm > 10 and step > 100`, `nan or not loss < 5`, `loss is not finite`.

A small closed language with its own parser: comparisons, `and`, `or`, `not`, parentheses, numbers and the names in `NAMES`. Nothing is
evaluated as Python. A name without a value makes the result unknown (None) unless the rest decides it.
"""

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sonde.errors import SondeError

MAX_LENGTH = 500  # characters: use a callback for more
MAX_DEPTH = 20  # nested parentheses and `not`

STEP_NAMES: Mapping[str, str] = {
    "step": "number of the step, from 0",
    "epoch": "number of the epoch, if it is known",
    "loss": "the loss of the last backward, if it is known",
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
_IS = {"nan": math.isnan, "inf": math.isinf, "finite": math.isfinite}  # may follow `is`
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


class _Operand(NamedTuple):
    """A number, or a name."""

    name: str  # empty: a number
    value: float = math.nan

    def read(self, values: Mapping[str, float]) -> float | None:
        return values.get(self.name) if self.name else self.value


_Decide = Callable[[Mapping[str, float]], bool | None]
_Node = _Operand | _Decide


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition. `decide(values)` is whether it holds for values by name; None if that depends on a name without a value."""

    text: str
    names: frozenset[str]
    decide: _Decide

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
    decide = parser.parse()
    return Condition(text, frozenset(parser.names), decide)


class _Parser:
    """Recursive descent, one method per level of precedence: or, and, not, comparison, operand."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.names: set[str] = set()
        self._tokens = self._split()
        self._at = 0
        self._depth = 0

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

    def parse(self) -> _Decide:
        first = self._next
        root = self._joined("or")
        if self._next.kind != "end":
            plain = "Join two conditions by 'and' or 'or'; compare numbers by > < >= <= == !=."
            advice = "Remove it, or open one before." if self._next.text == ")" else plain
            raise self._error(f"{self._next.text!r} was not expected", self._next, advice)
        return self._as_truth(root, first)

    def _joined(self, word: str) -> _Node:
        part = self._negation if word == "and" else lambda: self._joined("and")
        first, node = self._next, part()
        if self._next.text != word:
            return node
        parts = [self._as_truth(node, first)]
        while self._take(word):
            first = self._next
            parts.append(self._as_truth(part(), first))
        return lambda values: _combined((decide(values) for decide in parts), decisive=word == "or")

    def _negation(self) -> _Node:
        token = self._take("not")
        if token is None:
            return self._comparison()
        self._deeper(token)
        first = self._next
        part = self._as_truth(self._negation(), first)
        self._depth -= 1
        return _negated(part)

    def _comparison(self) -> _Node:
        first = self._next
        node = self._operand()
        if self._take("is"):
            is_negated = self._take("not") is not None
            kind = self._take(*_IS)
            if kind is None:
                raise self._error("after 'is' comes nan, inf or finite", self._next, "For instance: loss is not finite.")
            operand, check = self._as_number(node, first), _IS[kind.text]

            def decide(values: Mapping[str, float]) -> bool | None:
                return None if (value := operand.read(values)) is None else check(value)

            return _negated(decide) if is_negated else decide
        nodes, signs, starts = [node], [], [first]
        while sign := self._take(*_COMPARISONS):
            signs.append(_COMPARISONS[sign.text])
            starts.append(self._next)
            nodes.append(self._operand())
        if not signs:
            return node  # the caller checks a name without comparison, as in (step) > 3
        operands = [self._as_number(each, start) for each, start in zip(nodes, starts)]
        self._refuse_counts_as_values(operands, starts)

        def compare(values: Mapping[str, float]) -> bool | None:
            numbers = [operand.read(values) for operand in operands]
            pairs = zip(numbers, signs, numbers[1:])
            results = (None if left is None or right is None else holds(left, right) for left, holds, right in pairs)
            return _combined(results, decisive=False)

        return compare

    def _operand(self) -> _Node:
        if opening := self._take("("):
            self._deeper(opening)
            node = self._joined("or")
            if not self._take(")"):
                raise self._error("a ')' is missing", self._next, "Close the parenthesis.")
            self._depth -= 1
            return node
        sign = -1.0 if self._take("-") else 1.0
        if self._next.kind == "number":
            token = self._next
            if math.isinf(value := float(token.text)):
                raise self._error(f"{token.text} is larger than any number here", token, "The largest is about 1.8e308; infinities: inf.")
            self._at += 1
            return _Operand("", sign * value)
        if self._next.kind == "word" and sign > 0 and self._next.text not in _WORDS:
            return self._name()
        what = f"{self._next.text!r} was not expected" if self._next.text else "it ends too early"
        raise self._error(what, self._next, "Here comes a name or a number, as in: l2 > 10.")

    def _name(self) -> _Operand:
        token = self._next
        if token.text not in NAMES:
            near = difflib.get_close_matches(token.text.lower(), [*NAMES, *_WORDS], n=3)
            advice = f"Nearest: {', '.join(near)}" if near else f"Known names: {', '.join(NAMES)}"
            raise self._error(f"{token.text!r} is not a name that conditions know", token, advice)
        self._at += 1
        self.names.add(token.text)
        return _Operand(token.text)

    def _deeper(self, token: _Token) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"it is nested more than {MAX_DEPTH} deep", token, "Write it with fewer parentheses.")

    def _as_truth(self, node: _Node, start: _Token) -> _Decide:
        if not isinstance(node, _Operand):
            return node
        name = node.name
        if not name:
            raise self._error("a number alone is neither true nor false", start, "Compare it with a name, as in: step > 100.")
        if name not in _USABLE_ALONE:
            raise self._error(f"{name} is a number, neither true nor false", start, f"Compare it, as in: {name} > 10.")
        if name == "finite":
            return _negated(lambda values: _combined(map(_is_positive, map(values.get, _COUNTS)), decisive=True))
        return lambda values: _is_positive(values.get(name))

    def _as_number(self, node: _Node, start: _Token) -> _Operand:
        if not isinstance(node, _Operand):
            raise self._error("only names and numbers can be compared", start, "Join conditions by 'and' or 'or'.")
        if node.name in _BOOLEANS:
            raise self._error(f"{node.name} is true or false, not a number", start, f"Write it alone: {node.name}, or: not {node.name}.")
        return node

    def _refuse_counts_as_values(self, operands: list[_Operand], starts: list[_Token]) -> None:
        """`loss == nan` would compare a loss with a number of elements, without an error."""
        others = [each.name for each in operands if each.name and each.name not in _COUNTS]
        for operand, start in zip(operands, starts):
            if others and operand.name in _COUNTS:
                what = f"{operand.name} is the number of such elements, not a value to compare {others[0]} with"
                raise self._error(what, start, f"Write: {others[0]} is {operand.name}.")


def _printable(text: str) -> str:
    """Replaces unprintable characters one by one, so that the caret stays aligned."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


def _combined(results: Iterable[bool | None], *, decisive: bool) -> bool | None:
    """`and` (one False decides) or `or` (one True decides) of results that may be unknown."""
    known = set(results)
    return decisive if decisive in known else None if None in known else not decisive


def _negated(decide: _Decide) -> _Decide:
    return lambda values: None if (result := decide(values)) is None else not result


def _is_positive(value: float | None) -> bool | None:
    return None if value is None else value > 0

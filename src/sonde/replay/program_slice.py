"""The statements of a running function on which a value depends: the part of a training step that can be run again.

Given a frame and an expression in it (the loss that is handed to backward), the statements before it are walked backwards. One is taken
when it makes something that is needed; what is still there as it was (the batch, the model, the labels) is taken from the variables. A
statement that must not run twice is left out and its result taken as it is. Nothing here knows torch.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

from sonde.errors import SondeError
from sonde.replay.statement_effects import MISSING, Effects, covers, effects_of, effects_of_all, lookup, objection, overlaps, place_of

RESULT = "_sonde_result"
PICK = "_sonde_pick"  # (value, whether it may be a flattened batch, or what it is an index of): that value for some of the samples
CALL = "_sonde_call"  # calls a model as it was called in the step: (its number in `Reader.modules`)
MAX_ROUNDS = 200


class CannotReplay(SondeError):
    """The reason why a part of a step cannot be run again, as a sentence."""


@dataclass(frozen=True, slots=True)
class Reader:
    """What the slicer has to know about values."""

    must_be_made: Callable[[Any], bool]  # depends on the model or is bad: taking it as it is would hide how it came about
    harmless: Callable[[Any], bool]  # its state is put back afterwards
    was_called: Callable[[Any], bool]  # a model whose inputs are known


@dataclass(frozen=True, slots=True)
class Slice:
    code: CodeType
    picking: CodeType  # the same, in which every value that is used goes through PICK
    given: frozenset[str]  # variables that are read as they are
    uncovered: frozenset[str]  # of these, those that should have been made again
    lines: tuple[int, ...]
    notes: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)  # attributes that the slice writes to: by the variables that stand for them

    def run(self, names: Mapping[str, Any], pick: Callable[[Any, bool], Any] | None = None, **more: Any) -> Any:
        """Runs it on a copy of the variables; no attribute of the user's is written to."""
        scope = {**names, **more, PICK: pick}
        scope |= {name: value for place, name in self.renamed.items() if (value := lookup(names, place)) is not MISSING}
        exec(self.code if pick is None else self.picking, scope)
        return scope[RESULT]


@dataclass(slots=True)
class _Search:
    items: list[ast.stmt]
    goal: ast.expr
    names: Mapping[str, Any]
    reader: Reader
    after: list[ast.stmt]
    barred: dict[int, str]  # statements that must not run, and why
    notes: list[str] = field(default_factory=list)
    assigned: set[str] = field(default_factory=set)
    wanted: dict[str, int] = field(default_factory=dict)  # places to be made, by the statement that needs them; len(items): the goal
    optional: set[str] = field(default_factory=set)
    since: set[str] = field(default_factory=set)  # assigned or changed after the point where the walk is
    given: set[str] = field(default_factory=set)
    uncovered: set[str] = field(default_factory=set)
    taken: dict[int, ast.stmt] = field(default_factory=dict)

    def walk(self) -> tuple[str, int] | None:
        """One walk backwards. None: all that is needed is there. Else a place whose value is gone, and who needs it."""
        self.assigned = set().union(*(effects_of(item).makes for item in self.items))
        for store in (self.wanted, self.optional, self.since, self.given, self.uncovered, self.taken):
            store.clear()
        self.notes.clear()
        for statement in self.after:
            self._pass(effects_of(statement))
        self._need_all(effects_of(self.goal).reads, len(self.items))
        for index in reversed(range(len(self.items))):
            whole = effects_of(self.items[index])
            made = {place for place in self.wanted if overlaps(whole.makes, place)}
            if made:
                gone = self._take(index, whole, made)
                if gone:
                    return gone
            self._pass(whole)
        for place, by in self.wanted.items():
            if place in self.optional:
                continue
            if overlaps(self.since, place):
                return place, by
            self.given.add(place)
            self.uncovered.add(place)
        return None

    def _take(self, index: int, whole: Effects, made: set[str]) -> tuple[str, int] | None:
        piece = _pruned(self.items[index], set(self.wanted))
        resolve = partial(lookup, self.names)
        reason = self.barred.get(index) or ("" if piece is None else objection(piece, resolve, self.reader.harmless))
        if piece is None or reason:
            for place in made:
                if overlaps(self.since, place):
                    return place, self.wanted[place]
                if place in self.names or "." in place:
                    self.given.add(place)
                    self.uncovered.add(place)
                del self.wanted[place]
            self.notes.append(f"line {self.items[index].lineno} was not run again: {reason or 'nothing of it is needed'}")
            return None
        effects = effects_of(piece)
        self.taken[index] = piece
        for place in list(self.wanted):
            if covers(effects.writes, place):
                del self.wanted[place]
            elif overlaps(effects.maybe, place):
                self.optional.add(place)  # made on some ways through: what was there before is used on the others
        self.since |= effects.writes | effects.maybe | effects.changes
        self._need_all(effects.reads | effects.changes, index)
        return None

    def _need_all(self, places: set[str], by: int) -> None:
        for place in places:
            if "." in place and place not in self.assigned:
                continue  # its root is among the places too
            value = lookup(self.names, place)
            if overlaps(self.since, place):
                if place.partition(".")[0] in self.names or value is not MISSING or covers(self.assigned, place):
                    self.wanted.setdefault(place, by)
                    self.optional.discard(place)
            elif value is not MISSING and self.reader.must_be_made(value):
                self.wanted.setdefault(place, by)
            else:
                self.given.add(place)

    def _pass(self, whole: Effects) -> None:
        self.since |= whole.writes | whole.maybe
        for place in whole.changes:  # of a container or an array the content counts; of any other object that it is the same one
            value = lookup(self.names, place)
            if isinstance(value, (list, dict, set)) or hasattr(type(value), "shape"):
                self.since.add(place)

    def mend(self, place: str, by: int) -> None:
        """The value at a place is gone: let a model that was called with it be called with what was kept, or do without the statement."""
        if by == len(self.items):
            raise CannotReplay(f"the value of {place} that the loss was made from is gone")
        changed = _from_kept(self.items[by], place, partial(lookup, self.names), self.reader.was_called)
        if changed is not None:
            self.items[by] = changed
        else:
            self.barred[by] = f"it needs the value that {place} had before"


def slice_of(
    before: list[ast.stmt],
    goal: ast.expr,
    names: Mapping[str, Any],
    reader: Reader,
    filename: str,
    *,
    after: Sequence[ast.stmt] = (),
    barred: Mapping[int, str] | None = None,
) -> Slice:
    """The part of `before` that makes `goal` again, given the variables as they are now. `after` has run since; of `before`, some
    statements must not run again."""
    search = _Search(list(before), goal, names, reader, list(after), dict(barred or {}))
    for _ in range(MAX_ROUNDS):
        gone = search.walk()
        if gone is None:
            break
        search.mend(*gone)
    else:
        raise CannotReplay("the statements before the loss depend on each other in too many ways")
    body = [search.taken[index] for index in sorted(search.taken)]
    target = ast.Assign(targets=[ast.Name(RESULT, ast.Store())], value=goal)
    ast.copy_location(target, goal)
    body.append(target)
    attributes = {place for piece in body for place in effects_of(piece).makes if "." in place}
    renamed = {place: "_sonde_" + place.replace(".", "__") for place in sorted(attributes)}
    if renamed:
        body = [_Rename(renamed).visit(copy.deepcopy(piece)) for piece in body]
    body = _with_known_contexts(body, names)
    picking = [_Picking().visit(copy.deepcopy(piece)) for piece in body]
    code, picking_code = (
        compile(ast.fix_missing_locations(ast.Module(body=each, type_ignores=[])), filename, "exec") for each in (body, picking)
    )
    return Slice(
        code, picking_code, frozenset(search.given), frozenset(search.uncovered),
        tuple(piece.lineno for piece in body), tuple(search.notes), renamed,
    )  # fmt: skip


class _Rename(ast.NodeTransformer):
    def __init__(self, renamed: Mapping[str, str]) -> None:
        self.renamed = renamed

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name = self.renamed.get(place_of(node))
        return ast.copy_location(ast.Name(name, node.ctx), node) if name else self.generic_visit(node)


class _Picking(ast.NodeTransformer):
    """Sends what is used through PICK: `x`, `batch.x`, `y[i : i + 16]`. Functions that are called are left as they are."""

    indexed: ast.expr | None = None  # in x[places]: x

    def _wrap(self, node: Any, *, flat: bool) -> ast.expr:
        how = copy.deepcopy(self.indexed) if flat and self.indexed is not None else ast.Constant(flat)
        call = ast.Call(func=ast.Name(PICK, ast.Load()), args=[node, how], keywords=[])
        return ast.copy_location(call, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        elif not isinstance(node.func, ast.Name):
            node.func = self.visit(node.func)
        node.args = [self.visit(arg) for arg in node.args]
        for word in node.keywords:
            word.value = self.visit(word.value)
        return self._wrap(node, flat=False)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._wrap(node, flat=True) if isinstance(node.ctx, ast.Load) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not isinstance(node.ctx, ast.Load):
            return node
        return self._wrap(node if place_of(node) else self.generic_visit(node), flat=True)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not isinstance(node.ctx, ast.Load):
            return node
        outer, self.indexed = self.indexed, node.value if place_of(node.value) else None
        node.slice = self.visit(node.slice)
        self.indexed = outer
        node.value = self._wrap(node.value, flat=False) if place_of(node.value) else self.visit(node.value)
        return self._wrap(node, flat=False)


def _from_kept(statement: ast.stmt, place: str, resolve: Callable[[str], Any], was_called: Callable[[Any], bool]) -> ast.stmt | None:
    """`out, h = model(x, h)` with the inputs that were kept; None where that does not rid it of the place."""
    changed = ast.fix_missing_locations(_FromKept(place, resolve, was_called).visit(copy.deepcopy(statement)))
    return changed if place not in effects_of(changed).reads else None


class _FromKept(ast.NodeTransformer):
    def __init__(self, place: str, resolve: Callable[[str], Any], was_called: Callable[[Any], bool]) -> None:
        self.place, self.resolve, self.was_called = place, resolve, was_called

    def visit_Call(self, node: ast.Call) -> ast.AST:
        callee = place_of(node.func)
        if callee and self.place in effects_of(node).reads - effects_of(node.func).reads and self.was_called(self.resolve(callee)):
            call = ast.Call(func=ast.Name(CALL, ast.Load()), args=[node.func], keywords=[])
            return ast.copy_location(call, node)
        return self.generic_visit(node)


# -- the needed part of a statement -------------------------------------------------------------------------------------------------------


def _pruned(statement: ast.stmt, needed: set[str]) -> ast.stmt | None:
    """A compound statement without what nobody needs (a progress bar, a list of losses); None where nothing is left."""
    if isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
        if isinstance(statement, (ast.For, ast.While)):
            carried: set[str] = set()
            while not carried >= (more := effects_of_all(_needed(statement.body, needed | carried)).reads):
                carried |= more
            needed = needed | carried
        piece = copy.copy(statement)
        body = _needed(statement.body, needed)
        piece.body = body or [ast.copy_location(ast.Pass(), statement)]
        if not isinstance(piece, ast.With):
            piece.orelse = _needed(piece.orelse, needed)
        if isinstance(piece, ast.Try):
            piece.finalbody = _needed(piece.finalbody, needed)
        return piece if body or getattr(piece, "orelse", None) else None
    if isinstance(statement, (ast.Break, ast.Continue)):
        return statement
    return statement if any(overlaps(effects_of(statement).makes, place) for place in needed) else None


def _needed(block: list[ast.stmt], needed: set[str]) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    for statement in reversed(block):
        piece = _pruned(statement, needed)
        if piece is not None:
            kept.append(piece)
            effects = effects_of(piece)
            needed = {place for place in needed if not covers(effects.writes, place)} | effects.reads
    return kept[::-1]


def _with_known_contexts(body: list[ast.stmt], names: Mapping[str, Any]) -> list[ast.stmt]:
    """Contexts of libraries (autocast, no_grad) belong to the arithmetic; those of the user's own (a timer) are left out."""
    flat: list[ast.stmt] = []
    for piece in body:
        done = _KnownContexts(names).visit(piece)
        flat += done if isinstance(done, list) else [done]
    return flat


class _KnownContexts(ast.NodeTransformer):  # a class that is made in a function would keep the user's variables until it is collected
    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        known = [item for item in node.items if _is_of_a_library(item.context_expr, self.names)]
        if len(known) == len(node.items):
            return node
        if not known:
            return node.body
        node.items = known
        return node


def _is_of_a_library(expression: ast.expr, names: Mapping[str, Any]) -> bool:
    value = lookup(names, place_of(expression.func if isinstance(expression, ast.Call) else expression))
    home = getattr(value, "__module__", None) or type(value).__module__
    return value is not MISSING and str(home).partition(".")[0] in {"torch", "contextlib", "accelerate", "lightning", "apex"}

"""From an operation that put out a bad number to the origin that a person reads. It is told at once, while the numbers are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sonde.events import STATISTICS
from sonde.nonfinite import op_names
from sonde.nonfinite.bad_op import Case, Told
from sonde.nonfinite.explain_backward import hidden
from sonde.nonfinite.explain_forward import explain
from sonde.nonfinite.module_stack import Places, storage_of
from sonde.nonfinite.op_call import Call, Node, places_of, saved_tensors
from sonde.nonfinite.origin import Origin, Seen
from sonde.nonfinite.propagation import HARMED, WRITTEN, Event
from sonde.statistics.table import StatisticsTable
from sonde.statistics.torch_ops import readable

MAX_INPUTS = 8  # tensors that are described
_AT = {name: i for i, name in enumerate(STATISTICS)}

_OF_LINEAR = {"input": "bias", "mat1": "input", "mat2": "weight"}

Held = Mapping[int, tuple[str, str]]
Makers = Callable[[Tensor], tuple[str, ...]]


def seen(tensors: Mapping[str, Tensor]) -> tuple[Seen, ...]:
    """Tensors as they are now."""
    named = list(tensors.items())[:MAX_INPUTS]
    rows = StatisticsTable(len(named))
    rows.measure(0, [tensor for _, tensor in named])
    rows.synchronize()
    return tuple(
        Seen(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.numel(),
            float(row[_AT["min"]]),
            float(row[_AT["max"]]),
            *(int(row[_AT[each]]) for each in ("zeros", "nan", "inf")),
        )
        for (name, tensor), row in zip(named, rows.values)
    )


def tell(
    call: Call, nature: str, kind: str, output: Tensor, node: Node | None, places: Places, makers: Makers, held: Held
) -> tuple[Origin, Origin | None]:
    """The origin, if it is this operation; and what it is if the gradient that came in was zero there, as where() makes it."""
    by_user = call.in_backward and places.line_in_backward() is not None
    saved = saved_tensors(call, node) if call.in_backward and not by_user else {}
    gone = call.written if op_names.overwrites(call.func) else ()  # it holds the result by now
    tensors = saved | {name: tensor for name, tensor in call.tensors.items() if name not in gone}
    originals = {name: call.original(name) if name in call.tensors else tensor for name, tensor in tensors.items()}
    owned = places_of(originals, held)
    made_by = {name: makers(tensor) for name, tensor in originals.items()}
    arithmetic = op_names.bare(call.func)
    forward = ""
    if call.in_backward and not by_user:
        forward = node.arithmetic if node else _name_of(call.autograd_node) or arithmetic
    plain = {name: readable(tensor) for name, tensor in tensors.items()}
    called = "" if node is None or by_user or node.known_as == arithmetic else node.known_as
    operation, module, source, text = _where(call, node, places)
    if nature == WRITTEN:
        told = _written(kind, operation)
    else:
        told = explain(Case(arithmetic, readable(output), plain, call.numbers, made_by, called), forward)
    origin = Origin(
        kind=kind,
        phase="backward" if call.in_backward else "forward",
        operation=operation,
        module=module,
        source=source,
        text=text,
        cause=told.cause,
        fix=told.fix,
        key=told.key,
        inputs=seen({owned[name][1] if name in owned else _plainly(name, call, operation, by_user): x for name, x in plain.items()}),
        output=seen({"": readable(output)})[0],
        parameters=_parameters(owned, node if call.in_backward and not by_user else None, held),
        after=node.after if node else (),
    )
    if not call.in_backward or by_user or node is None or not node.is_hidden or told.key in ("other", "nan-grad-where"):
        return origin, None
    other = hidden(told, node.known_as)
    return origin, replace(origin, key=other.key, cause=other.cause, fix=other.fix)


def _parameters(owned: Mapping[str, tuple[str, str]], node: Node | None, held: Held) -> tuple[str, ...]:
    """The paths of the parameters among what an operation, or its forward, was given."""
    found = [*owned.values(), *(held[storage] for storage in (node.parameters if node else ()) if storage in held)]
    return tuple(dict.fromkeys(path for what, path in found if what == "parameter"))


def tell_given(call: Call, argument: str, kind: str, node: Node | None, places: Places, held: Held) -> Origin:
    """A tensor that was bad before any operation under this tracer."""
    tensor = readable(call.tensors[argument])
    storage = storage_of(call.original(argument))
    what, path = held.get(storage, ("input", ""))
    operation, module, source, text = places.entrance(storage) or _where(call, node, places)
    made = "NaN" if kind == "nan" else "Inf"
    (described,) = seen({path or _plainly(argument, call, operation, not call.in_backward): tensor})
    num = described.nan if kind == "nan" else described.inf
    phase, key = what, f"nan-{what}"
    if what == "input" and not tensor.dim():
        phase, (key, cause, fix) = "forward", _written(kind, operation)
    elif call.is_accumulation:
        cause = f"a .grad held {num:,} {made} among {tensor.numel():,} values before this backward, which adds to it"
        fix = "call optimizer.zero_grad() before the backward, and look at the step that first wrote them"
    elif what == "input":
        cause = f"{num:,} {made} among {tensor.numel():,} values that were given to {operation}: they were there before"
        fix = "look where these data come from: a missing value, a division by a spread of 0, a number that left its range"
    else:
        wrote = "step" if what == "parameter" else "forward"  # which may be one of the same step
        cause = f"{what} {path} holds {num:,} {made} among {tensor.numel():,} values: an earlier {wrote} or a checkpoint put them there"
        fix = f"start again from a state that is finite, and look at the {wrote} that first wrote them"
    return Origin(
        kind=kind,
        phase=phase,
        operation=operation,
        module=module,
        source=source,
        text=text,
        cause=cause,
        fix=fix,
        key=key,
        inputs=(described,),
        parameters=(path,) if what == "parameter" else (),
    )


def in_view_of_what_follows(root: Event, end: Event) -> Origin | None:
    """The origin that a root tells, with what is known only from the way to the bad result."""
    origin = root.origin
    if origin is None:
        return None
    if root.if_hidden is not None and (root.kind == "nan" or root.met_zero):
        return root.if_hidden
    if origin.key == "exp-overflow" and "sum" in end.along and end.along & {f"{HARMED} div", "log"}:
        return replace(
            origin,
            key="unstable-softmax",
            cause=f"{origin.cause}; then it is divided by, or the logarithm is taken of, its sum: a softmax by hand",
            fix="use torch.softmax, F.log_softmax, torch.logsumexp or F.cross_entropy: they subtract the maximum first",
        )
    return origin


def _where(call: Call, node: Node | None, places: Places) -> tuple[str, str, str, str]:
    """Operation, module, line and its text: of the forward operation where its backward is under way."""
    if not call.in_backward:
        line = places.line()
        return op_names.known_as(call.func, line.called, places.module_type), places.module, line.source, line.text
    own = places.line_in_backward()
    if own is not None:  # a backward of the user's own, or a hook, is running: the line is in there
        operation = _function(call) or op_names.known_as(call.func, own.called, "")
        return operation, node.module if node else "", own.source, own.text
    if node is not None:
        return node.known_as, node.module, node.source, node.text
    line = places.line()
    return _name_of(call.autograd_node) or op_names.known_as(call.func, "", ""), "", line.source, line.text


def _function(call: Call) -> str:
    """The class of the user's own autograd.Function whose backward is under way, else ""."""
    function = getattr(type(call.autograd_node), "_forward_cls", None)
    return function.__name__ if function else ""


def _plainly(argument: str, call: Call, operation: str, by_user: bool) -> str:
    """The arguments of linear are not called mat1 and mat2 by anybody else; in backward they are not those of the forward."""
    if call.in_backward and not by_user:
        return argument.removeprefix("saved ") if argument.startswith("saved ") else f"backward {argument}"
    return _OF_LINEAR.get(argument, argument) if operation == "linear" and call.func._schema.name == "aten::addmm" else argument


def _written(kind: str, operation: str) -> Told:
    made = "NaN" if kind == "nan" else "Inf"
    return Told("written", f"the program itself writes {made} here ({operation}), and the result follows from it",
                "keep it out of the result: select with torch.where or masked_fill after the operation, or write a finite number")


def _name_of(autograd_node: Any) -> str:
    """`SqrtBackward0` is the backward of sqrt."""
    if autograd_node is None:
        return ""
    name: str = autograd_node.name().rpartition("::")[2].partition("Backward")[0]
    return "".join(f"_{letter.lower()}" if letter.isupper() and i else letter.lower() for i, letter in enumerate(name))


def kind_of(tensors: list[Tensor]) -> str:
    return "nan" if any(bool(torch.isnan(readable(tensor)).any()) for tensor in tensors) else "inf"

"""Builds the `Origin` of a non-finite value from the operation that output it, at once, while its tensors hold their values."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sonde.events import STATISTICS
from sonde.nonfinite import operation_names
from sonde.nonfinite.explain_backward import explain_backward, explain_masked
from sonde.nonfinite.explain_forward import BadOp, Explanation, dtype_name, explain_forward
from sonde.nonfinite.module_stack import Location, ModuleStack, storage_id
from sonde.nonfinite.nonfinite_propagation import NonFiniteEvent, Role
from sonde.nonfinite.origin_types import Origin, TensorSummary
from sonde.nonfinite.traced_operation_call import AutogradNodeInfo, OpCall, saved_tensors, select_model_tensors
from sonde.statistics.private_torch_api import custom_function, op_schema
from sonde.statistics.statistics_without_extension import readable
from sonde.statistics.tensor_statistics_table import StatisticsTable

MAX_INPUTS = 8  # tensors that are summarized
_COLUMNS = {name: i for i, name in enumerate(STATISTICS)}

_ADDMM_LABELS = {"input": "bias", "mat1": "input", "mat2": "weight"}

ModelTensors = Mapping[int, tuple[str, str]]  # by storage: ("parameter" | "buffer", path)
Producers = Callable[[Tensor], tuple[str, ...]]  # names of the operations that produced a tensor, nearest first


def summarize(tensors: Mapping[str, Tensor]) -> tuple[TensorSummary, ...]:
    """Summaries of the first MAX_INPUTS tensors, as they are now."""
    named = list(tensors.items())[:MAX_INPUTS]
    table = StatisticsTable(len(named))
    table.measure(0, [tensor for _, tensor in named])
    table.synchronize()
    return tuple(
        TensorSummary(
            name,
            tuple(tensor.shape),
            dtype_name(tensor.dtype),
            tensor.numel(),
            float(row[_COLUMNS["min"]]),
            float(row[_COLUMNS["max"]]),
            *(int(row[_COLUMNS[column]]) for column in ("zeros", "nan", "inf")),
        )
        for (name, tensor), row in zip(named, table.values)
    )


def nonfinite_kind(tensors: list[Tensor]) -> str:
    """ "nan" if one of the tensors holds a NaN, else "inf"."""
    return "nan" if any(bool(torch.isnan(readable(tensor)).any()) for tensor in tensors) else "inf"


def build_origin(
    call: OpCall, role: Role, kind: str, output: Tensor, node: AutogradNodeInfo | None, modules: ModuleStack, producers: Producers,
    model_tensors: ModelTensors,
) -> tuple[Origin, Origin | None]:  # fmt: skip
    """The origin if it is this operation, and the origin if where() hid these values in the forward (None if it did not). `node` is the
    forward operation, also in backward."""
    in_user_code = call.in_backward and modules.line_in_backward() is not None
    in_torch_backward = call.in_backward and not in_user_code
    saved = saved_tensors(call, node) if in_torch_backward else {}
    overwritten = call.written_args if operation_names.overwrites_args(call.func) else ()  # these already hold the result
    tensors = saved | {name: tensor for name, tensor in call.tensors.items() if name not in overwritten}
    originals = {name: call.original(name) if name in call.tensors else tensor for name, tensor in tensors.items()}
    owned = select_model_tensors(originals, model_tensors)
    base_name = operation_names.base_name(call.func)
    forward_name = ""
    if in_torch_backward:
        forward_name = node.base_name if node else _forward_name(call.autograd_node) or base_name
    values = {name: readable(tensor) for name, tensor in tensors.items()}
    called = "" if node is None or in_user_code or node.location.operation == base_name else node.location.operation
    location = _locate(call, node, modules)
    if role is Role.LITERAL:
        explanation = _explain_literal(kind, location.operation)
    else:
        made_by = {name: producers(tensor) for name, tensor in originals.items()}
        bad_op = BadOp(base_name, readable(output), values, call.other_args, made_by, called)
        explanation = explain_backward(bad_op, forward_name) if forward_name else explain_forward(bad_op)
    labels = {name: owned[name][1] if name in owned else _label(name, call, location.operation, in_user_code) for name in values}
    origin = Origin(
        kind,
        "backward" if call.in_backward else "forward",
        *location,
        **explanation._asdict(),
        inputs=summarize({labels[name]: tensor for name, tensor in values.items()}),
        output=summarize({"": readable(output)})[0],
        parameters=_parameters(owned, node if in_torch_backward else None, model_tensors),
        after=node.producer_modules if node else (),
    )
    if not in_torch_backward or node is None or not node.is_masked or explanation.key in ("other", "nan-grad-where"):
        return origin, None
    return origin, replace(origin, **explain_masked(explanation, node.location.operation)._asdict())


def build_input_origin(
    call: OpCall, argument: str, kind: str, node: AutogradNodeInfo | None, modules: ModuleStack, model_tensors: ModelTensors
) -> Origin:
    """The origin of an argument that was non-finite before tracing began: an input, a parameter, a buffer or an old gradient."""
    tensor = readable(call.tensors[argument])
    storage = storage_id(call.original(argument))
    what, path = model_tensors.get(storage, ("input", ""))
    location = modules.root_input(storage) or _locate(call, node, modules)
    operation = location.operation
    made = "NaN" if kind == "nan" else "Inf"
    (summary,) = summarize({path or _label(argument, call, operation, not call.in_backward): tensor})
    num = summary.nan if kind == "nan" else summary.inf
    phase, key = what, f"nan-{what}"
    if what == "input" and not tensor.dim():
        phase, (key, cause, fix) = "forward", _explain_literal(kind, operation)
    elif call.is_accumulate_grad:
        cause = f"a .grad held {num:,} {made} among {tensor.numel():,} values before this backward, which adds to it"
        fix = "call optimizer.zero_grad() before the backward, and look at the step that first wrote them"
    elif what == "input":
        cause = f"{num:,} {made} among {tensor.numel():,} values that were given to {operation}: they were there before"
        fix = "look where these data come from: a missing value, a division by a spread of 0, a number that left its range"
    else:
        wrote = "step" if what == "parameter" else "forward"  # which may be one of the same step
        cause = f"{what} {path} holds {num:,} {made} among {tensor.numel():,} values: an earlier {wrote} or a checkpoint put them there"
        fix = f"start again from a state that is finite, and look at the {wrote} that first wrote them"
    return Origin(kind, phase, *location, cause, fix, key, inputs=(summary,), parameters=(path,) if what == "parameter" else ())


def refine_origin(root: NonFiniteEvent, end: NonFiniteEvent) -> Origin | None:
    """The origin of a root event, refined by the operations on the path to the bad result `end`."""
    origin = root.origin
    if origin is None:
        return None
    if root.origin_if_masked is not None and (root.kind == "nan" or root.met_zero):
        return root.origin_if_masked
    if origin.key == "exp-overflow" and "sum" in end.ops_on_path and end.ops_on_path & {f"{Role.WORSENED} div", "log"}:
        cause = f"{origin.cause}; then it is divided by, or the logarithm is taken of, its sum: a softmax by hand"
        fix = "use torch.softmax, F.log_softmax, torch.logsumexp or F.cross_entropy: they subtract the maximum first"
        return replace(origin, key="unstable-softmax", cause=cause, fix=fix)
    return origin


def _parameters(owned: Mapping[str, tuple[str, str]], node: AutogradNodeInfo | None, model_tensors: ModelTensors) -> tuple[str, ...]:
    """Paths of the parameters among the arguments of an operation and, in backward, of its forward operation."""
    found = [*owned.values(), *(model_tensors[storage] for storage in (node.parameters if node else ()) if storage in model_tensors)]
    return tuple(dict.fromkeys(path for what, path in found if what == "parameter"))


def _locate(call: OpCall, node: AutogradNodeInfo | None, modules: ModuleStack) -> Location:
    """Where the program called an operation; in backward, where it called the forward operation."""
    if not call.in_backward:
        line = modules.line()
        return Location(operation_names.display_name(call.func, line.called, modules.module_type), modules.module, line.source, line.text)
    own = modules.line_in_backward()
    if own is not None:  # a backward or a hook of the user is running: name the line in it
        function = custom_function(call.autograd_node)
        operation = function.__name__ if function else operation_names.display_name(call.func, own.called, "")
        return Location(operation, node.location.module if node else "", own.source, own.text)
    if node is not None:
        return node.location
    line = modules.line()
    return Location(_forward_name(call.autograd_node) or operation_names.display_name(call.func, "", ""), "", line.source, line.text)


def _label(argument: str, call: OpCall, operation: str, in_user_code: bool) -> str:
    """The name of an argument for the user: `weight` instead of `mat2` of a linear; in backward, apart from those of the forward."""
    if call.in_backward and not in_user_code:
        return argument.removeprefix("saved ") if argument.startswith("saved ") else f"backward {argument}"
    return _ADDMM_LABELS.get(argument, argument) if operation == "linear" and op_schema(call.func).name == "aten::addmm" else argument


def _explain_literal(kind: str, operation: str) -> Explanation:
    made = "NaN" if kind == "nan" else "Inf"
    fix = "keep it out of the result: select with torch.where or masked_fill after the operation, or write a finite number"
    return Explanation("written", f"the program itself writes {made} here ({operation}), and the result follows from it", fix)


def _forward_name(autograd_node: Any) -> str:
    """`SqrtBackward0` is the backward of `sqrt`."""
    if autograd_node is None:
        return ""
    name: str = autograd_node.name().rpartition("::")[2].partition("Backward")[0]
    return "".join(f"_{letter.lower()}" if letter.isupper() and i else letter.lower() for i, letter in enumerate(name))

"""`NonFiniteTracer` inspects every operation, forward and backward, and finds the one that created a NaN or an Inf.

A TorchDispatchMode runs each operation unchanged and reads its inputs before and its outputs after: results stay bit-identical.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sonde.errors import NonFiniteError
from sonde.nonfinite import operation_names
from sonde.nonfinite.module_stack import Location, ModuleStack, is_recomputing, storage_id
from sonde.nonfinite.nonfinite_propagation import NonFiniteEvent, PropagationGraph, Role, earliest_root
from sonde.nonfinite.origin_from_operation import build_input_origin, build_origin, nonfinite_kind, refine_origin
from sonde.nonfinite.origin_types import Origin
from sonde.nonfinite.traced_operation_call import AutogradNodeInfo, OpCall, is_additive_mask, is_floating
from sonde.statistics import private_torch_api, reductions
from sonde.statistics.private_torch_api import EagerDispatchMode, OpOverload, has_kernel, op_schema

_log = logging.getLogger("sonde")

MAX_NODES = 200_000  # autograd nodes whose forward operation is stored
MAX_COPY_BYTES = 64 << 20  # an in-place operation overwrites the values that explain it: up to this size they are copied first
MAX_PRODUCERS = 6  # operations that are stored per tensor
MAX_STORAGES = 100_000  # storages whose producers are stored


@contextmanager
def compile_disabled() -> Iterator[None]:
    """Run compiled models in eager mode inside: compiled code has no operations and no layers to inspect."""
    if not private_torch_api.is_compiler_loaded():
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # Caused by the global hooks of ModuleStack, and harmless.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        yield


class NonFiniteTracer:
    """Traces the code inside its context; then `origin` is the operation that created the non-finite value, or None. `models` gives modules
    their names. With `ignore_masks`, an Inf that the program writes is an origin only if it reaches the loss. With `raise_on_origin`,
    `NonFiniteError` is raised as soon as the origin is certain."""

    def __init__(
        self, models: Mapping[str, nn.Module] | None = None, *, ignore_masks: bool = True, raise_on_origin: bool = False
    ) -> None:
        self.caveats: list[str] = []
        self._ignore_masks, self._raises = ignore_masks, raise_on_origin
        self._modules = ModuleStack(models or {})
        self._graph = PropagationGraph()
        self._nodes: dict[int, AutogradNodeInfo] = {}  # by sequence number
        self._producers: dict[int, tuple[AutogradNodeInfo, ...]] = {}  # by storage: the operations that produced it, nearest first
        self._uninitialized: set[int] = set()  # storages that nothing has written yet
        self._storage_refs: dict[int, StorageWeakRef] = {}
        self._last_sequence_nr = -1
        self._has_backward = False
        self._is_done = False
        self._found: Origin | None = None
        self._stack = ExitStack()

    def __enter__(self) -> NonFiniteTracer:
        self._last_sequence_nr = private_torch_api.next_sequence_nr() - 1
        with ExitStack() as stack:
            stack.enter_context(self._modules)
            stack.enter_context(compile_disabled())
            stack.enter_context(_TracingMode(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        if not self._is_done:
            self._finish(self._unconsumed_events(), include_intentional=not self._ignore_masks)
        self._modules.release()
        self._producers.clear()
        self._nodes.clear()
        self._uninitialized.clear()
        if not any(error):
            self.raise_if_found()

    def __str__(self) -> str:
        return self.origin.summary() if self.origin else "no unintended NaN or Inf was created"

    def raise_if_found(self) -> None:
        """Raise `NonFiniteError` if that was asked for and the origin is certain."""
        if self._raises and self.origin is not None:
            raise NonFiniteError(self.origin.summary(), self.origin)

    @property
    def origin(self) -> Origin | None:
        """The origin of the bad result: of the loss if backward was called, else of the tensors that the code leaves behind."""
        return self._with_context(self._found)

    def origin_of(self, bad: Tensor | Iterable[Tensor]) -> Origin | None:
        """The origin of these non-finite tensors, which were computed under this tracer and are still alive."""
        found = earliest_root(self._events_of([bad] if isinstance(bad, Tensor) else bad), include_intentional=True)
        return self._with_context(refine_origin(*found)) if found else None

    def _with_context(self, origin: Origin | None) -> Origin | None:
        """Add the output sizes of the modules nearby and the caveats of this search."""
        if origin is None:
            return None
        outputs = self._modules.max_abs_outputs
        sizes = tuple((path, outputs[path]) for path in dict.fromkeys((*origin.after, origin.module)) if path in outputs)
        compiled = ["a compiled model was run without compiling, operation by operation"] if self._modules.has_compiled_model else []
        return replace(origin, sizes=sizes, caveats=(*origin.caveats, *self.caveats, *compiled))

    # ---- called by the dispatch mode

    def on_op_start(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall | None:
        """Record the arguments of an operation. Values that it will overwrite are read now, because they may be the cause."""
        if self._is_done:
            return None
        call = OpCall(func, args, kwargs)
        if private_torch_api.graph_task_id() != -1:
            self._has_backward = True
            if not (torch.is_grad_enabled() and is_recomputing()):  # a recomputed part of the forward counts as forward
                call.in_backward = True
                call.autograd_node = private_torch_api.current_autograd_node()
                call.is_accumulate_grad = call.autograd_node is not None and call.autograd_node.name() == "torch::autograd::AccumulateGrad"
        if call.written_args and not operation_names.overwrites_args(func):
            call.was_finite = {name: is_finite(tensor) for name, tensor in call.float_tensors}
            call.copy_written_args(MAX_COPY_BYTES)
        return call

    def on_op_end(self, call: OpCall, output: Any) -> None:
        """Record the outputs of an operation, and whether they are finite."""
        func = call.func
        base_name = operation_names.base_name(func)
        node: AutogradNodeInfo | None = None  # the forward operation, also in backward
        if not call.in_backward:
            node = self._add_node(call, base_name)
        elif call.autograd_node is not None:
            node = self._nodes.get(private_torch_api.node_sequence_nr(call.autograd_node))
        if call.is_accumulate_grad or (base_name == "ones_like" and _is_backward_seed()):
            self._has_backward = True
            if ends := self._events_of(tensor for _, tensor in call.float_tensors):
                self._finish(ends, include_intentional=True)
                return
        outputs = [tensor for tensor in flatten_tensors(output) if is_floating(tensor)]
        if not call.written_args and base_name != "lift_fresh" and (func.is_view or self._is_view(call, outputs)):
            return
        if base_name == "set":  # the storage comes from elsewhere: its content was there before
            for storage in map(storage_id, outputs):
                self._graph.clear(storage)
                self._uninitialized.discard(storage)
            return
        is_overwritten = not call.written_args or operation_names.overwrites_args(func)
        producers = self._producers_of_call(call, node, base_name)
        for tensor in outputs:
            storage = storage_id(tensor)
            self._set_producers(tensor, storage, producers)
            if is_overwritten and _covers_storage(tensor):
                self._graph.clear(storage)
            if operation_names.is_uninitialized(func):
                self._uninitialized.add(storage)
            elif is_overwritten:
                self._uninitialized.discard(storage)
        if func.is_view or operation_names.is_uninitialized(func) or not outputs:
            return
        bad = [tensor for tensor in outputs[: 1 if operation_names.has_auxiliary_outputs(func) else None] if not is_finite(tensor)]
        parents = self._parents(call, node) if bad or self._graph else []
        if not bad:
            for tensor in filter(_covers_storage, outputs if call.written_args else ()):
                self._graph.clear(storage_id(tensor))
        elif not any(storage_id(tensor) in self._uninitialized for tensor in bad):
            self._add_output_events(call, base_name, node, bad, parents)

    # ---- non-finite tensors

    def _add_output_events(
        self, call: OpCall, base_name: str, node: AutogradNodeInfo | None, bad: list[Tensor], parents: list[NonFiniteEvent]
    ) -> None:
        kind, literals = nonfinite_kind(bad), call.nonfinite_literals
        if call.in_backward and node is not None:
            # Backward runs, so the loss is finite: the non-finite output of this operation in the forward did no harm so far.
            parents = [parent for parent in parents if parent.in_backward or parent.sequence_nr != node.sequence_nr]
        role = Role.LITERAL if literals else Role.CREATED
        if parents:
            is_new = kind == "nan" and all(parent.kind == "inf" for parent in parents) and not any(number != number for number in literals)
            is_lookup = base_name in operation_names.TARGET_LOOKUP_OPS
            is_target = kind == "inf" and is_lookup and all(parent.is_intentional for parent in parents)
            role = Role.WORSENED if is_new or is_target else Role.PROPAGATED
        origin = origin_if_masked = None
        if role is not Role.PROPAGATED:
            producers, tensors = self._producer_names, self._model_tensors
            origin, origin_if_masked = build_origin(call, role, kind, bad[0], node, self._modules, producers, tensors)
        is_intentional = role is Role.LITERAL
        if role is Role.CREATED and call.is_log_of_mask():
            is_intentional = operation_names.PROBABILITY_OPS.isdisjoint(self._producer_names(call.original("input")))
        sequence_nr = node.sequence_nr if node else -1
        events: list[NonFiniteEvent] = []
        for tensor in bad:
            event = NonFiniteEvent(role, kind, base_name, call.in_backward, sequence_nr, is_intentional, origin, origin_if_masked)
            events += self._graph.add(storage_id(tensor), event, parents, keep_earlier=bool(call.written_args))
        if call.writes_to_parameter():  # an update that makes a weight non-finite
            self._finish(events, include_intentional=True)

    def _parents(self, call: OpCall, node: AutogradNodeInfo | None) -> list[NonFiniteEvent]:
        """The events of the non-finite inputs, which are marked as consumed."""
        parents: list[NonFiniteEvent] = []
        overwritten = call.written_args if operation_names.overwrites_args(call.func) else ()
        for name, tensor in call.float_tensors:
            if name in overwritten or (call.was_finite[name] if name in call.was_finite else is_finite(tensor)):
                continue
            storage = storage_id(call.original(name))
            events = self._graph.events_at(storage)
            if not events and storage not in self._uninitialized:
                events = self._add_input_event(call, name, node)
            for event in events:
                event.is_consumed = True
            parents += events
        return parents

    def _add_input_event(self, call: OpCall, name: str, node: AutogradNodeInfo | None) -> list[NonFiniteEvent]:
        tensor, original = call.tensors[name], call.original(name)
        kind, storage = nonfinite_kind([tensor]), storage_id(original)
        self._hold_storage_id(original, storage)
        origin = build_input_origin(call, name, kind, node, self._modules, self._model_tensors)
        is_intentional = is_additive_mask(tensor) or (not tensor.dim() and storage not in self._model_tensors)
        return self._graph.add(storage, NonFiniteEvent(Role.INPUT, kind, "", call.in_backward, -1, is_intentional, origin))

    def _is_view(self, call: OpCall, outputs: list[Tensor]) -> bool:
        """Whether an output shares its storage with an input. Some operations do so without a view schema (_unsafe_view)."""
        inputs = {storage_id(tensor) for tensor in call.tensors.values()}
        return any(storage_id(tensor) in inputs for tensor in outputs)

    # ---- the operations that produced a tensor, and the forward operation of an autograd node

    def _add_node(self, call: OpCall, base_name: str) -> AutogradNodeInfo:
        """Store the forward operation of the autograd node that it has just created."""
        sequence_nr = private_torch_api.next_sequence_nr() - 1
        line = self._modules.line()
        display_name = operation_names.display_name(call.func, line.called, self._modules.module_type)
        has_hooks = private_torch_api.has_saved_tensor_hooks(ignore_tracing=True)
        parameters = tuple(storage_id(tensor) for tensor in call.tensors.values() if isinstance(tensor, nn.Parameter))
        location = Location(display_name, self._modules.module, line.source, line.text)
        node = AutogradNodeInfo(sequence_nr, base_name, location, has_hooks, parameters)
        for each in range(max(self._last_sequence_nr + 1, sequence_nr - 3), sequence_nr + 1):  # one operation may create several nodes
            self._nodes[each] = node
        while len(self._nodes) > MAX_NODES:
            del self._nodes[next(iter(self._nodes))]
        self._last_sequence_nr = max(self._last_sequence_nr, sequence_nr)
        return node

    def _producers_of_call(self, call: OpCall, node: AutogradNodeInfo | None, base_name: str) -> tuple[AutogradNodeInfo, ...]:
        """The producers of the output of a call: its own node, then the producers of its inputs."""
        nodes = [node] if node and not call.in_backward else []
        for tensor in list(call.tensors.values())[:3]:
            nodes += self._producers.get(storage_id(tensor), ())[: MAX_PRODUCERS - 1]
        if base_name in operation_names.SELECTION_OPS and not call.in_backward:
            for each in nodes[1:]:
                each.is_masked = True
        producers = tuple(dict.fromkeys(nodes))[:MAX_PRODUCERS]
        if node and not call.in_backward:
            node.producer_modules = tuple(dict.fromkeys(each.location.module for each in producers[1:] if each.location.module))
        return producers

    def _set_producers(self, tensor: Tensor, storage: int, producers: tuple[AutogradNodeInfo, ...]) -> None:
        self._hold_storage_id(tensor, storage)
        self._producers[storage] = producers
        if len(self._producers) > MAX_STORAGES:
            in_use = self._uninitialized.union(key for key in self._storage_refs if self._graph.events_at(key))
            self._storage_refs = {key: ref for key, ref in self._storage_refs.items() if key in in_use or not ref.expired()}  # type: ignore[no-untyped-call]
            self._producers = {key: nodes for key, nodes in self._producers.items() if key in self._storage_refs}

    def _hold_storage_id(self, tensor: Tensor, storage: int) -> None:
        """Hold a weak reference, so that no later storage gets the same id. The memory itself is freed as usual."""
        if storage and storage not in self._storage_refs:
            self._storage_refs[storage] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def _producer_names(self, tensor: Tensor) -> tuple[str, ...]:
        return tuple(node.base_name for node in self._producers.get(storage_id(tensor), ()))

    @cached_property
    def _model_tensors(self) -> dict[int, tuple[str, str]]:
        return self._modules.model_tensors()

    # ---- the result

    def _events_of(self, tensors: Iterable[Tensor]) -> list[NonFiniteEvent]:
        return [event for tensor in tensors if not is_finite(tensor) for event in self._graph.events_at(storage_id(tensor))]

    def _unconsumed_events(self) -> list[NonFiniteEvent]:
        """Non-finite tensors that no operation used: the results. After a backward (the loss was finite), only gradients count."""
        return [event for event in self._graph.events if not event.is_consumed and (event.in_backward or not self._has_backward)]

    def _finish(self, ends: list[NonFiniteEvent], *, include_intentional: bool) -> None:
        self._is_done = True
        if found := earliest_root(ends, include_intentional=include_intentional):
            self._found = refine_origin(*found)


class _TracingMode(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation unchanged and calls the tracer before and after it."""

    supports_higher_order_operators = True

    def __init__(self, tracer: NonFiniteTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer: NonFiniteTracer | None = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tracer = self._tracer
        if tracer is None or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:  # in inference mode, torch dispatches composite functions as a whole: trace their parts
                return func.decompose(*args, **kwargs)
        call = None
        try:
            call = tracer.on_op_start(func, args, kwargs)
        except Exception as error:
            self._stop(func, error)
        output = func(*args, **kwargs)
        if call is not None:
            try:
                with torch.no_grad():
                    tracer.on_op_end(call, output)
            except Exception as error:
                self._stop(func, error)
            tracer.raise_if_found()
        return output

    def _stop(self, func: OpOverload, error: Exception) -> None:
        """End the search after an error in it; the program goes on untraced."""
        _log.warning("the search for the origin of a NaN or an Inf stopped at %s: %s: %s", func, type(error).__name__, error)
        if self._tracer is not None:
            self._tracer.caveats.append(f"the search stopped early, at {func}: {type(error).__name__}: {error}")
        self._tracer = None


def is_finite(tensor: Tensor) -> bool:
    return reductions.check_finite([tensor])[1] < 0


def _covers_storage(tensor: Tensor) -> bool:
    return storage_id(tensor) != 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def flatten_tensors(value: Any) -> list[Tensor]:
    """The tensors in the arguments or the result of an operation."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in flatten_tensors(item)] if isinstance(value, (list, tuple)) else []


def _is_composite(func: OpOverload) -> bool:
    """Whether an operation has no kernel of its own and consists of other operations."""
    overload = op_schema(func).overload_name
    name = f"{op_schema(func).name}.{overload}" if overload else op_schema(func).name
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU") and not has_kernel(name, "CUDA")


def _is_backward_seed() -> bool:
    """Whether torch.autograd is creating the initial gradient of a backward."""
    return any(frame.f_code.co_name == "_make_grads" for frame, _ in islice(walk_stack(sys._getframe(1)), 12))

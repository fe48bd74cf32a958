"""Looks at every operation while it is entered, forward and backward, and finds the one that made a bad number.

Results are untouched: each operation runs as it would have run, and its numbers are read before and after.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sonde.nonfinite import op_names
from sonde.nonfinite.build_origin import in_view_of_what_follows, kind_of, tell, tell_given
from sonde.nonfinite.compile_disabled import compile_disabled
from sonde.nonfinite.module_stack import Places, is_recomputing, storage_of
from sonde.nonfinite.op_call import Call, Node, is_floating, is_mask
from sonde.nonfinite.origin import Origin
from sonde.nonfinite.propagation import BORN, GIVEN, HARMED, PASSED, WRITTEN, Event, Trail, beginning
from sonde.statistics import reductions

_log = logging.getLogger("sonde")

MAX_NODES = 200_000  # of autograd, whose place in the forward is remembered
MAX_COPY_BYTES = 64 << 20  # an operation that writes in place destroys the cause: up to here it is copied first
MAX_BEHIND = 6  # operations behind a tensor that are remembered
MAX_MAKERS = 100_000


class Tracer:
    """Enter it around code that makes a bad number; then `origin` says where that came from, or is None.

    `models` gives modules their names. With `ignore_masks`, an Inf that the program wrote is an origin only if the loss follows from it.
    """

    def __init__(self, models: Mapping[str, nn.Module] | None = None, *, ignore_masks: bool = True) -> None:
        self.caveats: list[str] = []
        self.on_found: Callable[[Origin], None] | None = None  # called once, as soon as it is sure; may raise
        self._ignore_masks = ignore_masks
        self._places = Places(models or {})
        self._trail = Trail()
        self._nodes: dict[int, Node] = {}
        self._makers: dict[int, tuple[Node, ...]] = {}  # by storage: the operations behind a tensor, nearest first
        self._unwritten: set[int] = set()
        self._pins: dict[int, StorageWeakRef] = {}
        self._held: dict[int, tuple[str, str]] | None = None
        self._last_node = -1
        self._went_back = False
        self._is_over = False
        self._found: Origin | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Tracer:
        self._last_node = torch._C._autograd._get_sequence_nr() - 1
        with ExitStack() as stack:
            stack.enter_context(self._places)
            stack.enter_context(compile_disabled())
            stack.enter_context(_Mode(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        if not self._is_over:
            self._decide(self._loose_ends(), even_on_purpose=not self._ignore_masks)
        self._places.release()
        self._makers.clear()
        self._nodes.clear()
        self._unwritten.clear()

    @property
    def origin(self) -> Origin | None:
        """Where the bad result began: that is the loss where backward was called, else whatever the code left behind."""
        return self._said(self._found)

    def origin_of(self, bad: Tensor | Iterable[Tensor]) -> Origin | None:
        """Where these bad tensors began, which were computed under this tracer and are still there."""
        found = beginning(self._events_of([bad] if isinstance(bad, Tensor) else bad), even_on_purpose=True)
        return self._said(in_view_of_what_follows(*found)) if found else None

    def _said(self, origin: Origin | None) -> Origin | None:
        if origin is None:
            return None
        sizes = self._places.sizes
        near = tuple((path, sizes[path]) for path in dict.fromkeys((*origin.after, origin.module)) if path in sizes)
        compiled = ["a compiled model was run without compiling, operation by operation"] if self._places.compiled else []
        return replace(origin, sizes=near, caveats=(*origin.caveats, *self.caveats, *compiled))

    # ---- what the mode asks, before and after each operation

    def before(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
        """What an operation is given. Numbers that it will write over are looked at now, for they may be the cause."""
        if self._is_over:
            return None
        call = Call(func, args, kwargs)
        if torch._C._current_graph_task_id() != -1:
            self._went_back = True
            if not (torch.is_grad_enabled() and is_recomputing()):  # else a part of the forward, run again
                call.in_backward = True
                call.autograd_node = torch._C._current_autograd_node()
                call.is_accumulation = call.autograd_node is not None and call.autograd_node.name() == "torch::autograd::AccumulateGrad"
        if call.written and not op_names.overwrites(func):
            call.was_finite = {name: is_finite(tensor) for name, tensor in call.floating}
            call.keep_what_is_written(MAX_COPY_BYTES)
        return call

    def after(self, call: Call, output: Any) -> None:
        """What came of it."""
        func = call.func
        arithmetic = op_names.bare(func)
        node = self._node_behind(call) if call.in_backward else self._new_node(call, arithmetic)
        if call.is_accumulation or (arithmetic == "ones_like" and _begins_backward()):
            self._went_back = True
            self._decide_if_bad(tensor for _, tensor in call.floating)
            if self._is_over:
                return
        outputs = [tensor for tensor in _tensors(output) if is_floating(tensor)]
        if not call.written and arithmetic != "lift_fresh" and (func.is_view or self._is_view(call, outputs)):
            return
        if arithmetic == "set":  # memory from elsewhere: what is in it was there before
            for tensor in outputs:
                self._trail.forget(storage_of(tensor))
                self._unwritten.discard(storage_of(tensor))
            return
        written_anew = not call.written or op_names.overwrites(func)
        behind = self._behind(call, node, arithmetic)
        for tensor in outputs:
            storage = storage_of(tensor)
            self._remember(tensor, storage, behind)
            if written_anew and _fills_its_memory(tensor):
                self._trail.forget(storage)
            if op_names.leaves_unwritten(func):
                self._unwritten.add(storage)
            elif written_anew:
                self._unwritten.discard(storage)
        if func.is_view or op_names.leaves_unwritten(func) or not outputs:
            return
        bad = [tensor for tensor in outputs[: 1 if op_names.has_notes(func) else None] if not is_finite(tensor)]
        parents = self._parents(call, node) if bad or self._trail else []
        if not bad:
            for tensor in outputs:
                if call.written and _fills_its_memory(tensor):
                    self._trail.forget(storage_of(tensor))
        elif not any(storage_of(tensor) in self._unwritten for tensor in bad):
            self._note(call, arithmetic, node, bad, parents)

    def _note(self, call: Call, arithmetic: str, node: Node | None, bad: list[Tensor], parents: list[Event]) -> None:
        kind, literals = kind_of(bad), call.bad_literals
        if call.in_backward and node is not None:
            # Backward runs, so the loss was finite: what this operation put out in the forward did no harm until now.
            parents = [parent for parent in parents if parent.backward or parent.node != node.number]
        nature = WRITTEN if literals else BORN
        if parents:
            is_new = kind == "nan" and all(parent.kind == "inf" for parent in parents) and not any(number != number for number in literals)
            is_target = kind == "inf" and arithmetic in op_names.PICKS_TARGETS and all(parent.on_purpose for parent in parents)
            nature = HARMED if is_new or is_target else PASSED
        origin = if_hidden = None
        if nature != PASSED:
            origin, if_hidden = tell(call, nature, kind, bad[0], node, self._places, self._makers_of, self._tensors_held())
        events = [
            self._trail.add(
                storage_of(tensor),
                parents,
                nature=nature,
                kind=kind,
                operation=arithmetic,
                backward=call.in_backward,
                node=node.number if node else -1,
                origin=origin,
                if_hidden=if_hidden,
                on_purpose=nature == WRITTEN or (nature == BORN and self._is_mask_by_log(call)),
                keep=bool(call.written),
            )
            for tensor in bad
        ]
        if call.writes_into_a_parameter():  # an update that ruins the model
            self._decide([event for event in events if event], even_on_purpose=True)

    def _parents(self, call: Call, node: Node | None) -> list[Event]:
        """What was bad among the inputs; it is used now."""
        parents: list[Event] = []
        overwritten = call.written if op_names.overwrites(call.func) else ()
        for name, tensor in call.floating:
            if name in overwritten or (call.was_finite[name] if name in call.was_finite else is_finite(tensor)):
                continue
            storage = storage_of(call.original(name))
            known = self._trail.at(storage)
            if not known and storage not in self._unwritten:
                known = self._given(call, name, node)
            for event in known:
                event.is_used = True
            parents += known
        return parents

    def _given(self, call: Call, name: str, node: Node | None) -> list[Event]:
        """A tensor that was bad before anybody looked."""
        kind, storage = kind_of([call.tensors[name]]), storage_of(call.original(name))
        self._pin(call.original(name), storage)
        event = self._trail.add(
            storage,
            (),
            nature=GIVEN,
            kind=kind,
            operation="",
            backward=call.in_backward,
            node=-1,
            origin=tell_given(call, name, kind, node, self._places, self._tensors_held()),
            on_purpose=is_mask(call.tensors[name]) or (not call.tensors[name].dim() and storage not in self._tensors_held()),
        )
        return [event] if event else []

    def _is_mask_by_log(self, call: Call) -> bool:
        return call.is_log_of_a_mask() and not op_names.CHANCES.intersection(self._makers_of(call.original("input")))

    def _is_view(self, call: Call, outputs: list[Tensor]) -> bool:
        """Some operations hand on the memory of an input without saying so (_unsafe_view)."""
        given = {storage_of(tensor) for tensor in call.tensors.values()}
        return any(storage_of(tensor) in given for tensor in outputs)

    # ---- which operations are behind a tensor, and behind a node of autograd

    def _new_node(self, call: Call, arithmetic: str) -> Node:
        """Remember which operation of the forward made the node that has just come into being."""
        number = torch._C._autograd._get_sequence_nr() - 1
        line = self._places.line()
        known_as = op_names.known_as(call.func, line.called, self._places.module_type)
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        parameters = tuple(storage_of(tensor) for tensor in call.tensors.values() if isinstance(tensor, nn.Parameter))
        node = Node(number, arithmetic, known_as, self._places.module, line.source, line.text, hooked, parameters)
        for each in range(max(self._last_node + 1, number - 3), number + 1):  # torch may make a few at once
            self._nodes[each] = node
        while len(self._nodes) > MAX_NODES:
            del self._nodes[next(iter(self._nodes))]
        self._last_node = max(self._last_node, number)
        return node

    def _node_behind(self, call: Call) -> Node | None:
        """The operation of the forward whose backward is under way."""
        return self._nodes.get(call.autograd_node._sequence_nr()) if call.autograd_node is not None else None

    def _behind(self, call: Call, node: Node | None, arithmetic: str) -> tuple[Node, ...]:
        nodes = [node] if node and not call.in_backward else []
        for tensor in list(call.tensors.values())[:3]:
            nodes += self._makers.get(storage_of(tensor), ())[: MAX_BEHIND - 1]
        if arithmetic in op_names.CHOOSES and not call.in_backward:
            for each in nodes[1:]:
                each.is_hidden = True
        behind = tuple(dict.fromkeys(nodes))[:MAX_BEHIND]
        if node and not call.in_backward:
            node.after = tuple(dict.fromkeys(each.module for each in behind[1:] if each.module))
        return behind

    def _remember(self, tensor: Tensor, storage: int, behind: tuple[Node, ...]) -> None:
        self._pin(tensor, storage)
        self._makers[storage] = behind
        if len(self._makers) > MAX_MAKERS:
            in_use = self._unwritten.union(key for key in self._pins if self._trail.at(key))
            self._pins = {key: pin for key, pin in self._pins.items() if key in in_use or not pin.expired()}  # type: ignore[no-untyped-call]
            self._makers = {key: nodes for key, nodes in self._makers.items() if key in self._pins}

    def _pin(self, tensor: Tensor, storage: int) -> None:
        """See to it that no other memory is taken for this one after it is freed. Its bytes are not kept, only its number."""
        if storage and storage not in self._pins:
            self._pins[storage] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def _makers_of(self, tensor: Tensor) -> tuple[str, ...]:
        return tuple(node.arithmetic for node in self._makers.get(storage_of(tensor), ()))

    def _tensors_held(self) -> dict[int, tuple[str, str]]:
        if self._held is None:
            self._held = self._places.tensors()
        return self._held

    # ---- the decision

    def _events_of(self, tensors: Iterable[Tensor]) -> list[Event]:
        return [event for tensor in tensors if not is_finite(tensor) for event in self._trail.at(storage_of(tensor))]

    def _decide_if_bad(self, tensors: Iterable[Tensor]) -> None:
        if ends := self._events_of(tensors):
            self._decide(ends, even_on_purpose=True)

    def _loose_ends(self) -> list[Event]:
        """Bad tensors from which nothing was computed: the results. After a finite loss only gradients count."""
        return [event for event in self._trail.events if not event.is_used and (event.backward or not self._went_back)]

    def _decide(self, ends: list[Event], *, even_on_purpose: bool) -> None:
        self._is_over = True
        if found := beginning(ends, even_on_purpose=even_on_purpose):
            self._found = in_view_of_what_follows(*found)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands between torch and its kernels, and lets everything through."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would load the whole compiler, for seconds, to say that nothing is compiled here

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer: Tracer | None = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tracer = self._tracer
        if tracer is None or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and _is_made_of_others(func):
            with self:  # without autograd, torch hands over whole functions: look inside
                return func.decompose(*args, **kwargs)
        call = None
        try:
            call = tracer.before(func, args, kwargs)
        except Exception as error:
            self._retire(func, error)
        output = func(*args, **kwargs)
        if call is not None:
            try:
                with torch.no_grad():
                    tracer.after(call, output)
            except Exception as error:
                self._retire(func, error)
            if tracer.origin is not None and tracer.on_found is not None:
                on_found, tracer.on_found = tracer.on_found, None
                on_found(tracer.origin)
        return output

    def _retire(self, func: OpOverload, error: Exception) -> None:
        """The program goes on as if nobody looked."""
        _log.warning("the search for a bad number ends at %s: %s: %s", func, type(error).__name__, error)
        if self._tracer is not None:
            self._tracer.caveats.append(f"the search ended early, at {func}: {type(error).__name__}: {error}")
        self._tracer = None


def is_finite(tensor: Tensor) -> bool:
    return reductions.check_finite([tensor])[1] < 0


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether a tensor is all that lies in its memory."""
    return storage_of(tensor) != 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _is_made_of_others(func: OpOverload) -> bool:
    overload = func._schema.overload_name
    name = f"{func._schema.name}.{overload}" if overload else func._schema.name
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not has(name, "CPU") and not has(name, "CUDA")


def _begins_backward() -> bool:
    """Whether torch.autograd asks for the gradient of a result with respect to itself."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_code.co_name == "_make_grads":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False

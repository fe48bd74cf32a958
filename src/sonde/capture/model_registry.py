"""The models that a session watches: their names, the names of their parameters, and who owns these."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sonde.capture.call_site import describe_line, user_frame
from sonde.capture.device_placement import left_behind
from sonde.capture.gradient_state import Ledger
from sonde.capture.parameter_ownership import membership
from sonde.capture.recorder import Journal
from sonde.capture.watched_model import COMPILED, ENTRY, EXIT, Watched
from sonde.events import Site
from sonde.statistics.deferred_reads import on_device
from sonde.statistics.fingerprint import content_hash
from sonde.statistics.tensor_utils import find_tensors

MAX_MODELS = 32  # at a time: a program that makes models without end is watched on the first ones that live
NUM_GLIMPSED = 4  # parameters looked at to see whether the user moves them by hand


class Models:
    __slots__ = ("__dict__", "__weakref__", "_watched", "_with_output")  # see beat.py

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.unowned: list[torch.Tensor] = []  # trainable parameters that no optimizer holds, when last looked at
        self._watched: list[Watched] = []
        self._entering: ENTRY | None = None
        self._leaving: EXIT | None = None
        self._sites: dict[int, tuple[weakref.ref[torch.Tensor], Site]] = {}
        self._names: dict[int, tuple[str, str, str, bool]] | None = None
        self._with_output: set[int] = set()
        self._membership: dict[str, Any] = {}
        self._num_named = 0
        self._num_foreign = 0
        self._looked = ""  # what the parameters looked like at the last backward, while no optimizer steps

    def connect(self, entering: ENTRY, leaving: EXIT) -> None:
        self._entering, self._leaving = entering, leaving

    def __iter__(self) -> Iterator[Watched]:
        return iter(self._watched)

    def watch(self, model: nn.Module, label: str, step: int, *, entry: nn.Module | None = None) -> Watched | None:
        """Starts watching a model. `entry` is the part of it that is called, where that is not the model itself."""
        for watched in self:
            if watched.model is model or watched.body is model:
                watched.add_entry(entry or model)
                return watched
        self._watched = [watched for watched in self._watched if watched.model is not None]
        if len(self._watched) >= MAX_MODELS or self._entering is None or self._leaving is None:
            return None
        # The first model's paths stand alone; those of others come after the model's name.
        name = "" if self._num_named == 0 else self._unique(label)
        self._num_named += 1
        watched = Watched(name, model, self._entering, self._leaving)
        self._watched.append(watched)
        self._names = None
        watched.add_entry(entry or model)
        self._tell(watched, label, step)
        return watched

    def _unique(self, label: str) -> str:
        taken = {watched.name for watched in self}
        return label if label not in taken else f"{label}#{self._num_named}"

    def _tell(self, watched: Watched, label: str, step: int) -> None:
        body = watched.body
        if body is None:
            return
        parameters = list(body.parameters())
        known = [p for p in parameters if not nn.parameter.is_lazy(p)]
        frame = user_frame()
        self._journal.event(
            "model", step, model=watched.name or label, **{"class": type(body).__name__},
            num_parameters=sum(p.numel() for p in known), num_trainable=sum(p.numel() for p in known if p.requires_grad),
            num_modules=sum(1 for _ in body.modules()), num_leaves=sum(1 for _ in watched.leaves()),
            num_mode_modules=len(watched.mode_modules()), compiled=watched.compiled, source=describe_line(frame)[0] if frame else "",
        )  # fmt: skip
        for path, reason in watched.hidden_parts():
            self._tell_hidden(watched, step, path, reason)

    def _tell_hidden(self, watched: Watched, step: int, path: str, reason: str) -> None:
        where = ".".join(part for part in (watched.name, path) if part)
        self._journal.event("unobserved", step, where=where or "(the whole model)", reason=reason)

    # -- what the loop asks ------------------------------------------------------------------------

    def saw_output(self, watched: Watched, output: Any, step: int) -> None:
        """Notes the shape of what a model puts out, once."""
        if id(watched) not in self._with_output:
            self._with_output.add(id(watched))
            for _, tensor in find_tensors(output)[:1]:
                dtype = str(tensor.dtype).removeprefix("torch.")
                self._journal.event("output", step, model=watched.name, shape=list(tensor.shape), dtype=dtype)

    def compiling(self, target: Any, step: int) -> None:
        """A module or a function is about to be compiled. Which modules a function calls is not known: any of them."""
        for watched in self._watched:
            model = watched.model
            if model is None:
                continue
            target = getattr(target, "__self__", target)  # Module.compile hands over a method of the module
            if not isinstance(target, nn.Module):
                target = model
            path = next((path for path, module in model.named_modules() if module is target), None)
            if path is not None and watched.exclude(target):
                self._tell_hidden(watched, step, path, COMPILED)

    def refresh(self) -> None:
        """Modules and parameters may have been replaced since they were last looked at."""
        self._names = None
        for watched in self._watched:
            watched.version += 1

    # -- parameters --------------------------------------------------------------------------------

    def parameter_site(self, parameter: torch.Tensor) -> Site | None:
        known = self._sites.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        model, path, owner, trainable = self._name(parameter)
        shape = () if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
        site = self._journal.site(
            kind="parameter", path=path, model=model, type=owner, shape=shape, dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=trainable,
        )  # fmt: skip
        if site is not None:
            self._sites[id(parameter)] = (weakref.ref(parameter), site)
        return site

    def _name(self, parameter: torch.Tensor) -> tuple[str, str, str, bool]:
        if self._names is None:
            self._names = {}
            for watched in self:
                body = watched.body
                for prefix, module in body.named_modules() if body is not None else ():
                    for name, p in module._parameters.items():
                        if p is not None:
                            path = f"{prefix}.{name}" if prefix else name
                            self._names.setdefault(id(p), (watched.name, path, type(module).__name__, p.requires_grad))
        name = self._names.get(id(parameter))
        if name is None:
            # The optimizer holds it, no watched model does: a loose Parameter, or one that the model has dropped.
            self._num_foreign += 1
            name = ("", f"(in no watched model).{self._num_foreign}", "", parameter.requires_grad)
        return name

    def tell_membership(self, ledger: Ledger, step: int) -> bool:
        """Who owns what, over the models that have run. False: that is known already."""
        data = self._find_membership(ledger)
        if data == self._membership:
            return False
        self._membership = data
        self._journal.event("membership", step, **data)
        return True

    def _find_membership(self, ledger: Ledger) -> dict[str, Any]:
        named = [
            (f"{watched.name}.{path}" if watched.name else path, p)
            for watched in self
            if watched.ever_entered
            for path, p in watched.parameters()
        ]
        data, unowned = membership(named, ledger.optimizers())
        self.unowned = [p for _, p in unowned]
        left = [row for body in self.bodies() for row in left_behind(body)]
        return {**data, "left_behind": left} if left else data

    def bodies(self) -> list[nn.Module]:
        """The models that have run."""
        return [body for watched in self if watched.ever_entered and (body := watched.body) is not None]

    def moved_by_hand(self) -> bool:
        """Have parameters changed since this was last asked? Asked at each backward while no optimizer ever stepped."""
        now = self._glimpse()
        moved = bool(self._looked) and now != self._looked
        self._looked = now
        return moved

    def _glimpse(self) -> str:
        """A short fingerprint of a few parameters, to notice when they are moved by hand."""
        marks = []
        for watched in self:
            for _, p in watched.parameters():
                if p.requires_grad and not on_device(p) and not nn.parameter.is_lazy(p):
                    marks.append(content_hash(p.detach().flatten()[:64]))
                    if len(marks) == NUM_GLIMPSED:
                        break
        return repr(marks) if marks else ""

    def close(self) -> None:
        with contextlib.ExitStack() as last:  # all of them, whatever becomes of one
            for watched in self._watched:
                last.callback(watched.remove_entries)
        self._watched.clear()

"""The models that a session watches: their names, the names of their parameters, and which optimizer holds these."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from sonde.capture.run_log_recorder import StepRecorder
from sonde.capture.tensors_on_wrong_device import find_left_behind
from sonde.capture.training_callbacks import TrainingCallbacks
from sonde.capture.user_source_line import describe_line, user_frame
from sonde.capture.watched_model import COMPILED, WatchedModel, join_path
from sonde.capture.zero_grad_tracking import GradientState, optimizer_parameters
from sonde.events import ModelOutputShape, ModelWatched, NotMeasured, OwnershipChanged, Site
from sonde.formatting import counted, listing
from sonde.layer_name_patterns import LayerPatterns
from sonde.statistics.batched_device_reads import on_device
from sonde.statistics.content_hash import content_hash
from sonde.statistics.find_tensors import find_tensors, shape_of

MAX_MODELS = 32  # at a time: a program that constructs models without end is watched on the first ones that live
MAX_UNOWNED, MAX_FOREIGN = 200, 20  # parameters that are named in one event
NUM_SAMPLED = 4  # parameters of each model, read to notice that the user updates them without an optimizer


class ModelRegistry:
    """Names models and parameters, and records who owns them."""

    def __init__(self, recorder: StepRecorder, layers: Sequence[str] = ()) -> None:
        self._recorder = recorder
        self._layers = LayerPatterns(layers) if layers else None
        self._is_selected: dict[tuple[str, str], bool] = {}  # by model and path
        self.unowned: list[torch.Tensor] = []  # trainable parameters that no optimizer held at the last check
        self._watched: list[WatchedModel] = []
        self._by_entry_point: dict[int, WatchedModel] = {}  # found once, by id(module)
        self._callbacks: TrainingCallbacks | None = None
        self._on_freed: Callable[[str], None] | None = None
        self._sites: dict[int, tuple[weakref.ref[torch.Tensor], Site]] = {}
        self._names: dict[int, tuple[str, str, str, bool]] | None = None
        self._with_output: set[int] = set()
        self._lazy: list[tuple[WatchedModel, str, str]] = []  # models with lazy parameters that have not run: with label and line
        self._ownership: OwnershipChanged | None = None
        self._num_named = 0
        self._num_foreign = 0
        self._sampled: list[int | None] = []  # content of a few parameters at the last backward, while no optimizer steps

    def connect(self, callbacks: TrainingCallbacks, on_freed: Callable[[str], None] | None = None) -> None:
        """Whose `on_forward_start` and `on_forward_end` are called for the models. `on_freed` is called with the name of a model that the
        program frees, while its parameters still live."""
        self._callbacks, self._on_freed = callbacks, on_freed

    def __iter__(self) -> Iterator[WatchedModel]:
        return iter(self._watched)

    def watch(self, model: nn.Module, label: str, step: int, *, entry_point: nn.Module | None = None) -> WatchedModel | None:
        """Start to watch a model; `entry_point` is the part of it that is called, where that is not the model itself."""
        for watched in self:
            if watched.model is model or watched.body is model:
                watched.add_entry_point(model if entry_point is None else entry_point)  # a model may define __bool__ or __len__
                return watched
        self._watched = [watched for watched in self._watched if watched.model is not None]
        if len(self._watched) >= MAX_MODELS or self._callbacks is None:
            return None
        # The first model's paths stand alone; those of others come after the model's name.
        name = "" if self._num_named == 0 else f"{label}#{self._num_named}" if any(each.name == label for each in self) else label
        self._num_named += 1
        watched = WatchedModel(name, model, self._callbacks, self._on_freed)
        self._watched.append(watched)
        self._names = None
        watched.add_entry_point(model if entry_point is None else entry_point)  # a model may define __bool__ or __len__
        source = describe_line(user_frame())[0]
        if any(nn.parameter.is_lazy(p) for p in model.parameters()):
            self._lazy.append((watched, label, source))  # how many parameters it has is known after its first forward
        else:
            self._record(watched, label, source, step)
        return watched

    def _record(self, watched: WatchedModel, label: str, source: str, step: int) -> None:
        body = watched.body
        if body is None:
            return
        materialized = [p for p in body.parameters() if not nn.parameter.is_lazy(p)]
        event = ModelWatched(
            model=watched.name or label, class_name=type(body).__name__, num_parameters=sum(p.numel() for p in materialized),
            num_trainable=sum(p.numel() for p in materialized if p.requires_grad), num_modules=sum(1 for _ in body.modules()),
            num_leaves=sum(1 for _ in watched.leaves()), num_mode_modules=len(watched.mode_modules()), is_compiled=watched.is_compiled,
            source=source,
        )  # fmt: skip
        self._recorder.emit(event, step)
        for path, reason in watched.unmeasured_parts():
            self._record_unmeasured(watched, step, path, reason)
        if self._layers is not None:
            num_skipped = sum(not self.selects(watched.name, path or type(body).__name__) for path, _ in watched.leaves())
            if num_skipped:
                where = f"{counted(num_skipped, 'layer')} of {watched.name or label}"
                self._recorder.emit(NotMeasured(where=where, reason=f"only {listing(self._layers.patterns)} was chosen by layers"), step)

    def _record_unmeasured(self, watched: WatchedModel, step: int, path: str, reason: str) -> None:
        self._recorder.emit(NotMeasured(where=join_path(watched.name, path) or "(the whole model)", reason=reason), step)

    def find(self, entry_point: nn.Module) -> WatchedModel | None:
        """The model that is called through this module."""
        watched = self._by_entry_point.get(id(entry_point))
        if watched is not None and watched.has_entry_point(entry_point):
            return watched
        watched = next((each for each in self._watched if each.has_entry_point(entry_point)), None)
        if watched is not None:
            self._by_entry_point[id(entry_point)] = watched
        return watched

    def record_output(self, watched: WatchedModel, output: Any, step: int) -> None:
        """The shape of what a model puts out, once."""
        if id(watched) not in self._with_output:
            self._with_output.add(id(watched))
            for lazy in [each for each in self._lazy if each[0] is watched]:
                self._lazy.remove(lazy)
                self._record(*lazy, step)
            for _, tensor in find_tensors(output)[:1]:
                dtype = str(tensor.dtype).removeprefix("torch.")
                self._recorder.emit(ModelOutputShape(model=watched.name, shape=list(shape_of(tensor)), dtype=dtype), step)

    def on_compile(self, target: Any, step: int) -> None:
        """A module or a function is about to be compiled. Which modules a function calls is not known: any of them."""
        for watched in self._watched:
            model = watched.model
            if model is None:
                continue
            target = getattr(target, "__self__", target)  # Module.compile passes a method of the module
            if not isinstance(target, nn.Module):
                target = model
            path = next((path for path, module in model.named_modules() if module is target), None)
            if path is not None and watched.exclude(target):
                self._record_unmeasured(watched, step, path, COMPILED)

    def refresh(self) -> None:
        """Modules and parameters may have been replaced: look names up again."""
        self._names = None
        for watched in self._watched:
            watched.version += 1
            watched.renew_entry_points()

    # -- layers that are measured ------------------------------------------------------------------

    @property
    def are_layers_selected(self) -> bool:
        """Whether the settings name the layers that are measured."""
        return self._layers is not None

    def selects(self, model: str, path: str) -> bool:
        """Whether a layer or parameter is measured: it, or a module around it, matches a pattern of the settings."""
        if self._layers is None:
            return True
        known = self._is_selected.get((model, path))
        if known is None:
            parts = path.split(".")
            around = [".".join(parts[:num]) for num in range(1, len(parts) + 1)]
            names = around + [join_path(model, each) for each in around if model]
            known = self._is_selected[model, path] = any(map(self._layers.matches, names))
        return known

    def selected_parameters(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are measured: where layers are selected, none that belongs to no watched model."""
        if self._layers is None:
            return parameters
        names = self._names_by_id()
        return [p for p in parameters if (name := names.get(id(p))) is not None and self.selects(*name[:2])]

    def report_unmatched_layers(self, step: int) -> None:
        """Log and record the patterns of the settings that match nothing in any model."""
        if self._layers is None:
            return
        bodies = [(watched.name, body) for watched in self if (body := watched.body) is not None]
        if not bodies:
            return
        names = [type(body).__name__ for _, body in bodies]
        for model, body in bodies:
            for each in (*body.named_modules(), *body.named_parameters()):
                names += {each[0], join_path(model, each[0])} - {"", model}
        for sentence in self._layers.warn_unmatched(names):
            self._recorder.emit(NotMeasured(where="the setting layers", reason=sentence), step)

    # -- parameters --------------------------------------------------------------------------------

    def parameter_site(self, parameter: torch.Tensor) -> Site | None:
        """The site of a parameter; None when the run has more sites than it should hold."""
        known = self._sites.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        model, path, owner, is_trainable = self._name(parameter)
        shape = () if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
        site = self._recorder.site(
            kind="parameter", path=path, model=model, type=owner, shape=shape, dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=is_trainable,
        )  # fmt: skip
        if site is not None:
            self._sites[id(parameter)] = (weakref.ref(parameter), site)
        return site

    def measured_parameters(self, model: str) -> dict[str, torch.Tensor]:
        """The parameters of this model that were measured and live, by name; also while the model itself is being freed."""
        of_model = [(site.name, ref()) for ref, site in list(self._sites.values()) if site.model == model]
        return {name: parameter for name, parameter in of_model if parameter is not None}

    def parameter_name(self, parameter: torch.Tensor) -> str:
        site = self.parameter_site(parameter)
        return site.name if site else ""

    def _name(self, parameter: torch.Tensor) -> tuple[str, str, str, bool]:
        name = self._names_by_id().get(id(parameter))
        if name is None:
            # The optimizer holds it, no watched model does: a loose Parameter, or one that the model has dropped.
            self._num_foreign += 1
            name = ("", f"(in no watched model).{self._num_foreign}", "", parameter.requires_grad)
        return name

    def _names_by_id(self) -> dict[int, tuple[str, str, str, bool]]:
        """Model, path, class of the module and whether it is trained, of every parameter."""
        names = self._names
        if names is None:
            names = {}
            for watched in self:
                body = watched.body
                for prefix, module in body.named_modules() if body is not None else ():
                    for name, p in module._parameters.items():
                        if p is not None:
                            owner = type(module).__name__
                            names.setdefault(id(p), (watched.name, join_path(prefix, name), owner, p.requires_grad))
            self._names = names  # complete: another thread may read it, or ask for new ones meanwhile
        return names

    def record_ownership(self, gradients: GradientState, step: int) -> bool:
        """Which optimizer holds which parameter, over the models that have run. False: nothing changed."""
        self.report_unmatched_layers(step)
        models = {id(p): (join_path(watched.name, path), p) for watched in self if watched.has_run for path, p in watched.parameters()}
        left_behind = [row for body in self.bodies_that_ran() for row in find_left_behind(body)]
        owned: set[int] = set()
        table: list[dict[str, Any]] = []
        with gradients.reading_all() as reads_gradients:  # otherwise every parameter counts as one with a gradient
            for optimizer in gradients.optimizers():
                held = optimizer_parameters(optimizer)
                owned.update(id(p) for p in held)
                foreign = [p for p in held if id(p) not in models]
                table.append({
                    "optimizer": gradients.register(optimizer).index, "class": type(optimizer).__name__,
                    "num_owned": len(held) - len(foreign), "num_foreign": len(foreign),
                    "num_foreign_with_grad": sum(not reads_gradients or p.grad is not None for p in foreign),
                    "foreign": [str(tuple(p.shape)) for p in foreign[:MAX_FOREIGN]],
                })  # fmt: skip
        unowned = [(name, p) for name, p in models.values() if p.requires_grad and id(p) not in owned]
        self.unowned = [p for _, p in unowned]
        names = [name for name, _ in unowned[:MAX_UNOWNED]]
        event = OwnershipChanged(num_unowned=len(unowned), unowned=names, optimizers=table, left_behind=left_behind or None)
        if event == self._ownership:
            return False
        self._ownership = event
        self._recorder.emit(event, step)
        return True

    def bodies_that_ran(self) -> list[nn.Module]:
        return [body for watched in self if watched.has_run and (body := watched.body) is not None]

    def have_parameters_moved(self) -> bool:
        """Whether parameters changed since the last call: asked at each backward while no optimizer ever stepped."""
        before, self._sampled = self._sampled, []
        for watched in self:
            readable = (p for _, p in watched.parameters() if p.requires_grad and not on_device(p) and not nn.parameter.is_lazy(p))
            self._sampled += [content_hash(p.detach().flatten()[:64]) for p in islice(readable, NUM_SAMPLED)]
        return bool(before) and before != self._sampled

    def close(self) -> None:
        """Stop watching all models, whatever becomes of one of them."""
        with contextlib.ExitStack() as stack:
            for watched in self._watched:
                stack.callback(watched.remove_entry_points)
        self._watched.clear()
        self._by_entry_point.clear()

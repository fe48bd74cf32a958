"""A look back at a step whose loss or gradient is far above the usual: which samples carry it, and in which layer it shows.

The step is run again as it is for a bad number (see `lookback`), as a whole and without parts of its batch. Where it cannot be run again,
it says why, and answers with what is left: the model on its inputs, and the gradients that are there.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, sqrt
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.replay_buffer import ReplayBuffer
from sonde.nonfinite.build_origin import summarize
from sonde.nonfinite.origin import TensorSummary
from sonde.nonfinite.tracer import compile_disabled
from sonde.replay import distributed
from sonde.replay.backward_call_site import Part, parts_of
from sonde.replay.batch_slicing import given_to, picked
from sonde.replay.dataset_index import indices_of
from sonde.replay.heaviest_samples import Carriers, carriers
from sonde.replay.program_slice import CannotReplay
from sonde.replay.rerun import Rerun, gradients_by_leaf, reader
from sonde.replay.restore_state import as_before, modules_in
from sonde.replay.sample_deviation import Layers, Sizes, apartness, sizes_of, turning_point
from sonde.spike_detection import Leap
from sonde.statistics import reductions
from sonde.statistics.tensor_utils import find_tensors

ODD = 10.0  # times the size of the other samples: rows of one dataset differ by less
ODD_OUTPUT = 4.0  # the same for what a layer puts out: the layers before have evened it out
SAME = 0.01  # relative: a second run that gives another number is not the same step
ADDS_UP = 0.2  # of the excess: more than that is missing where two halves do not make up the whole
MAX_SAID = 64  # layers and parameters in an event


@dataclass(frozen=True, slots=True)
class Departure:
    """A layer, or something that the step was given, and how large the odd samples are in it beside the others."""

    name: str
    size: float  # mean absolute value, or norm of a gradient
    others: float


@dataclass(frozen=True, slots=True)
class Blame:
    """Who made a spike, as plain data that a run can hold."""

    samples: tuple[int, ...] | None = None  # in the batch, the heaviest first; (): it is spread over the batch; None: it is not known
    shares: tuple[float, ...] = ()  # of the excess over the usual, one per sample
    indices: tuple[int, ...] | None = None  # the same samples in the dataset, where the sampler allows
    batch_size: int = 0
    without: float | None = None  # the loss or the norm without these samples
    blame: str = ""  # "input" | "target" | "layer" | "slope" | "batch"; "" where it is not known
    layer: str = ""  # dotted path, where a layer is to be named
    odd: Departure | None = None  # the input, target or layer in which the samples depart from the others
    gradients: tuple[tuple[str, float], ...] = ()  # norms by parameter, the largest first
    inputs: tuple[TensorSummary, ...] = ()  # of the model
    source: str = ""  # "train.py:41": the line that makes the loss
    text: str = ""
    how: str = "replayed"  # "replayed" | "model" | "gradients": what the answer comes from
    caveats: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def attribute_spike(
    kept: ReplayBuffer, *, frame: FrameType | None, what: str, leap: Leap, models: Mapping[str, nn.Module] | None = None
) -> Blame:
    """Who carries the leap of this step's loss or gradient norm. Everything is left as it was."""
    models = models or {call.model: call.module for call in kept.calls}
    modules = [*models.values(), *(call.module for call in kept.calls), *modules_in(frame)]
    look, num = _Look(kept, what, leap, models), distributed.num_processes()
    try:
        with as_before(modules), distributed.alone(modules), compile_disabled(), distributed.silence():
            found = look.blame(frame)
    except CannotReplay as error:
        found = look.of_the_gradients(str(error))
    return replace(found, caveats=(*found.caveats, distributed.CAVEAT.format(num=num))) if num > 1 else found


class _Look:
    def __init__(self, kept: ReplayBuffer, what: str, leap: Leap, models: Mapping[str, nn.Module]) -> None:
        self.kept, self.what, self.leap, self.models = kept, what, leap, models
        self.value, self.usual = leap.value, leap.usual
        self.caveats: list[str] = []
        self.num = 0  # samples in the batch
        self.dim = 0  # of the inputs along which they lie
        self.is_sum = False  # of the samples; else their mean
        self.direction: dict[int, Tensor] = {}  # the gradient of the whole batch, by parameter
        self.names = {id(p): _joined(name, path) for name, model in models.items() for path, p in model.named_parameters()}

    def blame(self, frame: FrameType | None) -> Blame:
        try:
            rerun = Rerun(self.kept, parts_of(frame, self.what, reader(self.kept), self.kept.loss_frame))
            rerun.refuse_loans()
            return self._of_the_step(rerun)
        except Exception as error:  # the user's code, on a second run: whatever it raises is a reason not to trust it
            failed = f"running it again failed ({type(error).__name__}: {error})"[:500]
            reason = str(error) if isinstance(error, CannotReplay) else failed
        try:
            return self._of_the_model(Rerun(self.kept, ()), reason)
        except Exception:
            return self.of_the_gradients(reason)

    # -- the step as a whole --------------------------------------------------------------------------

    def _of_the_step(self, rerun: Rerun) -> Blame:
        given = given_to(rerun)
        self.num, self.dim = _batch_of(given)
        with Layers(self.models, self.num) as layers:
            loss = rerun()
        found = gradients_by_leaf(loss)
        again = _norm(gradient for _, gradient in found) if self.what == "gradient" else float(loss.detach())
        if not isfinite(again) or abs(again - self.value) > SAME * abs(self.value):
            self._refuse(again, rerun)
        norms = self._named(found)
        if self.what == "gradient":
            self.direction = {id(leaf): gradient / again for leaf, gradient in found}
        del loss, found
        source, text = _line(rerun.parts)
        answer = Blame(gradients=norms[:MAX_SAID], inputs=self._seen(rerun), batch_size=self.num, source=source, text=text)
        told = self._carriers(rerun, again, given)
        if told.note:
            self.caveats.append(told.note)
        if self.what == "gradient" and norms:
            answer = replace(answer, layer=_owner(norms[0][0]))
        if told.samples:
            answer = self._of_samples(replace(answer, samples=told.samples, shares=told.shares), rerun, layers.outputs, norms, given)
        elif told.samples == ():
            answer = replace(answer, samples=(), blame="batch")
        notes = [note for part in rerun.parts for note in part.slice.notes if "hands it out" not in note]
        return replace(answer, caveats=(*self.caveats, *notes[:3]))

    def _refuse(self, again: float, rerun: Rerun) -> None:
        """The second run gave another number. One of several backwards of the step is better than nothing, where it is odd itself."""
        number = "loss" if self.what == "loss" else "gradient norm"
        said = f"the step was run again and its {number} was {again:.4g}, not {self.value:.4g}"
        notes = [note for part in rerun.parts for note in part.slice.notes if "hands it out" not in note]
        if self.what == "loss" or not again > (self.value + self.usual) / 2:
            raise CannotReplay(said + "".join(f"; {note}" for note in notes[:3]))
        self.caveats.append(f"{said}: other backwards of the step, or a change of the gradients since, are not in it")

    # -- samples --------------------------------------------------------------------------------------

    def _carriers(self, rerun: Rerun, whole: float, given: Sequence[Tensor]) -> Carriers:
        told = self._carriers_along(rerun, whole)
        if told.samples is None and told.note and self.dim == 0 and given and given[0].dim() > 2:  # the batch may come second, after time
            self.num, self.dim = given[0].shape[1], 1
            other = self._carriers_along(rerun, whole)
            if other.samples is not None:
                return other
            self.num, self.dim = given[0].shape[0], 0
        return told

    def _carriers_along(self, rerun: Rerun, whole: float) -> Carriers:
        num, excess = self.num, whole - self.usual
        if num < 2:
            return Carriers(None, note="" if num else "no batch was found among what the step was given")
        known: dict[tuple[int, ...], float] = {}

        def number(samples: Sequence[int]) -> float:
            key = tuple(samples)
            if key not in known:
                known[key] = self._number(rerun, key)
            return known[key]

        try:
            halves = number(range(num // 2)), number(range(num // 2, num))
        except Exception as error:
            return Carriers(None, note=f"parts of the batch could not be run ({type(error).__name__}: {error})"[:300])
        mean = halves[0] * (num // 2) / num + halves[1] * (num - num // 2) / num
        self.is_sum = abs(sum(halves) - whole) < abs(mean - whole)
        if min(abs(sum(halves) - whole), abs(mean - whole)) > ADDS_UP * abs(excess):
            self.caveats.append("the samples do not add up to the whole: they are normalised or compared with each other")

        def loses(group: Sequence[int]) -> float:
            rest = sorted(set(range(num)) - set(group))
            return whole - number(rest) * (1.0 if self.is_sum else len(rest) / num)

        return carriers(num, excess, loses)

    def _number(self, rerun: Rerun, samples: Sequence[int]) -> float:
        """The loss of some samples; or their gradient, as far as it goes where that of the whole batch goes."""
        loss = self._loss(rerun, samples)
        if self.what == "loss":
            return float(loss.detach())
        found = gradients_by_leaf(loss)
        return sum(float((gradient * self.direction[id(leaf)]).sum()) for leaf, gradient in found if id(leaf) in self.direction)

    def _loss(self, rerun: Rerun, samples: Sequence[int]) -> Tensor:
        chosen = torch.tensor(samples)
        return rerun(lambda value, flat: picked(value, chosen, self.num, self.dim, flat=flat))

    def _of_samples(
        self, answer: Blame, rerun: Rerun, layers: Sequence[Sizes], norms: Sequence[tuple[str, float]], given: Sequence[Tensor]
    ) -> Blame:
        samples = answer.samples or ()
        rest = sorted(set(range(self.num)) - set(samples))
        loss = self._loss(rerun, rest)
        layer, without = answer.layer, float(loss.detach())
        if self.what == "gradient":
            found = gradients_by_leaf(loss)
            layer, without = _most_changed(norms, dict(self._named(found))), _norm(gradient for _, gradient in found)
        answer = replace(answer, layer=layer, without=without, batch_size=self.num)
        if len(samples) > 1 and without > self.leap.bound:
            return replace(answer, samples=(), shares=(), blame="batch", without=None)  # these are only the worst of a bad batch
        answer = replace(answer, indices=indices_of(samples, given, self.num))
        for kind, name, tensor in self._things(rerun):
            sizes = sizes_of(name, tensor, self.num)
            mine, usual = sizes.apart(samples) if sizes else (0.0, 0.0)
            if apartness(mine, usual) > ODD:
                return replace(answer, blame=kind, odd=Departure(name, mine, usual))
        turn = turning_point(layers, samples, ODD_OUTPUT)
        if turn is None:
            return replace(answer, blame="target" if self.what == "loss" else "slope")
        return replace(answer, blame="layer", layer=answer.layer or turn[0], odd=Departure(*turn))

    # -- where no more can be run -----------------------------------------------------------------------

    def _of_the_model(self, rerun: Rerun, reason: str) -> Blame:
        """The model on its inputs: are some samples odd in what they are, or in what becomes of them?"""
        things = [(name, tensor) for _, name, tensor in self._things(rerun)]
        self.num = things[0][1].shape[0] if things else 0
        with Layers(self.models, self.num) as layers:
            rerun.outputs()
        answer = replace(self.of_the_gradients(reason), how="model", inputs=self._seen(rerun))
        if self.num < 2:
            return answer
        measured = [*(sizes_of(name, tensor, self.num) for name, tensor in things), *layers.outputs]
        for place, sizes in enumerate(measured):
            odd = sizes.odd(ODD) if sizes else ()
            if sizes and odd and len(odd) <= self.num / 4:
                mine, usual = sizes.apart(odd)
                kind = "input" if place < len(things) else "layer"
                return replace(
                    answer, samples=odd, indices=indices_of(odd, [tensor for _, tensor in things], self.num), blame=kind,
                    layer="" if kind == "input" else sizes.name, odd=Departure(sizes.name, mine, usual), batch_size=self.num,
                )  # fmt: skip
        return answer

    def of_the_gradients(self, reason: str) -> Blame:
        """What is there without running anything."""
        found = [(p, p.grad) for model in self.models.values() for p in model.parameters() if p.grad is not None]
        norms = self._named(found) if self.what == "gradient" else ()
        layer = _owner(norms[0][0]) if norms else ""
        return Blame(gradients=norms[:MAX_SAID], layer=layer, how="gradients", caveats=(f"the step could not be run again: {reason}",))

    # -- what things are called ---------------------------------------------------------------------------

    def _things(self, rerun: Rerun) -> Iterator[tuple[str, str, Tensor]]:
        """What the step was given, as ("input" or "target", name, tensor): by the user's own names where there are some."""
        called = {id(value): name for part in rerun.parts for name, value in part.names.items() if isinstance(value, Tensor)}
        taken: set[int] = set()
        for call in self.kept.calls:
            for place, tensor in find_tensors((call.args, call.kwargs)):
                if tensor.dim() and id(tensor) not in taken:
                    taken.add(id(tensor))
                    yield "input", called.get(id(tensor), f"input {place.partition('.')[2]}"), tensor
        for part in rerun.parts:
            for name in sorted(part.slice.given):
                value = part.names.get(name)
                if isinstance(value, Tensor) and value.dim() and id(value) not in taken and not value.requires_grad:
                    taken.add(id(value))
                    yield "target", name, value

    def _seen(self, rerun: Rerun) -> tuple[TensorSummary, ...]:
        return summarize({name: tensor for kind, name, tensor in self._things(rerun) if kind == "input" and tensor.is_floating_point()})

    def _named(self, found: Sequence[tuple[Tensor, Tensor]]) -> tuple[tuple[str, float], ...]:
        known = [(self.names[id(leaf)], _norm([gradient])) for leaf, gradient in found if id(leaf) in self.names]
        return tuple(sorted(known, key=lambda pair: -pair[1]))


def _norm(tensors: Any) -> float:
    return sqrt(reductions.check_finite(list(tensors))[0])


def _most_changed(norms: Sequence[tuple[str, float]], others: Mapping[str, float]) -> str:
    """The layer whose gradient the samples change most, among those that make up the whole."""
    total = sqrt(sum(norm * norm for _, norm in norms))
    large = [(name, norm) for name, norm in norms if norm >= 0.1 * total]
    name = max(large, key=lambda pair: pair[1] / max(others.get(pair[0], 0.0), 1e-30), default=("", 0.0))[0]
    return _owner(name)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _line(parts: Sequence[Part]) -> tuple[str, str]:
    """The line that makes the loss: the last plain one that was taken before it is handed to backward."""
    for part in reversed(parts):
        file = part.slice.code.co_filename
        below = part.slice.lines[-1]
        every = [line for *_, line in part.slice.code.co_lines() if line]
        for number in reversed(part.slice.lines[:-1]):
            text = linecache.getline(file, number).strip()
            if text.startswith(("with ", "async with ")):
                number = max(line for line in every if number <= line < below)
                text = linecache.getline(file, number).strip()
            if not text.startswith(("if ", "for ", "while ", "try:")):  # whether that was run is not known
                return f"{Path(file).name}:{number}", text
            below = number
    first = parts[0].slice
    return f"{Path(first.code.co_filename).name}:{first.lines[-1]}", linecache.getline(first.code.co_filename, first.lines[-1]).strip()


def _batch_of(given: Sequence[Tensor]) -> tuple[int, int]:
    """The size of the batch, and along which dimension of the first input it lies: what most of the inputs have in common."""
    if not given:
        return 0, 0
    first = given[0]
    if first.dim() > 2:
        agree = [sum(size in tensor.shape[:1] for tensor in given[1:]) for size in first.shape[:2]]
        if agree[1] > agree[0]:
            return first.shape[1], 1
    return first.shape[0], 0


def _joined(name: str, path: str) -> str:
    return f"{name}.{path}" if name else path

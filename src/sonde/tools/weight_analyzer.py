"""The weights of a model as they are now: their numbers, how they were initialised, their spectrum, and units that do nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sonde.errors import SondeError
from sonde.rules.words import listing, number
from sonde.tools import dead_units
from sonde.tools.dead_units import DeadNeuron
from sonde.tools.next_layers import Followers, by_order, seen
from sonde.tools.tensor_statistics import Quick, quick
from sonde.tools.weight_initialization import Initialisation, fitted, recognise
from sonde.tools.weight_spectrum import Spectrum, spectrum
from sonde.views.numbers import counted
from sonde.views.plots import Plot, histograms
from sonde.views.table import html_table, text_table

MAX_ROWS = 40  # of a printed table
MAX_LISTED = 8  # units of a layer that are named in a line


@dataclass(frozen=True, slots=True)
class WeightSummary:
    """One parameter. `spectrum` is a text where there is none, and says why."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stats: Quick
    initialisation: Initialisation
    spectrum: Spectrum | str


@dataclass(frozen=True, slots=True)
class WeightReport:
    layers: Mapping[str, WeightSummary]  # by parameter path; a tied parameter once
    neurons: tuple[DeadNeuron, ...]
    notes: tuple[str, ...] = field(default=())

    def dead_neurons(self, evidence: str | None = None) -> list[DeadNeuron]:
        """Units that do nothing; `evidence` "weights" or "activations" gives only those found by it."""
        return [neuron for neuron in self.neurons if evidence in (None, neuron.evidence)]

    def mean(self) -> float:
        """Over all finite weights of the model."""
        num, mean, _ = _pooled(layer.stats for layer in self.layers.values())
        return mean if num else math.nan

    def std(self) -> float:
        num, _, square = _pooled(layer.stats for layer in self.layers.values())
        return math.sqrt(square) if num else math.nan

    def collapsed_layers(self) -> list[str]:
        """Weights whose rank has collapsed: far fewer directions in use than there are."""
        return [name for name, layer in self.layers.items() if isinstance(layer.spectrum, Spectrum) and layer.spectrum.is_collapsed]

    def summary(self) -> str:
        rows, left_out = self._rows()
        parts = [self._headline(), "", text_table(_HEAD, rows)]
        lines = [line for line in (left_out, *self._lines()) if line]
        return "\n".join([*parts, *([""] if lines else []), *lines])

    __str__ = summary

    def _repr_html_(self) -> str:
        rows, left_out = self._rows()
        return html_table(_HEAD, rows, title=self._headline(), notes=[line for line in (left_out, *self._lines()) if line])

    def _headline(self) -> str:
        num = sum(layer.stats.num for layer in self.layers.values())
        what = f"{counted(len(self.layers), 'parameter')} of {num:,} numbers"
        return f"weights: {what}, mean {number(self.mean())}, std {number(self.std())}, {counted(len(self._units()), 'dead neuron')}"

    def _units(self) -> set[tuple[str, int]]:
        return {(neuron.layer, neuron.unit) for neuron in self.neurons}

    def _rows(self) -> tuple[list[list[object]], str]:
        rows: list[list[object]] = []
        for layer in list(self.layers.values())[:MAX_ROWS]:
            stats, found = layer.stats, layer.spectrum
            shape = "x".join(map(str, layer.shape))
            bad = f" ({stats.nan + stats.inf:,} not finite)" if stats.nan or stats.inf else ""
            ranks = ["", ""]
            if isinstance(found, Spectrum):
                sampled = " sampled" if found.sampled else ""
                ranks = [number(found.largest), f"{found.effective_rank:.0f} of {found.full_rank}{sampled}"]
            words = layer.initialisation.name if len(layer.shape) > 1 or layer.initialisation.recipes else ""
            if layer.initialisation.fit in ("small", "large", "fits"):
                words += f"; {layer.initialisation.fit}"
            rows.append([layer.name, shape, number(stats.mean), number(stats.std) + bad, *ranks, words])
        hidden = len(self.layers) - len(rows)
        return rows, f"and {counted(hidden, 'more parameter')}" if hidden else ""

    def _lines(self) -> list[str]:
        lines = []
        by_place: dict[tuple[str, str], list[DeadNeuron]] = {}
        for neuron in self.neurons:
            by_place.setdefault((neuron.layer, neuron.evidence), []).append(neuron)
        for (layer, evidence), neurons in by_place.items():
            units = listing([str(neuron.unit) for neuron in neurons], MAX_LISTED)
            lines.append(f"dead in {layer} (by {evidence}): {units}; of {neurons[0].unit}: {neurons[0].reason}")
        for name in self.collapsed_layers():
            found = self.layers[name].spectrum
            assert isinstance(found, Spectrum)
            lines.append(f"rank collapse in {name}: effective rank {number(found.effective_rank)} of {found.full_rank}")
        for fit in ("small", "large"):
            names = [name for name, each in self.layers.items() if each.initialisation.fit == fit]
            if names:
                lines.append(f"{fit} weights in {listing(names, MAX_LISTED)}; of {names[0]}: {self.layers[names[0]].initialisation.reason}")
        if len(lines) > MAX_ROWS:
            lines = [*lines[:MAX_ROWS], f"and {len(lines) - MAX_ROWS} more"]
        return [*lines, *self.notes]


_HEAD = ("parameter", "shape", "mean", "std", "largest sv", "eff. rank", "initialisation")


class WeightAnalyzer:
    """Looks at the weights of a model. Nothing is kept of the model, and nothing in it is changed."""

    def analyze_model(self, model: nn.Module, data: Any = None) -> WeightReport:
        """Everything about the weights.

        With `data` (what forward takes: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of such batches) the model
        runs once, in eval mode, without gradients and with the random state put back: that shows which activation follows a layer, and
        which units never fire. Without it, only the order within nn.Sequential is known.
        """
        if not isinstance(model, nn.Module):
            raise SondeError(f"analyze_model takes a torch.nn.Module, not a {type(model).__name__}. For one tensor use TensorInspector.")
        model = getattr(model, "_orig_mod", model)
        after = Followers(by_order(model)) if data is None else seen(model, data)
        layers: dict[str, WeightSummary] = {}
        neurons: list[DeadNeuron] = []
        owners = dict(model.named_modules())
        for path, parameter in model.named_parameters():
            layer, _, kind = path.rpartition(".")
            owner = owners[layer]
            activation = after.activation.get(layer)
            layers[path] = _summary(path, parameter, owner, activation)
            if kind == "weight" and isinstance(owner, (nn.Linear, nn.modules.conv._ConvNd)):
                neurons += _dead(layer, owner, activation, after)
        notes = [
            f"{layer}: only {num} values per unit were seen, so units that never fired are not called dead"
            for layer, num in after.num_seen.items()
            if num < dead_units.ENOUGH_SEEN
        ]
        if data is None:
            notes.append("dead neurons are judged from weights alone: give data to see which units never fire")
        return WeightReport(layers, tuple(neurons), tuple(notes))

    def plot_weight_histogram(self, model: nn.Module, path: str | Path, *, bins: int = 64) -> Path:
        """The distribution of every parameter, in one picture (.png, .svg, .pdf, .html, .json)."""
        return self.weight_histogram(model, bins=bins).save(path)

    def weight_histogram(self, model: nn.Module, *, bins: int = 64) -> Plot:
        """The same picture, to look at or to change."""
        if not isinstance(model, nn.Module):
            raise SondeError(f"A weight histogram is of a torch.nn.Module, not of a {type(model).__name__}.")
        with torch.no_grad():
            values = {path: parameter.detach() for path, parameter in model.named_parameters() if not quick(parameter).unsupported}
        if not values:
            raise SondeError(f"{type(model).__name__} has no parameters whose numbers can be read, so there is nothing to draw.")
        return histograms(values, name=f"weights of {type(model).__name__}", bins=bins)


def _summary(path: str, parameter: nn.Parameter, owner: nn.Module, activation: str | None) -> WeightSummary:
    stats = quick(parameter)
    found: Spectrum | str = stats.unsupported or "it is no matrix"
    init = Initialisation((), "could not tell", stats.std, reason=stats.unsupported)
    if not stats.unsupported:
        hidden = int(getattr(owner, "hidden_size", 0)) if isinstance(owner, (nn.RNNBase, nn.RNNCellBase)) else 0
        init = recognise(parameter, owner=type(owner).__name__, hidden_size=hidden)
        if parameter.ndim >= 2:
            found = spectrum(parameter)
            if isinstance(owner, (nn.Linear, nn.modules.conv._ConvNd)):
                init = fitted(init, parameter, activation)
    shape = () if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
    return WeightSummary(path, shape, str(parameter.dtype).removeprefix("torch."), stats, init, found)


def _dead(layer: str, owner: nn.Module, activation: str | None, after: Followers) -> Iterable[DeadNeuron]:
    weight, bias = owner.weight, getattr(owner, "bias", None)
    if not isinstance(weight, torch.Tensor) or nn.parameter.is_lazy(weight) or isinstance(owner, nn.modules.conv._ConvTransposeNd):
        return
    fired, num_seen = after.fired.get(layer), after.num_seen.get(layer, 0)
    for neuron in dead_units.by_weights(layer, weight, bias, activation):
        # A bias far below zero is an argument from the scale of the inputs; data that make the unit fire prove it wrong.
        if fired is None or "bias" not in neuron.reason or not bool(fired[neuron.unit]):
            yield neuron
    if fired is not None:
        yield from dead_units.by_activations(layer, fired, num_seen)


def _pooled(parts: Iterable[Quick]) -> tuple[int, float, float]:
    """Number, mean and variance of several sets of numbers taken together."""
    known = [part for part in parts if part.num_finite]
    num = sum(part.num_finite for part in known)
    if not num:
        return 0, math.nan, math.nan
    mean = math.fsum(part.num_finite * part.mean for part in known) / num
    return num, mean, math.fsum(part.num_finite * (part.std**2 + (part.mean - mean) ** 2) for part in known) / num

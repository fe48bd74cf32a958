"""WeightAnalyzer: statistics, initialization, spectrum and dead units of the current weights of a model."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sonde.errors import SondeError
from sonde.formatting import counted, listing, number, printable
from sonde.render.plots import Plot, histograms
from sonde.render.summaries.tables import html_table, text_table
from sonde.statistics.private_torch_api import CONV, CONV_TRANSPOSE
from sonde.tools.hook_that_never_raises import require_module
from sonde.tools.tensors.describe_tensor import FastStatistics, fast_statistics
from sonde.tools.weights import dead_units
from sonde.tools.weights.dead_units import DeadNeuron
from sonde.tools.weights.following_activation import NextLayers, next_layers_by_forward, next_layers_by_order
from sonde.tools.weights.weight_initialization import WeightInitialization, recognize_initialization, with_fit
from sonde.tools.weights.weight_spectrum import WeightSpectrum, compute_spectrum

MAX_ROWS = 40  # of a printed table
MAX_LISTED = 8  # units of a layer that one line names


@dataclass(frozen=True, slots=True)
class WeightSummary:
    """Statistics of one parameter. `spectrum` is a string with the reason if there is no spectrum."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stats: FastStatistics
    initialization: WeightInitialization
    spectrum: WeightSpectrum | str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        lines = [f"{self.name}: {self.dtype} {shape}", f"  {self.stats}", f"  initialization: {self.initialization.name}"]
        if isinstance(self.spectrum, WeightSpectrum):
            rank = f"effective rank {number(self.spectrum.effective_rank)} of {self.spectrum.full_rank}"
            lines.append(f"  spectrum: largest singular value {number(self.spectrum.largest)}, {rank}")
        return "\n".join(map(printable, lines))

    @property
    def initialisation(self) -> WeightInitialization:
        """The same as `initialization`, in the spelling of version 0.1."""
        return self.initialization


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Result of `WeightAnalyzer.analyze_model`."""

    layers: Mapping[str, WeightSummary]  # by parameter name; a tied parameter once
    neurons: tuple[DeadNeuron, ...]  # a unit that is dead by weights and by activations is listed for each
    notes: tuple[str, ...] = field(default=())

    def dead_neurons(self, evidence: str | None = None) -> list[DeadNeuron]:
        """The dead units, each once. With `evidence` ("weights" or "activations") only those found by it."""
        if evidence not in (None, "weights", "activations"):
            raise SondeError(f'evidence must be "weights", "activations" or None, not {evidence!r}.')
        first: dict[tuple[str, int], DeadNeuron] = {}
        for neuron in self.neurons:
            if evidence in (None, neuron.evidence):
                first.setdefault((neuron.layer, neuron.unit), neuron)
        return list(first.values())

    def mean(self) -> float:
        """Mean of all finite weights of the model."""
        return self._pooled()[0]

    def std(self) -> float:
        """Standard deviation of all finite weights of the model."""
        return self._pooled()[1]

    def _pooled(self) -> tuple[float, float]:
        known = [layer.stats for layer in self.layers.values() if layer.stats.num_finite]
        num = sum(part.num_finite for part in known)
        if not num:
            return math.nan, math.nan
        mean = math.fsum(part.num_finite * part.mean for part in known) / num
        return mean, math.sqrt(math.fsum(part.num_finite * (part.std**2 + (part.mean - mean) ** 2) for part in known) / num)

    def collapsed_layers(self) -> list[str]:
        """Weights with an effective rank far below their full rank."""
        return [name for name, layer in self.layers.items() if isinstance(layer.spectrum, WeightSpectrum) and layer.spectrum.is_collapsed]

    def summary(self) -> str:
        """The report as text: a table of parameters, dead neurons, rank collapse and notes."""
        lines = self._lines()
        return "\n".join([self._headline(), "", text_table(_HEAD, self._rows()), *([""] if lines else []), *lines])

    __str__ = summary

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._rows(), title=self._headline(), notes=self._lines())

    def _headline(self) -> str:
        num = sum(layer.stats.num for layer in self.layers.values())
        what = f"{counted(len(self.layers), 'parameter')} of {num:,} numbers"
        num_dead = counted(len(self.dead_neurons()), "dead neuron")
        return f"weights: {what}, mean {number(self.mean())}, std {number(self.std())}, {num_dead}"

    def _rows(self) -> list[list[object]]:
        rows: list[list[object]] = []
        for layer in list(self.layers.values())[:MAX_ROWS]:
            stats, found = layer.stats, layer.spectrum
            shape = "x".join(map(str, layer.shape))
            bad = f" ({stats.nan + stats.inf:,} not finite)" if stats.nan or stats.inf else ""
            ranks = ["", ""]
            if isinstance(found, WeightSpectrum):
                sampled = " sampled" if found.sampled else ""
                ranks = [number(found.largest), f"{found.effective_rank:.0f} of {found.full_rank}{sampled}"]
            notes = layer.initialization.name if len(layer.shape) > 1 or layer.initialization.recipes else ""
            if layer.initialization.fit in ("small", "large", "fits"):
                notes += f"; {layer.initialization.fit}"
            rows.append([layer.name, shape, number(stats.mean), number(stats.std) + bad, *ranks, notes])
        return rows

    def _lines(self) -> list[str]:
        lines = []
        by_place: dict[tuple[str, str], list[DeadNeuron]] = {}
        for neuron in self.neurons:
            by_place.setdefault((neuron.layer, neuron.evidence), []).append(neuron)
        for (place, evidence), neurons in by_place.items():
            units = listing([str(neuron.unit) for neuron in neurons], MAX_LISTED)
            noun = "unit" if len(neurons) == 1 else "units"
            lines.append(f"dead in {place} (by {evidence}): {noun} {units}; unit {neurons[0].unit}: {neurons[0].reason}")
        for name, layer in self.layers.items():
            if isinstance(found := layer.spectrum, WeightSpectrum) and found.is_collapsed:
                lines.append(f"rank collapse in {name}: effective rank {number(found.effective_rank)} of {found.full_rank}")
        for fit in ("small", "large"):
            names = [name for name, each in self.layers.items() if each.initialization.fit == fit]
            if names:
                lines.append(f"{fit} weights in {listing(names, MAX_LISTED)}; of {names[0]}: {self.layers[names[0]].initialization.reason}")
        if len(lines) > MAX_ROWS:
            lines = [*lines[:MAX_ROWS], f"and {len(lines) - MAX_ROWS} more"]
        hidden = len(self.layers) - MAX_ROWS
        return [*([f"and {counted(hidden, 'more parameter')}"] if hidden > 0 else []), *lines, *self.notes]


_HEAD = ("parameter", "shape", "mean", "std", "largest sv", "eff. rank", "initialization")


class WeightAnalyzer:
    """Analyzes the weights of a model without changing it or holding a reference to it."""

    def analyze_model(self, model: nn.Module, data: Any = None) -> WeightReport:
        """Returns statistics, initialization, spectrum and dead units of all parameters. `data` is what forward takes: a tensor, a tuple of
        arguments, a dict of keyword arguments, or a list of such batches. With it the model runs once per batch in eval mode, which shows
        the activation after each layer and the units that never output a value above zero."""
        model = require_module(model, "analyze_model", "For one tensor use TensorInspector.")
        after = NextLayers(next_layers_by_order(model)) if data is None else next_layers_by_forward(model, data)
        layers: dict[str, WeightSummary] = {}
        neurons: list[DeadNeuron] = []
        owners = dict(model.named_modules())
        for path, parameter in model.named_parameters():
            layer, _, kind = path.rpartition(".")
            owner, activation = owners[layer], after.activation.get(layer)
            layers[path] = _summary(path, parameter, owner, activation)
            if kind == "weight" and isinstance(owner, (nn.Linear, *CONV)):
                neurons += _dead_neurons(layer, owner, activation, after)
        too_few = "too few to report units without a value above zero as dead"
        notes = [
            f"{layer or type(model).__name__}: only {num} values per unit were measured, {too_few}"
            for layer, num in after.num_values.items()
            if num < dead_units.MIN_VALUES
        ]
        if data is None:
            notes.append("dead neurons are found by weights alone: pass data to find units that never output a value above zero")
        return WeightReport(layers, tuple(neurons), tuple(notes))

    def clear(self) -> None:
        """Does nothing: reports belong to you, and no result is stored. Every tool has `clear()`."""

    def plot_weight_histogram(self, model: nn.Module, path: str | Path, *, bins: int = 64) -> Path:
        """Writes the distribution of every parameter as one figure (.png, .svg, .pdf, .html, .json) and returns the path."""
        return self.weight_histogram(model, bins=bins).save(path)

    def weight_histogram(self, model: nn.Module, *, bins: int = 64) -> Plot:
        """Returns the figure of `plot_weight_histogram` as a `Plot`, to show or to change."""
        require_module(model, "weight_histogram")
        values = {path: parameter.detach() for path, parameter in model.named_parameters() if not fast_statistics(parameter).unsupported}
        if not values:
            raise SondeError(f"{type(model).__name__} has no parameters with readable values, so there is nothing to plot.")
        return histograms(values, name=f"weights of {type(model).__name__}", bins=bins, kind="parameter")


def _summary(path: str, parameter: nn.Parameter, owner: nn.Module, activation: str | None) -> WeightSummary:
    stats = fast_statistics(parameter)
    found: WeightSpectrum | str = stats.unsupported or "it is not a matrix"
    init = WeightInitialization((), "could not tell", stats.std, reason=stats.unsupported)
    if not stats.unsupported:
        hidden = int(getattr(owner, "hidden_size", 0)) if isinstance(owner, (nn.RNNBase, nn.RNNCellBase)) else 0
        init = recognize_initialization(parameter, owner=type(owner).__name__, hidden_size=hidden)
        if parameter.ndim >= 2:
            found = compute_spectrum(parameter)
            if isinstance(owner, (nn.Linear, *CONV)):
                init = with_fit(init, parameter, activation)
    shape = () if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
    return WeightSummary(path, shape, str(parameter.dtype).removeprefix("torch."), stats, init, found)


def _dead_neurons(path: str, owner: nn.Module, activation: str | None, after: NextLayers) -> Iterable[DeadNeuron]:
    weight, bias = owner.weight, getattr(owner, "bias", None)
    if not isinstance(weight, torch.Tensor) or nn.parameter.is_lazy(weight) or isinstance(owner, CONV_TRANSPOSE):
        return
    layer = path or type(owner).__name__  # the model itself is the only layer
    num_positive, num_values = after.num_positive.get(path), after.num_values.get(path, 0)
    for neuron in dead_units.dead_by_weights(layer, weight, bias, activation):
        # The argument from the bias assumes inputs of unit scale; a positive output on real data refutes it.
        if num_positive is None or "bias" not in neuron.reason or not bool(num_positive[neuron.unit]):
            yield neuron
    if num_positive is not None:
        yield from dead_units.dead_by_activations(layer, num_positive, num_values)

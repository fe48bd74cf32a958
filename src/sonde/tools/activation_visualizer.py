"""ActivationVisualizer: copies of layer outputs, with statistics and plots."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sonde.errors import SondeError, require_count
from sonde.formatting import number
from sonde.layer_name_patterns import LayerPatterns, require_name
from sonde.render import plots
from sonde.render.plots import Plot
from sonde.render.summaries.tables import html_table, text_table
from sonde.statistics.find_tensors import find_tensors
from sonde.tools.hook_that_never_raises import SafeHook, require_module
from sonde.tools.hooks.attach_hooks_to_layers import ModelLayers
from sonde.tools.tensors.describe_tensor import FastStatistics, Outlier, TensorStats, describe, fast_statistics

MAX_ELEMENTS = 1 << 20  # stored elements of one activation; of a larger one every second, third … per dimension
_PATTERN_SIGNS = frozenset("*?[^$\\(|+{")


@dataclass(frozen=True, slots=True)
class _StoredActivation:
    """A copy of the last output of a layer, or a sample of it."""

    values: Tensor  # on the CPU
    strides: tuple[int, ...]  # distance of the stored elements per dimension; all 1 if nothing was left out
    shape: tuple[int, ...]  # of the whole output
    device: str
    measured: FastStatistics  # of the whole output


class ActivationVisualizer:
    """Stores a copy of the last output of selected layers on the CPU. Of an output with more than `max_elements` elements an even sample is
    stored, while mean, deviation, extremes, norms and counts are of the whole output. If a layer returns several tensors, the first is
    stored under its name and the others under `name:index`, for instance `lstm:1.0`."""

    def __init__(self, max_elements: int = MAX_ELEMENTS) -> None:
        self.max_elements = require_count(max_elements, "max_elements")
        self._stored: dict[str, _StoredActivation] = {}
        self._hooks = ExitStack()
        self._hooked: set[str] = set()
        self._layers: set[str] = set()  # of the models that were passed, with and without a hook

    def register_forward_hook(self, model: nn.Module, layer: str | Sequence[str]) -> list[str]:
        """Stores the outputs of these layers from now on. `layer` is a name or a pattern ("encoder.*.attention"). Returns their names."""
        require_module(model, "register_forward_hook")
        if not isinstance(layer, (str, Sequence)):
            raise SondeError(f'A layer is a name or a pattern such as "encoder.*", or a list of these, not {layer!r}.')
        modules = ModelLayers(model).modules
        self._layers |= set(modules)
        names: dict[str, None] = {}
        for each in [layer] if isinstance(layer, str) else layer:
            if isinstance(each, str) and each not in modules and (_PATTERN_SIGNS & set(each) or each.startswith("re:")):
                names |= dict.fromkeys(LayerPatterns(each).select(modules))
            else:
                names.setdefault(require_name(each, modules))
        for name in names:
            if name not in self._hooked:
                self._hooked.add(name)
                hook = SafeHook(f"the output of {name}", partial(self._on_output, name))
                self._hooks.callback(modules[name].register_forward_hook(hook).remove)
        return list(names)

    def remove(self) -> None:
        """Removes all hooks. Stored outputs stay until `clear()`."""
        self._hooks.close()
        self._hooked.clear()

    def clear(self) -> None:
        """Frees all stored outputs."""
        self._stored.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _on_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        # A copy made in inference mode could not be used in autograd later.
        with torch.inference_mode(False), torch.no_grad():
            for at, (index, tensor) in enumerate(find_tensors(output)):
                self._stored[f"{name}:{index}" if at else name] = self._copy(tensor)

    def _copy(self, tensor: Tensor) -> _StoredActivation:
        measured = fast_statistics(tensor)
        if measured.unsupported:
            raise TypeError(measured.unsupported)
        whole = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        strides = _strides(whole.shape, self.max_elements)
        part = whole[tuple(slice(None, None, stride) for stride in strides)]
        return _StoredActivation(part.to("cpu", copy=True), strides, tuple(tensor.shape), str(tensor.device), measured)

    def names(self) -> list[str]:
        """The names of all stored outputs."""
        return list(self._stored)

    def get_activations(self, name: str) -> Tensor:
        """The last output of a layer as a detached copy on the CPU; a sample if it has more than `max_elements` elements."""
        return self._get(name).values

    def is_sampled(self, name: str) -> bool:
        """True if only a sample of this output is stored."""
        return any(stride > 1 for stride in self._get(name).strides)

    def statistics(self, name: str, *, bins: int = 64) -> TensorStats:
        """Full statistics of the last output. Percentiles, histogram and outliers are of the sample if only a sample is stored."""
        stored = self._get(name)
        found, whole = describe(stored.values, bins=bins), stored.measured
        num_bytes = whole.num * stored.values.element_size()
        return replace(
            found, shape=stored.shape, device=stored.device, num_elements=whole.num, num_bytes=num_bytes, mean=whole.mean, std=whole.std,
            min=whole.min, max=whole.max, l1_norm=whole.l1, l2_norm=whole.l2, num_zeros=whole.zeros, num_nan=whole.nan, num_inf=whole.inf,
            outliers=tuple(Outlier(tuple(map(mul, one.index, stored.strides)), one.value) for one in found.outliers),
        )  # fmt: skip

    def outliers(self, name: str) -> tuple[Outlier, ...]:
        """The largest outliers of the last output with their indices; of the sample if only a sample is stored."""
        return self.statistics(name).outliers

    def summary(self) -> str:
        """A table with one line per stored output."""
        return text_table(_HEAD, self._rows()) if self._stored else "no output is stored yet: run the model after register_forward_hook"

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._rows(), title=f"activations of {len(self._stored)} layers")

    def _rows(self) -> list[list[object]]:
        rows: list[list[object]] = []
        for name, stored in self._stored.items():
            found = stored.measured
            zeros = f"{found.zero_share:.0%}"
            bad = f"{found.nan} NaN, {found.inf} Inf" if found.nan or found.inf else ""
            shape = "x".join(map(str, stored.shape))
            rows.append([name, shape, *(number(x) for x in (found.mean, found.std, found.min, found.max)), zeros, bad])
        return rows

    def _get(self, name: str) -> _StoredActivation:
        given: object = name
        if not isinstance(given, str):
            raise SondeError(f"The name of the layer is a string, not {given!r} of type {type(given).__name__}.")
        if name in self._hooked and name not in self._stored:
            advice = "Inside torch.compile no output is stored: run the model that was passed to torch.compile."
            raise SondeError(f"{name} has not returned a tensor since the hook was registered. Run the model first.\n{advice}")
        if name in self._layers and name not in self._stored:
            call = f'Call register_forward_hook(model, "{name}") and run the model.'
            raise SondeError(f"{name} is a layer of the model, but its output is not stored: it had no hook when the model ran.\n{call}")
        if not self._stored:
            raise SondeError('No output is stored yet. Call register_forward_hook(model, "layer name") and run the model.')
        return self._stored[require_name(name, [*self._stored, *sorted(self._layers - self._stored.keys())])]

    def plot_heatmap(self, activations: Any, path: str | Path, *, units: int | None = None, name: str = "") -> Path:
        """Writes a heat map: of a square matrix as it is, of several square matrices (attention, feature maps) one map each, and else of
        units by positions. `activations` is a tensor, array or list, or the name of a stored layer; `units` is their dimension."""
        return self.heatmap(activations, units=units, name=name).save(path)

    def plot_distribution(self, activations: Any, path: str | Path, *, bins: int = 64, name: str = "") -> Path:
        """Writes a histogram. `activations` is a tensor, array or list, or the name of a stored layer."""
        return self.distribution(activations, bins=bins, name=name).save(path)

    def heatmap(self, activations: Any, *, units: int | None = None, name: str = "") -> Plot:
        """The figure of `plot_heatmap` as a `Plot`, to show or to change."""
        values, title = self._values(activations, name)
        return plots.activation_heatmap(values, units=units, name=title)

    def distribution(self, activations: Any, *, bins: int = 64, name: str = "") -> Plot:
        """The figure of `plot_distribution` as a `Plot`, to show or to change."""
        values, title = self._values(activations, name)
        return plots.distribution(values, name=title, bins=bins)

    def _values(self, activations: Any, name: str) -> tuple[Any, str]:
        if not isinstance(activations, str):
            return activations, name or "activations"
        stored = self._get(activations)
        sampled = f", a sample of {'x'.join(map(str, stored.shape))}" if self.is_sampled(activations) else ""
        return stored.values, name or f"{activations}{sampled}"


_HEAD = ("layer", "shape", "mean", "std", "min", "max", "zeros", "not finite")


def _strides(shape: Sequence[int], limit: int) -> tuple[int, ...]:
    """The stride per dimension that leaves at most `limit` elements; the longest dimension is thinned first."""
    strides = [1] * len(shape)
    left = list(shape)
    while left and math.prod(left) > limit:
        at = left.index(max(left))
        strides[at] += 1
        left[at] = -(-shape[at] // strides[at])
    return tuple(strides)

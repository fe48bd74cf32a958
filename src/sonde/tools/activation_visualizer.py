"""What layers put out: kept as it was when it passed, to be looked at, measured and drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sonde.errors import SondeError
from sonde.rules.words import number
from sonde.statistics.tensor_utils import find_tensors
from sonde.tools.hooks.module_hooks import Layers
from sonde.tools.layer_patterns import Patterns, require_name
from sonde.tools.safe_hook import Contained
from sonde.tools.tensor_statistics import Outlier, Quick, TensorStats, describe, quick
from sonde.views import plots
from sonde.views.plots import Plot
from sonde.views.table import html_table, text_table

MAX_ELEMENTS = 1 << 20  # numbers kept of one activation; of a larger one every second, third … in each dimension
_PATTERN_SIGNS = frozenset("*?[^$\\(|+{")


@dataclass(frozen=True, slots=True)
class _Kept:
    values: Tensor  # a copy, on the host
    strides: tuple[int, ...]  # every so many in each dimension; all 1 where the whole is kept
    shape: tuple[int, ...]  # of the whole
    device: str
    measured: Quick  # of the whole


class ActivationVisualizer:
    """Hooks that keep the last output of chosen layers, as it was at that moment: what later changes it in place does not change the copy.

    A copy has at most `max_elements` numbers, on the host; of a larger activation an even sample is kept, while mean, deviation,
    extremes, norms and counts are of the whole. A layer that puts out several tensors keeps the first under its name and the
    others under `name:place`, for instance `lstm:1.0`.
    """

    def __init__(self, max_elements: int = MAX_ELEMENTS) -> None:
        if isinstance(max_elements, bool) or not isinstance(max_elements, int) or max_elements < 1:
            raise SondeError(f"max_elements must be a whole number from 1 on, not {max_elements!r}.")
        self.max_elements = max_elements
        self._kept: dict[str, _Kept] = {}
        self._handles: list[Any] = []
        self._hooked: dict[str, None] = {}

    # -- watching ----------------------------------------------------------------------------------

    def register_forward_hook(self, model: nn.Module, layer: str | Sequence[str]) -> list[str]:
        """Keep what these layers put out from now on; `layer` is a name or a pattern ("encoder.*.attention"). Returns their names."""
        if not isinstance(model, nn.Module):
            raise SondeError(f"register_forward_hook takes a torch.nn.Module, not a {type(model).__name__}.")
        modules = Layers(model).modules
        names: dict[str, None] = {}
        for each in [layer] if isinstance(layer, str) else layer:
            if isinstance(each, str) and each not in modules and (_PATTERN_SIGNS & set(each) or each.startswith("re:")):
                names |= dict.fromkeys(Patterns(each).select(modules))
            else:
                names.setdefault(require_name(each, modules))
        for name in names:
            if name not in self._hooked:
                self._hooked[name] = None
                hook = Contained(f"the output of {name}", partial(self._keep, name))
                self._handles.append(modules[name].register_forward_hook(hook))
        return list(names)

    def remove(self) -> None:
        """Take every hook off. What was kept stays until `clear()`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def clear(self) -> None:
        """Free what was kept."""
        self._kept.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _keep(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        # Out of inference mode, or the copy could not be used in autograd later.
        with torch.inference_mode(False), torch.no_grad():
            for at, (place, tensor) in enumerate(find_tensors(output)):
                self._kept[f"{name}:{place}" if at else name] = self._copy(tensor)

    def _copy(self, tensor: Tensor) -> _Kept:
        measured = quick(tensor)
        if measured.unsupported:
            raise TypeError(measured.unsupported)
        whole = tensor.detach()
        if whole.layout is not torch.strided:
            whole = whole.to_dense()
        strides = _strides(whole.shape, self.max_elements)
        part = whole[tuple(slice(None, None, stride) for stride in strides)]
        return _Kept(part.to("cpu", copy=True), strides, tuple(tensor.shape), str(tensor.device), measured)

    # -- asking ------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Everything that was kept."""
        return list(self._kept)

    def get_activations(self, name: str) -> Tensor:
        """The last output of a layer: a copy on the host, without a graph; a sample where it is larger than `max_elements`."""
        return self._get(name).values

    def is_sampled(self, name: str) -> bool:
        """Whether only a sample of this activation was kept."""
        return any(stride > 1 for stride in self._get(name).strides)

    def statistics(self, name: str, *, bins: int = 64) -> TensorStats:
        """Everything about the last output. Percentiles, histogram and outliers are of the sample where only that was kept."""
        kept = self._get(name)
        found, whole = describe(kept.values, bins=bins), kept.measured
        num_bytes = whole.num * kept.values.element_size()
        return replace(
            found, shape=kept.shape, device=kept.device, num_elements=whole.num, num_bytes=num_bytes, mean=whole.mean, std=whole.std,
            min=whole.min, max=whole.max, l1_norm=whole.l1, l2_norm=whole.l2, num_zeros=whole.zeros, num_nan=whole.nan, num_inf=whole.inf,
            outliers=_in_whole(found.outliers, kept.strides),
        )  # fmt: skip

    def outliers(self, name: str) -> tuple[Outlier, ...]:
        """The numbers of the last output that are farthest out, with their places; of the sample where only that was kept."""
        return self.statistics(name).outliers

    def summary(self) -> str:
        """One line for each activation that was kept."""
        return text_table(_HEAD, self._rows()) if self._kept else "no activation was kept yet: run the model after register_forward_hook"

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._rows(), title=f"activations of {len(self._kept)} layers")

    def _rows(self) -> list[list[object]]:
        rows: list[list[object]] = []
        for name, kept in self._kept.items():
            found = kept.measured
            zeros = f"{found.zero_share:.0%}"
            bad = f"{found.nan} NaN, {found.inf} Inf" if found.nan or found.inf else ""
            shape = "x".join(map(str, kept.shape))
            rows.append([name, shape, *(number(x) for x in (found.mean, found.std, found.min, found.max)), zeros, bad])
        return rows

    def _get(self, name: str) -> _Kept:
        if name in self._hooked and name not in self._kept:
            raise SondeError(
                f"{name} has not put out a tensor since it was hooked. Run the model first.\n"
                "Inside of torch.compile nothing is kept: run the model as it was before compiling."
            )
        if not self._kept:
            raise SondeError('Nothing was kept yet. Call register_forward_hook(model, "layer name") and run the model.')
        return self._kept[require_name(name, self._kept)]

    # -- drawing -----------------------------------------------------------------------------------

    def plot_heatmap(self, activations: Any, path: str | Path, *, units: int | None = None, name: str = "") -> Path:
        """Units by positions. `activations` is a tensor, array or list, or the name of a layer that was kept."""
        return self.heatmap(activations, units=units, name=name).save(path)

    def plot_distribution(self, activations: Any, path: str | Path, *, bins: int = 64, name: str = "") -> Path:
        """A histogram. `activations` is a tensor, array or list, or the name of a layer that was kept."""
        return self.distribution(activations, bins=bins, name=name).save(path)

    def heatmap(self, activations: Any, *, units: int | None = None, name: str = "") -> Plot:
        """The picture of `plot_heatmap`, to look at or to change."""
        values, title = self._values(activations, name)
        matrix = plots.units_by_positions(values, units)
        return plots.heatmap(matrix, name=title, x_label="position", y_label="unit", label="activation")

    def distribution(self, activations: Any, *, bins: int = 64, name: str = "") -> Plot:
        """The picture of `plot_distribution`, to look at or to change."""
        values, title = self._values(activations, name)
        return plots.distribution(values, name=title, bins=bins)

    def _values(self, activations: Any, name: str) -> tuple[Any, str]:
        if not isinstance(activations, str):
            return activations, name or "activations"
        kept = self._get(activations)
        sampled = f", a sample of {'x'.join(map(str, kept.shape))}" if self.is_sampled(activations) else ""
        return kept.values, name or f"{activations}{sampled}"


_HEAD = ("layer", "shape", "mean", "std", "min", "max", "zeros", "not finite")


def _strides(shape: Sequence[int], limit: int) -> tuple[int, ...]:
    """How far apart the numbers that are kept are in each dimension, so that at most `limit` remain: the longest is thinned first."""
    strides = [1] * len(shape)
    left = list(shape)
    while left and math.prod(left) > limit:
        at = left.index(max(left))
        strides[at] += 1
        left[at] = -(-shape[at] // strides[at])
    return tuple(strides)


def _in_whole(outliers: Sequence[Outlier], strides: Sequence[int]) -> tuple[Outlier, ...]:
    return tuple(Outlier(tuple(i * stride for i, stride in zip(each.index, strides)), each.value) for each in outliers)

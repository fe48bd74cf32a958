"""How the signal changes along the depth of a model: forward in the outputs, backward in their gradients.

The outputs of a model are numbered in the order of their first calls, so the order of their sites is the depth. A cell that the program
calls in a loop has one site per call and is deep in time. Stacked recurrent layers are one module with one output; there the gradients of
their biases show the depth, since the gradient of a bias is that of its layer's output, summed up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sonde.events import Kind, Site
from sonde.run_view import Block, LayerTable
from sonde.run_view.layer_statistics_in_blocks import Values

KINDS = (Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT, Kind.GRADIENT)  # that a profile is made of
SHALLOWEST = 4  # sites: a model of fewer layers has no depth along which a signal could vanish or grow
FLOOR = 1e-38  # below this float32 has no normal numbers: a smaller signal is zero
RECURRENT = ("RNN", "LSTM", "GRU")
LAST_SHARE = 4  # one layer in so many belongs to the last ones: the very last may have a gradient unlike the others

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DepthProfiles:
    """One entry per step of a block. Ratios, so that the scale of the loss does not matter.

    `backward` is NaN for a step in which the model is too shallow, was not observed, or holds non-finite numbers.
    """

    backward: Values  # L2 norm of the gradient at the first layer over that at the last ones: small if it vanishes, large if it explodes
    forward: Values  # size of the last layers' outputs, per number, over that of the first layer's; 1 if not known
    steepest: Values  # share of the backward change, in decades, at one single place: near 1 the change is no slope
    first_site: Ints
    last_site: Ints
    num_layers: Ints

    @classmethod
    def of(cls, block: Block, *, over_time: bool) -> DepthProfiles:
        """With `over_time` each call of a module is a layer of its own, otherwise a module counts once, with its largest gradient: that
        the first of many time steps gets little of it is the nature of memory and no defect."""
        num = len(block)
        profiles = cls(*(np.full(num, np.nan) for _ in range(3)), *(np.full(num, -1, np.int64) for _ in range(3)))
        is_missing = np.ones(num, bool)
        gradient = block.get(Kind.ACTIVATION_GRADIENT)
        for layers in _finite_layers(gradient) if gradient is not None else ():
            chosen = layers if over_time else _once_per_module(layers)
            if len(chosen.sites) >= SHALLOWEST:
                profiles._fill(chosen)
                is_missing[chosen.rows] = False
        profiles.forward[~is_missing] = _forward_growth(block)[~is_missing]
        parameters = block.get(Kind.GRADIENT)
        for layers in _finite_layers(parameters) if parameters is not None else ():
            chosen = _recurrent_biases(layers, is_missing[layers.rows])
            if len(chosen.sites) >= SHALLOWEST:
                profiles._fill(chosen)
                profiles.forward[chosen.rows] = 1.0
        return profiles

    def _fill(self, layers: _Layers) -> None:
        last = layers.last
        rows, norms, last = layers.rows[last > 0], layers.norms[last > 0], last[last > 0]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            logs = np.log10(np.maximum(norms / last[:, None], FLOOR))
            total = np.abs(logs[:, 0] - logs[:, -1])
            self.steepest[rows] = np.where(total > 0, np.abs(np.diff(logs, axis=1)).max(axis=1) / total, 0.0)
            self.backward[rows] = norms[:, 0] / last
        self.first_site[rows], self.last_site[rows] = layers.sites[0].id, layers.sites[-1].id
        self.num_layers[rows] = len(layers.sites)


class _Layers(NamedTuple):
    """Steps in which the same layers were measured."""

    rows: Ints  # in the block
    sites: list[Site]  # in the order of depth
    norms: Values  # (rows x sites)

    @property
    def last(self) -> Values:
        """The largest norm of the last layers."""
        largest: Values = self.norms[:, -max(1, len(self.sites) // LAST_SHARE) :].max(axis=1)
        return largest


def is_bias(site: Site) -> bool:
    return site.path.rpartition(".")[2].startswith("bias")


def _finite_layers(table: LayerTable, *, per_number: bool = False) -> Iterator[_Layers]:
    """The sites of the model with the most of them. Steps with a non-finite number are left out."""
    is_there = (table["num"] > 0) & table.is_known
    is_finite = (((table["nan"] == 0) & (table["inf"] == 0)) | ~is_there).all(axis=1)
    models = [site.model if site is not None else "" for site in table.sites]
    main = max(dict.fromkeys(models), key=models.count, default="")
    is_there &= np.array([model == main for model in models], dtype=bool)
    order = np.argsort(table.site_ids, kind="stable")
    norms = table["l2"] / np.sqrt(np.maximum(table["num"], 1)) if per_number else table["l2"]
    for rows in _equal_rows(is_there, is_finite):
        columns = order[is_there[rows[0]][order]]
        sites = [site for column in columns.tolist() if (site := table.sites[column]) is not None]
        if sites:
            yield _Layers(rows, sites, norms[np.ix_(rows, columns)])


def _equal_rows(pattern: Bools, among: Bools) -> Iterator[Ints]:
    """The rows by pattern: nearly always one, since the same layers have a gradient in every step."""
    pending = among.copy()
    while pending.any():
        is_equal = pending & (pattern == pattern[np.argmax(pending)]).all(axis=1)
        pending &= ~is_equal
        yield np.flatnonzero(is_equal)


def _once_per_module(layers: _Layers) -> _Layers:
    columns: dict[str, list[int]] = {}
    for column, site in enumerate(layers.sites):
        columns.setdefault(site.path, []).append(column)
    if len(columns) == len(layers.sites):
        return layers
    largest = [layers.norms[:, calls].max(axis=1) for calls in columns.values()]
    return _Layers(layers.rows, [layers.sites[calls[0]] for calls in columns.values()], np.stack(largest, axis=1))


def _forward_growth(block: Block) -> Values:
    growth = np.ones(len(block))
    activation = block.get(Kind.ACTIVATION)
    for outputs in _finite_layers(activation, per_number=True) if activation is not None else ():
        first = outputs.norms[:, 0]
        if len(outputs.sites) >= SHALLOWEST:
            with np.errstate(invalid="ignore", divide="ignore"):
                growth[outputs.rows] = np.where(first > 0, outputs.last / first, 1.0)
    return growth


def _recurrent_biases(layers: _Layers, is_wanted: Bools) -> _Layers:
    """The biases of recurrent layers, in order, and after them the last bias of the model."""
    biases = [column for column, site in enumerate(layers.sites) if is_bias(site)]
    columns = [column for column in biases if layers.sites[column].type in RECURRENT]
    if columns and biases[-1] not in columns:
        columns.append(biases[-1])
    return _Layers(layers.rows[is_wanted], [layers.sites[column] for column in columns], layers.norms[is_wanted][:, columns])

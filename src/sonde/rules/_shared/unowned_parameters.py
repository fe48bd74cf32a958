"""Parameters that no optimizer holds, although they get gradients and never change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from sonde.events import Kind, OwnershipChanged, ProbeDisabled, Row, Site
from sonde.rules._shared.read_event_tables import count
from sonde.rules.column_helpers import first_where
from sonde.run_view import Block, LayerTable, Reduction, RunView
from sonde.runlog.record_index import Ints

PATIENCE = 3  # observed steps with a gradient: a loss term that touches a module once is no training signal


@dataclass
class _Observed:
    """What the observed steps say about each parameter."""

    gradient_rows: list[Ints] = field(default_factory=list)  # of steps with statistics of gradients
    latest_rows: dict[int, list[int]] = field(default_factory=dict)  # by site: the last PATIENCE steps with a non-zero gradient
    changed: set[int] = field(default_factory=set)


def _reduce(block: Block, state: _Observed) -> _Observed:
    if (gradient := block.get(Kind.GRADIENT)) is not None:
        state.gradient_rows.append(block.rows)
        has_gradient = _is_nonzero(gradient)
        for column in np.flatnonzero(has_gradient.any(axis=0)).tolist():
            site, rows = int(gradient.site_ids[column]), block.rows[has_gradient[:, column]][-PATIENCE:]
            state.latest_rows[site] = [*state.latest_rows.get(site, ()), *rows.tolist()][-PATIENCE:]
    if (update := block.get(Kind.UPDATE)) is not None:
        state.changed.update(update.site_ids[_is_nonzero(update).any(axis=0)].tolist())
    return state


def _is_nonzero(table: LayerTable) -> npt.NDArray[np.bool_]:
    """(steps x sites)"""
    return (table["l2"] > 0) | (table["nan"] > 0) | (table["inf"] > 0)


OBSERVED = Reduction((Kind.GRADIENT, Kind.UPDATE), _Observed, _reduce)


@dataclass(frozen=True)
class UnownedParameters:
    """Ownership of parameters at the end of the run, joined with the gradients since it was first known."""

    untrained: Sequence[Site]  # no optimizer holds them, they get gradients, and nothing changes them, neither training nor the program
    first_step: int  # with statistics of gradients
    num_abandoned: int  # parameters that an optimizer holds, that belong to no model of the run and get no gradient
    replaced_after: int  # the last step in which parameters that had these names before got gradients; -1 if there were none
    replaced_before: int  # the first observed step in which they did not
    trains_other_tensors: bool  # the optimizers hold nothing of the models but tensors that get gradients: an image, a prompt
    reason_not_evaluated: str  # empty if the run has what is needed

    @classmethod
    def of(cls, view: RunView) -> UnownedParameters:
        located, observed = view.events_with_rows(OwnershipChanged), view.reduced(OBSERVED)
        known_from = located[0][0] if located else view.num_steps
        last = located[-1][1] if located else None
        optimizers = last.optimizers if last else ()
        received = {site: rows for site, rows in observed.latest_rows.items() if rows[-1] >= known_from}
        gradient_rows = np.concatenate([np.empty(0, np.int64), *observed.gradient_rows])
        first = first_where(gradient_rows >= known_from)
        reason = ""
        disabled = next((event for event in view.events(ProbeDisabled) if not event.where and _knows_parameters(event.probe)), None)
        if disabled is not None:
            reason = f"{disabled.probe} was disabled ({disabled.error}), so what the optimizers hold since then is not known"
        elif not view.calls.num_optimizers:
            reason = "no optimizer was seen"
        elif not view.calls.updates:
            reason = "no optimizer stepped"
        elif last is None:
            reason = "it is not known which parameters the optimizers hold"
        elif last.num_unowned and not received:
            reason = "no gradients were observed"
        untrained = [
            view.sites[site]
            for site, rows in sorted(received.items())
            if len(rows) == PATIENCE and rows[0] >= known_from and site not in observed.changed and site in view.sites
            and is_unowned(view, view.sites[site]) and disabled is None
        ]  # fmt: skip
        replaced = _replaced(view, untrained, observed.latest_rows, gradient_rows)
        return cls(
            untrained=untrained,
            first_step=-1 if first is None else view.step_number(int(gradient_rows[first])),
            num_abandoned=sum(map(_num_abandoned, optimizers)),
            replaced_after=-1 if replaced is None else view.step_number(replaced[0]),
            replaced_before=-1 if replaced is None else view.step_number(replaced[1]),
            trains_other_tensors=any(count(each, "num_foreign_with_grad") for each in optimizers)
            and not any(count(each, "num_owned") for each in optimizers),
            reason_not_evaluated=reason,
        )  # fmt: skip


def _knows_parameters(probe: str) -> bool:
    """Whether a part of Sonde finds models, follows their optimizers or measures their parameters."""
    return probe in ("discovery", "parameters_and_gradients") or probe.startswith("on_")


def _replaced(
    view: RunView, untrained: Sequence[Site], latest_rows: Mapping[int, list[int]], gradient_rows: Ints
) -> tuple[int, int] | None:
    """The last row in which other parameters had the names of these and got gradients, and the next one with gradients."""
    names, own = {(site.model, site.path) for site in untrained}, {site.id for site in untrained}
    before = [number for number, site in view.sites.items() if number not in own and (site.model, site.path) in names]
    last = max((latest_rows[number][-1] for number in before if number in latest_rows), default=None)
    if last is None:
        return None
    after = first_where(gradient_rows > last)
    return last, view.num_steps if after is None else int(gradient_rows[after])


def _num_abandoned(optimizer: Row) -> int:
    return max(0, count(optimizer, "num_foreign") - count(optimizer, "num_foreign_with_grad"))


def unowned_names(view: RunView) -> frozenset[str]:
    """The names of the parameters that no optimizer holds at the end of the run."""
    events = view.events(OwnershipChanged)
    return frozenset(events[-1].unowned if events else ())


def is_unowned(view: RunView, site: Site) -> bool:
    names = view.remember(unowned_names)
    return site.path in names or f"{site.model}.{site.path}" in names


def trainable_paths(view: RunView, model: str) -> list[str]:
    """Of a parameter that was replaced by another, the path is there once."""
    sites = [site for site in view.sites.values() if site.kind == "parameter" and site.trainable and site.model == model]
    return list(dict.fromkeys(site.path for site in sites))


def runs_after_trained_model(view: RunView, model: str) -> bool:
    """Whether a model runs after another one that is trained: then its gradients may only pass through it."""
    first: dict[str, int] = {}
    for number, site in sorted(view.sites.items()):
        if site.kind == "output":
            first.setdefault(site.model, number)
    changed = view.reduced(OBSERVED).changed
    trained = {site.model for number, site in view.sites.items() if number in changed} - {model}
    return any(first.get(other, inf) < first.get(model, -inf) for other in trained)

"""What a rule is: a pure function of a run, with three possible results.

`check(view)` returns one or several findings, `Clear()` (the rule had what it needs and found nothing) or `NotEvaluated(reason)`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sonde.events import Finding, Kind, Severity, TypedEvent
from sonde.run_view import Reduction, RunView


@dataclass(frozen=True, slots=True)
class Clear:
    """The rule had what it needs and found nothing."""


@dataclass(frozen=True, slots=True)
class NotEvaluated:
    """The run does not hold enough to evaluate the rule."""

    reason: str  # reads well after "not evaluated: "


Result = Finding | Sequence[Finding] | Clear | NotEvaluated

_KINDS = {
    Kind.ACTIVATION: "outputs of layers",
    Kind.ACTIVATION_GRADIENT: "gradients of the outputs of layers",
    Kind.PARAMETER: "parameters",
    Kind.GRADIENT: "gradients of parameters",
    Kind.UPDATE: "updates of parameters",
    Kind.BATCH: "batches",
}


@dataclass(frozen=True)
class Rule:
    """One defect.

    Args:
        name: Names the defect; reads well after "found a …".
        check: The rule itself.
        page: Its documentation (`sonde explain`): the docstring of its module.
        needs: Step scalars (`"stale_updates"`), kinds of layer statistics (`Kind.GRADIENT`) and event types. If one of them is
            absent, the rule is not evaluated.
        explains: Rules whose findings are consequences when this one found something.
        reductions: The reductions that `check` reads with `view.reduced`: all rules share one pass over the layer statistics.
    """

    name: str
    check: Callable[[RunView], Result]
    page: str
    needs: tuple[str | type[TypedEvent], ...] = ()
    explains: tuple[str, ...] = ()
    reductions: tuple[Reduction[Any], ...] = ()

    def finding(
        self, severity: Severity, step: int, *, cause: str, fix: str, evidence: Mapping[str, float | str], where: str = ""
    ) -> Finding:
        """A finding of this rule; see `sonde.events.Finding`."""
        return Finding(self.name, severity, where, step, cause, fix, evidence)

    def missing_need(self, view: RunView) -> str:
        """Why the rule cannot be evaluated on this run; empty if it can."""
        if view.is_empty:
            return "no complete step was recorded"
        for need in self.needs:
            if isinstance(need, type):
                if not view.events(need):
                    return f"the run has no event of the kind {need.KIND!r}"
            elif need in _KINDS:
                if need not in view.layer_kinds:
                    return f"no {_KINDS[need]} were measured"
            elif need not in view.steps:
                return f"the run does not hold {need!r}"
        return ""

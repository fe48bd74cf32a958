"""Gradients from the last update are still there when the next backward adds to them.

What it finds    optimizer.zero_grad() (or an equivalent) is never called between updates.
Why it matters   every update then follows the sum of all past gradients: with SGD the loss diverges, with Adam the model learns worse.
How it knows     a backward adds to gradients that an optimizer step has used and that nothing cleared since, seen at the calls themselves.
Known problems   accumulation on purpose has no update between its backwards and is not reported. `p.grad = None` clears like zero_grad().
                 Clearing only every few updates is reported. Each optimizer is judged by its own gradients.
Fix              call optimizer.zero_grad() before each backward that starts a new update.
"""

from sonde.events import CallSiteFound, Severity, StaleGradientsUsed
from sonde.formatting import number
from sonde.rules._shared.origin_search_results import NONFINITE_RULES
from sonde.rules.column_helpers import first_number, first_streak, largest_number
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.source_lines_of_calls import source_evidence

PATIENCE = 3  # updates in a row: a resumed run may start with one stale gradient


def check(view: RunView) -> Result:
    updates, stale = view.calls["optimizer_steps"], view.calls["stale_updates"]
    # Several optimizers may step in one step, so updates are counted, not steps.
    streak = first_streak(view.counts("stale_updates"), sum_at_least=PATIENCE, among=view.counts("optimizer_steps") > 0)
    if streak is None:
        if updates <= PATIENCE:
            return NotEvaluated(f"only {updates} optimizer steps were taken" if updates else "no optimizer stepped")
        return Clear()
    cleared = view.calls["zero_grads"]
    called = f"zero_grad() was called {cleared} times, but not between these" if cleared else "zero_grad() was never called"
    first_norm, largest_norm = first_number(view.steps["grad_norm"]), largest_number(view.steps["grad_norm"])
    line, text = _line_of_stale_optimizer(view)
    return RULE.finding(
        Severity.CRITICAL if view.loss_trend.failing else Severity.ERROR,
        view.step_number(streak.start),
        cause=f"{stale} of {updates} optimizer steps{f' at {line}' if line else ''} used gradients that still held those of the update "
        f"before; {called}; the gradient norm went from {number(first_norm)} up to {number(largest_norm)}",
        fix="call optimizer.zero_grad() before each backward that starts a new update",
        evidence={
            "stale_updates": stale,
            "optimizer_steps": updates,
            "zero_grads": cleared,
            "first_grad_norm": first_norm,
            "largest_grad_norm": largest_norm,
            **source_evidence(line, text),
        },
    )


def _line_of_stale_optimizer(view: RunView) -> tuple[str, str]:
    """Of several optimizers, the line that steps the one whose gradients are stale."""
    steps = [site for site in view.events(CallSiteFound) if site.call == "optimizer_step"]
    stale = next((event.optimizer for event in view.events(StaleGradientsUsed)), None)
    chosen = next((site for site in steps if site.optimizer == stale), next(iter(steps), None))
    return (chosen.line, chosen.text) if chosen else ("", "")


RULE = Rule(
    "missing-zero-grad",
    check,
    page=__doc__,
    needs=("optimizer_steps", "stale_updates"),
    explains=(
        "lr-divergence", "exploding-gradient", *NONFINITE_RULES, "dead-relu", "vanishing-gradient", "loss-plateau", "unchanged-parameter",
    ),
)  # fmt: skip

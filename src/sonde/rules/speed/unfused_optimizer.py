"""The optimizer updates parameter by parameter in Python, although torch has one call for all of them.

What it finds    Adam, AdamW, Adagrad or SGD with momentum in its plain form on the CPU, taking a large share of the step.
Why it matters   the plain form passes over every parameter up to ten times and calls torch as often; the fused one passes once.
How it knows     the optimizer's share of the run, its class and its settings. What fused=True saves was measured on torch 2.13 with few
                 large and many small parameters; the least of that is promised. foreach=True gains little on the CPU.
Known problems   the fused form rounds differently in the last bit, and needs floating-point parameters and a torch that has it for the
                 class. An optimizer on a device is not reported: its default is not the plain form.
Fix              pass fused=True to the optimizer.
"""

from sonde.events import OptimizerCreated, Severity
from sonde.rules._shared.profiled_steps import with_gain
from sonde.rules._shared.read_event_tables import amount, count
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.source_lines_of_calls import source_evidence

# Share of the optimizer's time that fused=True saves, the least that was measured over 4 to 100 parameters of 100 to 2,000,000 elements:
SAVED = {"Adam": 0.55, "AdamW": 0.55, "Adagrad": 0.5, "SGD": 0.35}


def check(view: RunView) -> Result:
    times, optimizers = view.times, view.events(OptimizerCreated)
    if reason := times.reason_not_evaluated or ("" if optimizers else "no optimizer was created"):
        return NotEvaluated(reason)
    if not all(map(_is_plain, optimizers)):
        return Clear()
    share = times.share("optimizer")
    gain = share * min(SAVED[optimizer.class_name] for optimizer in optimizers)
    if not times.is_worth(gain):
        return Clear()
    first = optimizers[0]
    num = sum(count(group, "num_parameters") for group in first.groups)
    return RULE.finding(
        Severity.INFO,
        times.first_step,
        cause=f"{100 * share:.0f} % of the time is {first.class_name}.step()"
        + (f", created at {first.source}" if first.source else "")
        + f", which updates {num} parameters one after the other",
        fix=with_gain(f"pass fused=True: torch.optim.{first.class_name}(..., fused=True)", gain),
        evidence={
            "gain": gain,
            "optimizer_share": share,
            "optimizer_ms": times.usual_ms("optimizer"),
            "num_parameters": num,
            **source_evidence(first.source, first.text),
        },
    )


def _is_plain(optimizer: OptimizerCreated) -> bool:
    """Whether torch has a fused form of it that is not used."""
    if optimizer.class_name not in SAVED or not optimizer.groups:
        return False
    if optimizer.class_name == "SGD" and not any(amount(group, "momentum") for group in optimizer.groups):
        return False
    return all("fused" in group and not group["fused"] and group.get("device") == "cpu" for group in optimizer.groups)


RULE = Rule("unfused-optimizer", check, page=__doc__)

"""The model trains while it is in evaluation mode.

What it finds    updates from forwards with model.training == False: model.train() is not called, or not again after validation.
Why it matters   dropout does nothing, and batch norm neither normalizes by the batch nor learns its statistics.
How it knows     in many steps in a row, every forward with gradients had its root model and all dropout and batch norm modules in eval
                 mode, and an optimizer step followed.
Known problems   batch norm frozen by bn.eval() inside train() leaves the root in training mode. A model without dropout and batch norm does
                 not depend on the mode. A teacher in eval mode is one of two roots. Fine-tuning in eval mode looks the same.
Fix              call model.train() at the start of each epoch, after validation.
"""

from sonde.events import Severity
from sonde.rules.column_helpers import first_streak
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

PATIENCE = 10  # updates in a row: an epoch of a tiny dataset, not a single step taken for a sanity check


def check(view: RunView) -> Result:
    forwards, modules = view.counts("forwards"), view.counts("mode_modules")
    is_update = (forwards > 0) & (view.counts("backwards") > 0) & (view.counts("optimizer_steps") > 0)
    # The modules are counted in observed steps only; in the others the mode of the root decides.
    in_eval = is_update & (view.counts("root_in_eval") >= forwards) & (view.counts("mode_modules_in_eval") >= modules)
    num_updates, num_in_eval = int(is_update.sum()), int(in_eval.sum())
    if num_updates < PATIENCE:
        return NotEvaluated(f"only {num_updates} updates followed a forward of a watched model")
    streak = first_streak(in_eval.astype(int), sum_at_least=PATIENCE, among=is_update)
    num_modules, eval_forwards = int(modules.max()), view.calls["eval_forwards"]
    if streak is None or not num_modules:
        return Clear()
    after = " since the validation before it" if eval_forwards and num_in_eval < num_updates else ""
    return RULE.finding(
        Severity.WARNING,
        view.step_number(streak.start),
        cause=f"{num_in_eval} of {num_updates} updates came from forwards in eval mode{after}, with {num_modules} dropout or batch "
        f"norm modules switched off{view.call_sites.at('forward')}",
        fix="call model.train() before the training loop, and again after each validation",
        evidence={
            "updates_in_eval": num_in_eval,
            "updates": num_updates,
            "mode_modules": num_modules,
            "eval_forwards": eval_forwards,
            **view.call_sites.evidence("forward"),
        },
    )


RULE = Rule("train-in-eval-mode", check, page=__doc__, needs=("forwards", "backwards", "optimizer_steps"))

"""The list of all rules: those of Sonde, and those that installed packages provide by an entry point."""

from functools import cache
from importlib.metadata import entry_points

from sonde.errors import SondeError
from sonde.rules.calls import (
    grads_cleared_before_step,
    missing_backward,
    missing_optimizer_step,
    missing_zero_grad,
    params_not_in_optimizer,
    stale_optimizer_params,
    unchanged_parameter,
)
from sonde.rules.crash import fatal_signal
from sonde.rules.data import constant_input, iterable_duplicated, label_constant, nan_input, no_shuffle, same_batch, worker_rng_duplicate
from sonde.rules.devices import silent_transfer, tensor_left_behind
from sonde.rules.engine import describe_error
from sonde.rules.gradients import dead_relu, exploding_gradient, gradient_spike, vanishing_gradient
from sonde.rules.loss import loss_plateau, loss_scale_collapse, loss_spike, lr_divergence
from sonde.rules.memory import activation_heavy_layer, graph_leak, memory_growth, out_of_memory
from sonde.rules.mode import eval_in_train_mode, train_in_eval_mode
from sonde.rules.nonfinite import nan_operation_rules, nonfinite_evaluation, nonfinite_loss, nonfinite_origin, nonfinite_parameter
from sonde.rules.rule import NotEvaluated, Result, Rule
from sonde.rules.schedule import (
    lr_stuck_in_warmup,
    lr_zero,
    scheduler_before_optimizer,
    scheduler_never_stepped,
    scheduler_too_often,
    scheduler_too_rarely,
)
from sonde.rules.speed import (
    checkpoint_stall,
    cpu_oversubscribed,
    host_sync,
    input_bound,
    python_bound,
    slow_layer,
    slow_step_outliers,
    unfused_optimizer,
    validation_dominates,
)
from sonde.run_view import Reduction, RunView

ENTRY_POINTS = "sonde.rules"

_SPEED = (
    silent_transfer, cpu_oversubscribed, input_bound, validation_dominates, checkpoint_stall, host_sync, unfused_optimizer, python_bound,
    slow_layer, slow_step_outliers,
)  # fmt: skip

RULES: tuple[Rule, ...] = tuple(
    each.RULE
    for each in (
        missing_backward, missing_optimizer_step, missing_zero_grad, grads_cleared_before_step, stale_optimizer_params,
        params_not_in_optimizer, unchanged_parameter, lr_zero, scheduler_too_often, scheduler_too_rarely, lr_stuck_in_warmup,
        scheduler_never_stepped, scheduler_before_optimizer, train_in_eval_mode, eval_in_train_mode, same_batch, constant_input,
        label_constant, iterable_duplicated, worker_rng_duplicate, no_shuffle, tensor_left_behind, graph_leak, memory_growth,
        activation_heavy_layer, out_of_memory, fatal_signal, nan_input, nonfinite_origin, nonfinite_loss, nonfinite_evaluation,
        nonfinite_parameter,
        loss_scale_collapse, exploding_gradient, lr_divergence, loss_spike, gradient_spike, dead_relu, vanishing_gradient, loss_plateau,
        *_SPEED,
    )
) + nan_operation_rules.RULES  # fmt: skip
"""The rules of Sonde."""

SPEED_RULES = frozenset(each.RULE.name for each in _SPEED)
"""Rules that say how fast a training could be. In a test suite their findings depend on what else the machine does."""


@cache
def all_rules() -> tuple[Rule, ...]:
    """The rules of Sonde, then those of installed packages: entry points of the group `sonde.rules` that are a `Rule`.

    A rule that cannot be loaded is reported as not evaluated, under the name of its entry point.
    """
    known = {rule.name for rule in RULES}
    provided: dict[str, Rule] = {}
    for entry_point in entry_points(group=ENTRY_POINTS):
        try:
            rule = entry_point.load()
            reason = _why_not_a_rule(rule, entry_point.value)
        except (Exception, SystemExit) as error:  # code of another package
            reason = f"{entry_point.value} cannot be loaded ({describe_error(error)})"
        loaded = rule if not reason else _unavailable(entry_point.name, reason)
        if loaded.name not in known:  # no package replaces a rule of Sonde
            provided.setdefault(loaded.name, loaded)
    return (*RULES, *provided.values())


def checked_rules(rules: object) -> tuple[Rule, ...]:
    """The rules that a caller chose; a `SondeError` for anything else, as names of rules."""
    if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, Rule) for rule in rules):
        example = "[rule for rule in sonde.rules.registry.RULES if rule.name == 'missing-zero-grad']"
        raise SondeError(f"rules must be a list of rules, for instance {example}, not {rules!r}.")
    return tuple(rules)


def _why_not_a_rule(rule: object, place: str) -> str:
    if not isinstance(rule, Rule):
        return f"{place} is a {type(rule).__name__}, not a sonde.rules.rule.Rule"
    has_tuples = all(isinstance(each, tuple) for each in (rule.needs, rule.explains, rule.reductions))
    if not (isinstance(rule.name, str) and isinstance(rule.page, str) and callable(rule.check) and has_tuples):
        return f"{place} has a name, page, needs, explains or reductions of the wrong type"
    return "" if all(isinstance(each, Reduction) for each in rule.reductions) else f"{place} has reductions that are no Reduction"


def _unavailable(name: str, reason: str) -> Rule:
    def check(view: RunView) -> Result:
        return NotEvaluated(reason)

    return Rule(name, check, page=f"This rule is not available: {reason}.")

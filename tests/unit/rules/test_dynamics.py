"""The rules about numbers that go wrong: signals that fade or grow, losses that leave, units that die."""

from __future__ import annotations

from math import inf, log, nan

import numpy as np
import pytest

from sonde.events import STATISTICS, Event, Frame, Kind, Severity, Site, Step
from sonde.rules.data.nan_input import RULE as nan_input
from sonde.rules.gradients.dead_relu import RULE as dead_relu
from sonde.rules.gradients.exploding_gradient import RULE as exploding_gradient
from sonde.rules.gradients.vanishing_gradient import RULE as vanishing_gradient
from sonde.rules.loss.loss_plateau import RULE as loss_plateau
from sonde.rules.loss.lr_divergence import RULE as lr_divergence
from sonde.rules.nonfinite.nonfinite_loss import RULE as nonfinite_loss
from sonde.rules.rule import Clear
from synthetic_steps import LAYERS, PARAMETER_IDS, ask, falling, noise, opening, parameter_rows, row, stuck, the_finding, training, why_not


def slope(factor):
    """Gradients at the outputs that change by a factor from each layer to the one before it."""
    norms = {path: 0.1 * factor ** (len(LAYERS) - 1 - index) for index, path in enumerate(LAYERS)}
    return lambda step: {Kind.ACTIVATION_GRADIENT: {path: row(l2=norm, zeros=500) for path, norm in norms.items()}}


def fading(step):
    """Gradients and updates that are a hundredth at each layer before another."""
    depth = {path: len(LAYERS) - 1 - LAYERS.index(path.rpartition(".")[0]) for path in PARAMETER_IDS}
    return slope(0.01)(step) | {Kind.UPDATE: {path: row(l2=0.05 * 0.01**layers) for path, layers in depth.items()}}


def with_optimizer(name):
    """The opening of a run whose optimizer is of another class."""
    return [Event("optimizer", 0, {**event.data, "class": name}) if event.kind == "optimizer" else event for event in opening()]


def bad(what, step, **data):
    return Event("nonfinite", step, {"what": what, "where": "x", "num_nan": 3, "num_inf": 0, "num_elements": 64, **data})


# -- vanishing -----------------------------------------------------------------------------------------------------------


def test_a_gradient_that_fades_layer_by_layer_is_found_while_the_loss_is_stuck():
    finding = the_finding(vanishing_gradient, training(loss=stuck, frames=fading))
    assert finding.where == "net.0"
    assert finding.step == 0
    assert finding.evidence["first_update_per_weight"] == pytest.approx(1e-8 * finding.evidence["last_update_per_weight"], rel=0.1)


def test_a_gradient_that_fades_in_a_model_that_learns_is_clear():
    assert ask(vanishing_gradient, training(loss=falling, frames=fading)) == Clear()


def test_small_gradients_whose_updates_are_as_large_as_those_of_the_last_layers_do_not_vanish():
    """Adam divides by the size of the gradient."""
    assert ask(vanishing_gradient, training(loss=stuck, frames=slope(0.01))) == Clear()


def test_with_sgd_weight_decay_moves_the_first_layers_and_does_not_excuse_their_gradient():
    finding = the_finding(vanishing_gradient, training(loss=stuck, frames=slope(0.01), start=with_optimizer("SGD")))
    assert finding.where == "net.0"
    assert "an update changes" not in finding.cause


def test_without_measured_updates_a_small_gradient_is_evidence_with_sgd_only():
    def steps(optimizer):
        return training(loss=stuck, frames=lambda step: slope(0.01)(step) | {Kind.UPDATE: {}}, start=with_optimizer(optimizer))

    assert "with RMSprop the size of a gradient does not say" in why_not(vanishing_gradient, steps("RMSprop"))
    assert "first_update_per_weight" not in the_finding(vanishing_gradient, steps("SGD")).evidence


def test_a_cliff_is_not_a_slope():
    def frames(step):
        return {Kind.ACTIVATION_GRADIENT: {path: row(l2=1e-9 if path == "net.0" else 0.1) for path in LAYERS}}

    assert ask(vanishing_gradient, training(loss=stuck, frames=frames)) == Clear()


def test_gradients_that_are_small_everywhere_are_clear():
    def frames(step):
        return {Kind.ACTIVATION_GRADIENT: {path: row(l2=1e-7) for path in LAYERS}}

    assert ask(vanishing_gradient, training(loss=lambda s: 7e-5, frames=frames)) == Clear()


def test_the_first_of_many_time_steps_may_get_little_gradient():
    """A cell called in a loop: one site per call, all of one module."""
    cells = {400 + call: Site(400 + call, "output", "cell", "model", "LSTMCell", call=call, shape=(32, 8)) for call in range(8)}
    head = {408: Site(408, "output", "head", "model", "Linear", shape=(32, 8))}
    steps = []
    for step in training(loss=stuck):
        frames = dict(step.frames)
        if frames:
            norms = [0.1 * 10.0 ** (call - 7) for call in range(8)] + [0.2]
            values = np.array([[row(l2=norm)[name] for norm in norms] for name in STATISTICS])
            ids = np.array([*cells, *head], np.uint32)
            frames[Kind.ACTIVATION_GRADIENT] = Frame(Kind.ACTIVATION_GRADIENT, step.number, ids, STATISTICS, values)
        steps.append(Step(step.number, 0, step.scalars, frames, step.events, {**step.sites, **cells, **head}))
    assert not isinstance(ask(vanishing_gradient, steps), list)


def test_vanishing_is_not_judged_without_observed_gradients():
    assert "not observed" in why_not(vanishing_gradient, training(loss=stuck, frames=lambda s: {Kind.ACTIVATION_GRADIENT: {}}))


# -- exploding, diverging --------------------------------------------------------------------------------------------------


def test_a_gradient_that_grows_with_depth_before_any_update_is_found():
    finding = the_finding(exploding_gradient, training(loss=lambda s: 1e4 * (1 + 0.1 * noise(s)), frames=slope(10.0)))
    assert finding.where == "net.0"
    assert finding.step == 0


def test_a_gradient_that_grows_with_depth_in_a_model_that_learns_is_clear():
    assert ask(exploding_gradient, training(frames=slope(10.0))) == Clear()


def both_ways(step):
    sizes = {path: row(l2=1.0 * 10**index) for index, path in enumerate(LAYERS)}
    return slope(10.0)(step) | {Kind.ACTIVATION: sizes}


def test_a_signal_that_grows_in_both_directions_is_a_warning_even_if_the_loss_falls():
    finding = the_finding(exploding_gradient, training(loss=lambda s: 1e6 * falling(s), frames=both_ways))
    assert finding.severity == Severity.WARNING


RNN_SITES = {
    number: Site(number, "parameter", path, "model", kind, shape=(64,))
    for number, path, kind in [
        (300, "rnn.bias_ih_l0", "RNN"),
        (301, "rnn.bias_hh_l0", "RNN"),
        (302, "rnn.bias_ih_l1", "RNN"),
        (303, "rnn.bias_hh_l1", "RNN"),
        (304, "readout.bias", "Linear"),
    ]
}


def recurrent(norms, **kwargs):
    """A model whose depth is inside one recurrent module: only the gradients of its biases show it."""
    steps = []
    hidden = {Kind.ACTIVATION: {}, Kind.ACTIVATION_GRADIENT: {}, Kind.UPDATE: {}}
    for step in training(frames=lambda s: hidden, start=with_optimizer("SGD"), **kwargs):
        frames = dict(step.frames)
        if Kind.GRADIENT in frames:
            values = np.array([[row(l2=norm)[name] for norm in norms] for name in STATISTICS])
            frames[Kind.GRADIENT] = Frame(Kind.GRADIENT, step.number, np.array(list(RNN_SITES), np.uint32), STATISTICS, values)
        steps.append(Step(step.number, 0, step.scalars, frames, step.events, {**step.sites, **RNN_SITES}))
    return steps


def test_gradients_that_explode_inside_a_recurrent_layer_are_found_by_its_biases():
    steps = recurrent([1000.0, 1000.0, 30.0, 30.0, 0.8], loss=lambda s: 2.3 if s == 0 else nan)
    finding = the_finding(exploding_gradient, steps)
    assert finding.where == "rnn"
    assert ask(lr_divergence, steps) == Clear()


def test_gradients_that_fade_inside_stacked_recurrent_layers_are_found_by_their_biases():
    assert the_finding(vanishing_gradient, recurrent([1e-6, 1e-6, 1e-4, 1e-3, 0.5], loss=stuck)).where == "rnn"


def test_a_healthy_recurrent_layer_is_clear():
    steps = recurrent([0.5, 0.5, 0.3, 0.3, 0.8], loss=stuck)
    assert ask(vanishing_gradient, steps) == Clear()
    assert ask(exploding_gradient, steps) == Clear()


def test_the_size_of_a_huge_update_is_a_number():
    """In float32 the square of 1e20 is infinite."""
    steps = training(loss=lambda s: 2.3 if s < 3 else 1e30, frames=lambda s: {Kind.UPDATE: {path: row(l2=1e20) for path in PARAMETER_IDS}})
    assert the_finding(lr_divergence, steps).evidence["largest_update_per_weight"] == pytest.approx(1e20 / 8, rel=0.01)


def test_the_optimizer_and_the_rate_that_diverge_are_named_and_not_the_first_ones():
    """A new optimizer in step 60, with a rate of 3."""
    created = Event("optimizer", 60, {"optimizer": 1, "class": "SGD", "groups": [], "source": "train.py:30", "text": "SGD(lr=3)"})
    scalars = {"lr": 1e-3}, {"lr": 3.0, "grad_norm": 400.0}
    steps = training(
        loss=lambda s: falling(s) if s < 62 else 10.0 ** min(s - 60, 30),
        scalars=lambda s: scalars[s >= 60],
        events={60: [created]},
    )
    finding = the_finding(lr_divergence, steps)
    assert (finding.evidence["lr"], finding.evidence["source"]) == (3.0, "train.py:30")
    assert "with a learning rate of 3 at train.py:30" in finding.cause
    assert ask(exploding_gradient, steps) == Clear()


def test_clipping_after_the_update_is_named_where_a_training_diverges():
    clip = Event("source", 0, {"call": "clip", "line": "train.py:22", "text": "clip()", "is_after_update": True})
    diverging = training(
        loss=lambda s: 2.3 if s < 3 else 1e30,
        frames=lambda s: {Kind.UPDATE: {path: row(l2=1e3) for path in PARAMETER_IDS}},
        start=[*opening(), clip],
    )
    assert the_finding(lr_divergence, diverging).fix.startswith("move the clipping at train.py:22 between backward() and optimizer.step()")
    exploding = training(loss=lambda s: 1e4 * (1 + 0.1 * noise(s)), frames=slope(10.0), start=[*opening(), clip])
    finding = the_finding(exploding_gradient, exploding)
    assert "the clipping at train.py:22 comes after the update" in finding.cause
    assert finding.evidence["clips"] == "after the update"


def test_a_gradient_norm_that_leaps_again_and_again_is_found():
    steps = training(loss=stuck, scalars=lambda s: {"grad_norm": 400.0 if s > 30 and s % 10 == 0 else 0.5})
    finding = the_finding(exploding_gradient, steps)
    assert finding.step == 40
    assert finding.evidence["num_leaps"] >= 3


def test_one_outlier_batch_is_no_explosion():
    assert ask(exploding_gradient, training(loss=stuck, scalars=lambda s: {"grad_norm": 400.0 if s == 60 else 0.5})) == Clear()


def test_large_gradients_of_a_large_loss_are_clear():
    steps = training(loss=lambda s: 3e4 * falling(s), scalars=lambda s: {"grad_norm": 500.0})
    assert ask(exploding_gradient, steps) == Clear()
    assert ask(lr_divergence, steps) == Clear()


def thrown(step):
    return {Kind.UPDATE: {path: row(l2=20.0 * 10**step) for path in PARAMETER_IDS}} if step < 12 else {}


def test_a_loss_that_is_thrown_to_nan_by_its_updates_is_a_divergence():
    steps = training(20, loss=lambda s: 2.3 * 50**s if s < 6 else nan, frames=thrown, scalars=lambda s: {"lr": 20.0})
    finding = the_finding(lr_divergence, steps)
    assert finding.step == 0
    assert finding.evidence["lr"] == 20.0
    assert finding.evidence["source"] == "train.py:12"
    assert ask(exploding_gradient, steps) == Clear()


def test_a_loss_that_climbs_step_by_step_is_a_divergence_even_if_no_update_was_observed():
    steps = training(60, loss=lambda s: 2.3 * 1.2**s, frames=lambda s: {Kind.UPDATE: {}})
    assert the_finding(lr_divergence, steps).step == 13


def test_the_error_of_growing_value_estimates_is_no_divergence():
    assert ask(lr_divergence, training(300, loss=lambda s: 0.01 + 0.5 * (1 - 0.99**s) + 0.005 * noise(s))) == Clear()


def test_a_step_that_throws_the_model_where_it_cannot_learn_is_a_divergence():
    steps = training(loss=lambda s: 2.3 if s == 0 else 2.4 + 0.01 * noise(s), frames=thrown)
    assert the_finding(lr_divergence, steps).severity == Severity.CRITICAL


def test_a_rough_start_that_learns_is_no_divergence():
    steps = training(loss=lambda s: 50.0 if 0 < s < 4 else falling(s), frames=thrown)
    assert ask(lr_divergence, steps) == Clear()


def test_a_nan_out_of_nowhere_is_no_divergence():
    steps = training(loss=lambda s: falling(s) if s < 50 else nan)
    assert ask(lr_divergence, steps) == Clear()
    assert ask(exploding_gradient, steps) == Clear()


def test_divergence_is_not_judged_without_updates():
    assert why_not(lr_divergence, training(scalars=lambda s: {"optimizer_steps": 0})) == "no optimizer stepped"


# -- dead units ------------------------------------------------------------------------------------------------------------


def dead_from(first_step, layer="net.2"):
    def frames(step):
        if step < first_step:
            return {}
        before = LAYERS[: LAYERS.index(layer) + 1]
        return {
            Kind.ACTIVATION: {path: row(mean=-10.0, max=-2.0) if path == layer else row() for path in LAYERS},
            Kind.ACTIVATION_GRADIENT: {
                path: row(l2=0.0, zeros=1000, min=0.0, max=0.0) if path in before else row(l2=0.1) for path in LAYERS
            },
        }

    return frames


def test_a_layer_whose_functional_relu_never_fires_is_found():
    finding = the_finding(dead_relu, training(loss=stuck, frames=dead_from(3)))
    assert finding.where == "net.2"
    assert finding.step == 3
    assert finding.evidence["zero_share"] == 1.0


def test_sparse_activations_in_a_model_that_learns_are_clear():
    def frames(step):
        some = {path: row(l2=0.001, zeros=995) for path in LAYERS[:2]}
        return dead_from(0)(step) | {Kind.ACTIVATION_GRADIENT: some | {path: row(l2=0.1) for path in LAYERS[2:]}}

    assert ask(dead_relu, training(loss=falling, frames=frames)) == Clear()
    assert the_finding(dead_relu, training(loss=stuck, frames=frames)).where == "net.2"


def test_a_layer_that_comes_back_is_clear():
    frames = dead_from(0)
    assert ask(dead_relu, training(loss=stuck, frames=lambda s: frames(s) if s < 80 else {})) == Clear()


def test_a_layer_with_no_gradient_for_another_reason_is_no_dead_relu():
    def frames(step):
        return {Kind.ACTIVATION_GRADIENT: {path: row(l2=0.0, zeros=1000) if path == "net.0" else row() for path in LAYERS}}

    assert ask(dead_relu, training(loss=stuck, frames=frames)) == Clear()


def test_a_model_that_a_dead_layer_cuts_off_is_found_although_its_last_bias_still_learns():
    steps = training(200, loss=lambda s: 2.3 - 0.002 * s, frames=dead_from(0))
    assert "no gradient at all" in the_finding(dead_relu, steps).cause


def test_a_layer_that_was_only_seen_dead_at_the_start_of_a_model_that_learns_is_clear():
    assert ask(dead_relu, training(loss=falling, frames=dead_from(0), observed=lambda s: s < 4)) == Clear()


def test_a_layer_that_is_merely_negative_on_average_is_no_dead_relu():
    def frames(step):
        return dead_from(0)(step) | {Kind.ACTIVATION: {path: row(mean=-0.1, max=1.0) for path in LAYERS}}

    assert ask(dead_relu, training(loss=stuck, frames=frames)) == Clear()


def test_dead_units_are_not_judged_without_outputs():
    assert "only 0 steps" in why_not(dead_relu, training(loss=stuck, frames=lambda s: {Kind.ACTIVATION: {}}))


# -- not finite ------------------------------------------------------------------------------------------------------------


def test_a_bad_input_before_a_bad_loss_is_found():
    events = {40: [bad("input", 40), bad("loss", 40)]}
    finding = the_finding(nan_input, training(loss=lambda s: falling(s) if s < 40 else nan, events=events))
    assert (finding.step, finding.where) == (40, "x")
    assert finding.evidence["num_nan"] == 3


def test_a_mask_of_infinities_that_does_no_harm_is_clear():
    events = {step: [bad("input", step, num_nan=0, num_inf=16)] for step in range(100)}
    assert ask(nan_input, training(events=events)) == Clear()


def test_a_bad_input_after_the_loss_went_bad_is_not_the_cause():
    events = {40: [bad("loss", 40)], 41: [bad("input", 41), bad("loss", 41)]}
    assert ask(nan_input, training(loss=lambda s: falling(s) if s < 40 else nan, events=events)) == Clear()


def test_a_bad_input_cannot_be_told_without_a_forward():
    assert "forward" in why_not(nan_input, training(scalars=lambda s: {"forwards": 0}))


def bad_from(step, **given):
    return training(loss=lambda s: falling(s) if s < step else inf, events={step: [bad("loss", step)]}, **given)


def test_a_loss_made_of_finite_outputs_blames_what_is_computed_from_them():
    finding = the_finding(nonfinite_loss, bad_from(45))
    assert finding.step == 45
    assert finding.severity == Severity.CRITICAL
    assert "the outputs of all layers were finite" in finding.cause


def test_nothing_is_said_of_all_layers_if_the_user_chose_some():
    started = Event("start", 0, dict.fromkeys(("name", "sonde", "python", "torch", "mode", "level"), "") | {
        "argv": [], "every": None, "overhead_budget": 0.02, "native_kernel": True, "threads": 1, "layers": ["head"],
    })  # fmt: skip
    finding = the_finding(nonfinite_loss, bad_from(45, start=[started, *opening()]))
    assert "the outputs of the layers that you chose were finite, so another layer made it" in finding.cause


def test_a_loss_made_of_bad_outputs_blames_the_first_layer_that_put_one_out():
    rows = {path: row(nan=12) if path in ("net.4", "head") else row() for path in LAYERS}
    finding = the_finding(nonfinite_loss, bad_from(45, frames=lambda s: {"activation": rows}))
    assert finding.where == "model.net.4"
    assert "the forward made it" in finding.cause


def test_where_the_outputs_of_the_bad_step_were_not_measured_nobody_is_blamed():
    assert "was not measured" in the_finding(nonfinite_loss, bad_from(40)).cause


def test_a_gradient_that_is_bad_before_the_loss_blames_the_backward():
    events = {0: [bad("gradient", 0, where="net.0.weight")], 1: [bad("output", 1), bad("loss", 1)]}
    finding = the_finding(nonfinite_loss, training(loss=lambda s: 2.3 if s == 0 else nan, events=events))
    assert (finding.step, finding.where) == (0, "net.0.weight")
    assert "so backward or what came after it made it" in finding.cause


def test_a_single_empty_batch_is_a_warning():
    finding = the_finding(nonfinite_loss, training(loss=lambda s: nan if s == 50 else falling(s), events={50: [bad("loss", 50)]}))
    assert finding.severity == Severity.WARNING


def test_steps_that_a_scaler_skips_are_clear():
    def scalars(step):
        return {"skipped_steps": 1, "optimizer_steps": 0} if step < 4 else {}

    events = {step: [bad("gradient", step), bad("loss", step)] for step in range(4)}
    steps = training(loss=lambda s: inf if s < 4 else falling(s), scalars=scalars, events=events)
    assert ask(nonfinite_loss, steps) == Clear()
    assert ask(lr_divergence, steps) == Clear()


def test_a_loss_is_not_judged_where_no_backward_ran():
    steps = training(loss=lambda s: nan, scalars=lambda s: {"backwards": 0})
    assert why_not(nonfinite_loss, steps) == "no backward was seen"


# -- plateau ---------------------------------------------------------------------------------------------------------------


def test_a_loss_that_stays_at_chance_is_found():
    finding = the_finding(loss_plateau, training(loss=stuck))
    assert finding.evidence["classes"] == 10
    assert "ln 10" in finding.cause


def test_a_loss_that_is_the_same_to_the_last_bit_is_found():
    assert "last bit" in the_finding(loss_plateau, training(loss=lambda s: 0.731)).cause


def test_updates_that_are_too_small_are_named():
    def frames(step):
        return {Kind.UPDATE: {path: row(l2=1e-6) for path in PARAMETER_IDS}, Kind.PARAMETER: parameter_rows(step)}

    assert "learning rate" in the_finding(loss_plateau, training(loss=stuck, frames=frames)).fix


@pytest.mark.parametrize(
    "loss",
    [
        falling,
        lambda s: 0.21 + 0.02 * noise(s),  # fine-tuning at a low loss, resuming at convergence
        lambda s: log(10) * (1 - s / 2000) + 0.02 * noise(s),  # slow, but it falls
        lambda s: 0.0,  # solved
    ],
)
def test_losses_away_from_chance_are_never_called_stuck(loss):
    answer = ask(loss_plateau, training(200, loss=loss))
    assert not isinstance(answer, list)


def test_a_model_that_no_gradient_reaches_is_found_wherever_its_loss_lies():
    def frames(step):
        return {Kind.GRADIENT: {path: row(l2=0.2 if path.startswith("head") else 0.0) for path in PARAMETER_IDS}}

    finding = the_finding(loss_plateau, training(loss=lambda s: 50 + noise(s), frames=frames))
    assert finding.where == "net"
    assert finding.evidence["parameters_without_gradient"] == 8


def test_parameters_that_the_program_changes_itself_are_reached_by_a_gradient():
    """It uses and clears their gradients before these are read, at the end of the step."""
    by_hand = opening(num_unowned=10, unowned=list(PARAMETER_IDS), optimizers=[])

    def steps(update):
        frames = {kind: {path: row(l2=l2) for path in PARAMETER_IDS} for kind, l2 in ((Kind.GRADIENT, 0.0), (Kind.UPDATE, update))}
        scalars = {"optimizer_steps": 0, "manual_updates": 1}
        return training(loss=lambda s: 50 + noise(s), frames=lambda step: frames, scalars=lambda step: scalars, start=by_hand)

    assert "nothing shows" in why_not(loss_plateau, steps(0.05))
    assert "no gradient reaches 10 of 10" in the_finding(loss_plateau, steps(0.0)).cause


def test_branches_that_start_with_zero_gradients_are_no_plateau():
    def frames(step):
        return {Kind.GRADIENT: {path: row(l2=0.2 if path.startswith("head") else 0.0) for path in PARAMETER_IDS}} if step == 0 else {}

    assert "nothing shows" in why_not(loss_plateau, training(loss=lambda s: 50 + noise(s), frames=frames))


def test_adversaries_are_not_judged_by_their_losses():
    second = Event("source", 0, {"call": "backward", "line": "gan.py:9", "text": "", "series": "loss:2"})
    assert "several" in why_not(loss_plateau, training(loss=lambda s: log(2), start=[*opening(), second]))


def test_a_negative_loss_is_not_judged_by_its_level():
    assert "not positive" in why_not(loss_plateau, training(loss=lambda s: -0.3 + noise(s)))


def test_a_short_run_is_not_judged_by_its_level():
    assert "fewer than" in why_not(loss_plateau, training(20, loss=stuck))

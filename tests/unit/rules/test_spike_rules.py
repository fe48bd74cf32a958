"""Spikes of the loss and of the gradient: when they are worth a word, and when they are a fault."""

from math import nan

import numpy as np
import pytest

from sonde.events import BATCH_FIELDS, Event, Frame, Kind, Severity, Site, Step
from sonde.rules._shared.spikes_in_run import SpikeHistory
from sonde.rules.calls.stale_optimizer_params import RULE as stale_optimizer_params
from sonde.rules.engine import evaluate, order_findings
from sonde.rules.gradients.gradient_spike import RULE as gradient_spike
from sonde.rules.loss.loss_spike import RULE as loss_spike
from sonde.rules.loss.lr_divergence import RULE as lr_divergence
from sonde.rules.nonfinite.nonfinite_loss import RULE as nonfinite_loss
from sonde.rules.rule import Clear
from synthetic_steps import SITES, ask, falling, noise, opening, the_finding, training, view_of, why_not, with_replaced_head

ITEM = {"samples": [7], "shares": [0.99], "indices": [1193], "batch_size": 32, "without": 0.3, "blame": "input",
        "odd": {"name": "x", "size": 900.0, "others": 0.5}, "source": "train.py:40", "text": "loss = f(model(x), y)",
        "layer": "", "gradients": [], "inputs": [], "caveats": []}  # fmt: skip


def spike(step, what="loss", value=900.0, usual=0.4, **given):
    where = "loss" if what == "loss" else "grad_norm"
    range_of = {"value": value, "usual": usual, "low": usual / 2, "high": 1.5 * usual, "bound": 10 * usual}
    return Event("spike", step, {"what": what, "where": where, **range_of, **ITEM, **given})


def leaping(*steps, height=900.0, to=falling):
    return lambda step: height if step in steps else to(step)


def unlooked(*steps):
    return training(200, loss=leaping(*steps))


def looked(*steps, loss=None, **given):
    return training(200, loss=loss or leaping(*steps), events={step: [spike(step, **given)] for step in steps[:3]})


def test_a_loss_that_only_falls_is_clear():
    assert ask(loss_spike, training(200)) == Clear()
    assert ask(gradient_spike, training(200)) == Clear()


def test_a_spike_when_parameters_are_replaced_blames_no_sample_and_stands_under_the_swap():
    steps = with_replaced_head(looked(82), at=80, known=90)
    finding = the_finding(loss_spike, steps)
    assert "parameters of the model were replaced around this step" in finding.cause
    assert "sample" not in finding.cause + finding.fix
    assert finding.evidence["blame"] == "replaced parameters"
    with view_of(steps) as view:
        rules = (stale_optimizer_params, loss_spike)
        found = [each for outcome in evaluate({0: view}, rules) for each in outcome.result]
    ordered = order_findings(found, {rule.name: rule.explains for rule in rules})
    assert [each.rule for each in ordered] == ["stale-optimizer-params", "loss-spike"]
    assert ordered[1].evidence["consequence_of"] == "stale-optimizer-params"
    assert "sample 7" in the_finding(loss_spike, with_replaced_head(looked(120), at=80, known=90)).cause


@pytest.mark.parametrize(
    ("is_after_update", "advice"),
    [
        (None, "clip gradients to a smaller norm than at train.py:22"),
        (False, "clip gradients to a smaller norm than at train.py:22"),
        (True, "move the clipping at train.py:22 between backward() and optimizer.step()"),
    ],
)
def test_who_clips_already_is_not_told_to_clip(is_after_update, advice):
    known = {} if is_after_update is None else {"is_after_update": is_after_update}  # older runs do not say
    clip = Event("source", 0, {"call": "clip", "line": "train.py:22", "text": "clip()", **known})
    steps = training(200, loss=leaping(120), events={120: [spike(120)]}, start=[*opening(), clip])
    assert advice in the_finding(loss_spike, steps).fix
    assert "torch.nn.utils.clip_grad_norm_" in the_finding(loss_spike, looked(120)).fix


def test_too_few_steps_are_not_evaluated():
    assert "too few" in why_not(loss_spike, training(20))
    assert "no loss" in why_not(loss_spike, training(40, loss=lambda step: nan, scalars=lambda step: {"backwards": 0}))
    assert "no gradients" in why_not(gradient_spike, training(40, scalars=lambda step: {"grad_norm": nan}))


def test_a_spike_that_passes_is_worth_a_word_and_no_more():
    finding = the_finding(loss_spike, looked(120))
    assert finding.severity is Severity.INFO
    assert finding.step == 120
    assert "sample 7 of the batch (item 1193 of the dataset) makes up 99 % of the excess" in finding.cause
    assert "without it the loss is 0.3" in finding.cause
    assert "the loss came back" in finding.cause
    assert finding.evidence["source"] == "train.py:40"


def test_it_is_found_from_the_scalars_alone_where_nobody_looked_back():
    finding = the_finding(loss_spike, unlooked(120))
    assert finding.severity is Severity.INFO
    assert finding.evidence["num_leaps"] == 1


def test_data_that_makes_it_again_and_again_is_a_warning():
    finding = the_finding(loss_spike, looked(60, 100, 140, 180))
    assert finding.severity is Severity.WARNING
    assert "it happens 4 times in this run" in finding.cause
    assert finding.evidence["steps"] == "60, 100, 140, 180"


def test_how_many_spikes_could_be_analyzed_in_time_does_not_decide():
    """On a busy machine the search of the first spike may not have ended when the next one comes."""
    answers = {"data": {}, "batch": {"samples": [], "blame": "batch"}, "none": {"samples": None, "shares": [], "blame": ""}}

    def severity(*given):
        events = {step: [spike(step, **answers[answer])] for step, answer in zip((60, 100, 140), given)}
        return the_finding(loss_spike, training(200, loss=leaping(60, 100, 140, 180), events=events)).severity

    assert severity("data", "none", "none") == severity("none", "data", "none") == severity("data", "data", "batch") == Severity.WARNING
    assert severity("data", "batch", "none") == severity("none", "none", "none") == severity("data", "batch", "batch") == Severity.INFO


def test_batches_in_other_units_are_a_warning_however_many_of_them_could_be_analyzed():
    """Their spikes need not be extreme; the inputs of a batch are known if its step was run again."""
    odd = {"samples": [], "blame": "batch", "inputs": [{"name": "x", "low": -900.0, "high": 900.0}]}
    unanswered = {"samples": None, "shares": [], "blame": ""}

    def severity(*given):
        events = {step: [spike(step, value=6.0, **answer)] for step, answer in zip((60, 100, 140), given)}
        return the_finding(loss_spike, with_usual_inputs(training(200, loss=leaping(60, 100, 140, height=6.0), events=events))).severity

    assert severity(odd, unanswered, unanswered) == severity(odd, odd, odd) == Severity.WARNING
    assert severity(odd, {"samples": [], "blame": "batch"}, unanswered) == Severity.INFO


def test_spikes_that_no_sample_explains_stay_a_word():
    assert the_finding(loss_spike, looked(60, 100, 140, 180, samples=[], blame="batch")).severity is Severity.INFO
    assert the_finding(loss_spike, unlooked(60, 100, 140, 180)).severity is Severity.INFO


def test_heavy_tails_that_samples_carry_stay_a_word():
    steps = looked(60, 100, 140, 180, loss=leaping(60, 100, 140, 180, height=6.0), value=6.0, blame="target", odd=None)
    assert the_finding(loss_spike, steps).severity is Severity.INFO


def test_a_training_that_never_comes_back_from_a_sample_is_an_error_and_names_it():
    steps = looked(120, loss=lambda step: falling(step) if step < 120 else 900.0 if step == 120 else 1.9 + 0.1 * noise(step))
    finding = the_finding(loss_spike, steps)
    assert finding.severity is Severity.ERROR
    assert "has not come back" in finding.cause


def test_a_level_that_changes_with_the_task_stays_a_word():
    loss = lambda step: falling(step) if step < 120 else 1.5 + 0.1 * noise(step)  # noqa: E731
    assert the_finding(loss_spike, looked(120, loss=loss, samples=[], blame="batch", value=1.5)).severity is Severity.INFO


def test_what_one_sample_undid_is_told_as_its_consequence():
    steps = looked(120, loss=lambda step: falling(step) if step < 120 else 900.0 if step == 120 else 5e4 if step < 124 else nan)
    rules = (nonfinite_loss, lr_divergence, gradient_spike, loss_spike)
    with view_of(steps) as view:
        found = [finding for outcome in evaluate({0: view}, rules) if isinstance(outcome.result, list) for finding in outcome.result]
    first, *rest = order_findings(found, {rule.name: rule.explains for rule in rules})
    assert (first.rule, first.severity) == ("loss-spike", Severity.CRITICAL)
    follow = [finding.evidence.get("consequence_of") for finding in rest if finding.rule in ("nonfinite-loss", "lr-divergence")]
    assert follow == ["loss-spike"] * 2


def test_a_training_that_diverges_by_itself_is_not_blamed_on_its_samples():
    climbing = training(200, loss=lambda step: falling(step) if step < 80 else 0.2 * 1.3 ** (step - 80))
    assert ask(loss_spike, climbing) == Clear()
    leaping_away = looked(80, loss=lambda step: falling(step) if step < 80 else 30.0 * 3.0 ** min(step - 80, 50), samples=[], blame="batch")
    assert the_finding(loss_spike, leaping_away).severity is Severity.INFO


def test_many_samples_of_a_batch_are_not_taken_for_bad_data():
    steps = looked(60, 100, 140, 180, samples=list(range(12)), shares=[0.08] * 12, blame="layer", without=0.4)
    assert the_finding(loss_spike, steps).severity is Severity.INFO


def with_usual_inputs(steps):
    """The same with batches of numbers between -1 and 1."""
    row = {"num": 64.0, "min": -1.0, "max": 1.0}
    usual = Frame(Kind.BATCH, 0, np.array([900], dtype=np.uint32), BATCH_FIELDS, np.array([[row.get(name, 0.0)] for name in BATCH_FIELDS]))
    sites = {**SITES, 900: Site(900, "input", "0")}
    return [Step(one.number, 0, one.scalars, {**one.frames, Kind.BATCH: usual}, one.events, sites) for one in steps]


def test_a_batch_in_other_units_is_told_by_its_inputs():
    seen = {"name": "x", "low": -900.0, "high": 800.0}
    finding = the_finding(loss_spike, with_usual_inputs(looked(60, 100, 140, 180, samples=[], blame="batch", inputs=[seen])))
    assert finding.severity is Severity.WARNING
    assert "900 times as large" in finding.cause


def test_a_learning_rate_that_leapt_is_named():
    steps = training(200, loss=leaping(120), scalars=lambda step: {"lr": 1e-3 if step < 120 else 0.1})
    assert "the learning rate is 0.1, after 0.001 before" in the_finding(loss_spike, steps).cause


def test_a_new_optimizer_begins_anew():
    later = {120: [Event("optimizer", 120, {"optimizer": 1, "class": "SGD"})]}
    loss = lambda step: falling(step) if step < 120 else 4.0  # noqa: E731
    assert ask(loss_spike, training(200, loss=loss, events=later)) == Clear()


def test_a_gradient_that_leaps_without_the_loss_is_named_with_its_layer():
    norms = lambda step: {"grad_norm": 5e4 if step in (60, 100, 140) else 0.6 + 0.1 * noise(step)}  # noqa: E731
    looks = {step: [spike(step, "gradient", 5e4, 0.6, layer="net.2", without=0.7)] for step in (60, 100, 140)}
    finding = the_finding(gradient_spike, training(200, scalars=norms, events=looks))
    assert (finding.severity, finding.where) == (Severity.WARNING, "net.2")
    assert "most of it in net.2" in finding.cause
    assert "without it the gradient norm is 0.7" in finding.cause


def test_the_layer_that_left_its_own_history_is_named_where_no_sample_is():
    norms = lambda step: {"grad_norm": 400.0 if step == 120 else 0.6 + 0.1 * noise(step)}  # noqa: E731
    gradients = [["head.weight", 300.0], ["net.4.weight", 260.0]]
    event = spike(120, "gradient", 400.0, 0.6, samples=[], blame="batch", layer="head", gradients=gradients)
    known = {f"model.{name}": norm for name, norm in gradients}
    event.data["gradients"] = list(known.items())
    finding = the_finding(gradient_spike, training(200, scalars=norms, events={120: [event]}, start=opening()))
    assert finding.where in ("model.head", "model.net.4")


def test_a_gradient_that_leaps_with_the_loss_is_left_to_the_loss():
    steps = training(200, loss=leaping(120), scalars=lambda step: {"grad_norm": 5e4 if step == 120 else 0.6})
    assert ask(gradient_spike, steps) == Clear()


def test_steps_that_a_scaler_skipped_are_no_spikes():
    steps = training(200, loss=leaping(120), scalars=lambda step: {"skipped_steps": float(step == 120)})
    assert ask(loss_spike, steps) == Clear()


@pytest.mark.parametrize("rule", [loss_spike, gradient_spike])
def test_events_with_missing_fields_are_read_all_the_same(rule):
    events = {120: [Event("spike", 120, {"what": rule.name.removesuffix("-spike")})]}
    assert ask(rule, training(200, events=events)) == Clear()


def test_the_bound_of_the_loss_is_that_before_the_step_of_the_spike():
    """A loss that stays where the spike of the gradient left it has not come back, although the bound follows it."""
    loss = lambda step: falling(step) if step < 120 else 0.5 + 0.3 * (step - 120) + 0.05 * noise(step)  # noqa: E731
    steps = training(200, loss=loss, scalars=lambda step: {"grad_norm": 5e4 if step == 120 else 0.6 + 0.1 * noise(step)})
    with view_of(steps) as view:
        (spike,) = SpikeHistory.of(view, "gradient").spikes
    assert spike.num_after == 79
    assert spike.num_back < 10

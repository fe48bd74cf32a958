"""A GradScaler that skips: how it works, and when it collapses."""


from sonde.events import Event, Severity
from sonde.rules.loss.loss_scale_collapse import RULE as loss_scale_collapse
from sonde.rules.rule import Clear
from synthetic_steps import ask, the_finding, training, why_not

ORIGIN = {"kind": "nan", "phase": "backward", "operation": "sqrt", "module": "head", "source": "train.py:31", "text": "d = x.sqrt()",
          "cause": "the slope of sqrt at 0 is infinite", "fix": "add an epsilon inside", "key": "sqrt-at-zero"}  # fmt: skip


def scaled(scale, skipped, *, num=100, events=None):
    def scalars(step):
        return {"loss_scale": scale(step), "skipped_steps": float(skipped(step)), "optimizer_steps": float(not skipped(step))}

    return training(num, scalars=scalars, events=events)


def overflow(step, by="number", **given):
    return {step: [Event("overflow", step, {"where": "head.weight", "scale": 64.0, "by": by, "origin": ORIGIN, "reason": "", **given})]}


def test_without_a_scaler_nothing_can_collapse():
    assert ask(loss_scale_collapse, training(50)) == Clear()
    assert "no backward" in why_not(loss_scale_collapse, training(50, scalars=lambda step: {"backwards": 0}))


def test_the_search_for_a_level_is_how_it_works():
    assert ask(loss_scale_collapse, scaled(lambda step: 2.0 ** max(16, 40 - step), lambda step: step < 24)) == Clear()


def test_a_step_skipped_now_and_then_is_how_it_works():
    assert ask(loss_scale_collapse, scaled(lambda step: 65536.0 / (1 + step % 2), lambda step: step % 10 == 0)) == Clear()


def test_a_scale_below_one_is_a_collapse():
    steps = scaled(lambda step: 2.0 ** (16 - min(step, 20)), lambda step: step < 20)
    finding = the_finding(loss_scale_collapse, steps)
    assert finding.severity is Severity.ERROR
    assert "skipped 20 of 100 steps and the scale fell from 65536 to 0.125" in finding.cause


def test_a_scaler_that_skips_to_the_end_trains_nothing():
    finding = the_finding(loss_scale_collapse, scaled(lambda step: 2.0 ** (16 - step), lambda step: True))
    assert finding.severity is Severity.CRITICAL


def test_a_scale_that_was_set_low_and_skips_once_is_no_collapse():
    assert ask(loss_scale_collapse, scaled(lambda step: 0.5, lambda step: step == 4)) == Clear()


def test_a_number_that_no_scale_can_help_is_known_after_a_few_steps_and_named():
    steps = scaled(lambda step: 2.0 ** (16 - step), lambda step: True, num=12, events=overflow(5))
    finding = the_finding(loss_scale_collapse, steps)
    assert (finding.severity, finding.where, finding.step) == (Severity.CRITICAL, "head", 7)
    assert "the backward of sqrt at train.py:31 makes the NaN" in finding.cause
    assert "no scale can help" in finding.cause
    assert finding.fix == "add an epsilon inside"
    assert finding.evidence["source"] == "train.py:31"


def test_a_scale_that_falls_far_from_where_it_had_settled_is_a_collapse():
    def scale(step):
        return 65536.0 if step < 60 else 2.0 ** (16 - min(step - 60, 12))

    finding = the_finding(loss_scale_collapse, scaled(scale, lambda step: 60 <= step < 72, events=overflow(65, by="scale", origin=None)))
    assert "the gradient of head.weight is the first that is not finite" in finding.cause
    assert "float32" in finding.fix


def test_an_event_with_missing_fields_is_read_all_the_same():
    events = {3: [Event("overflow", 3, {})]}
    the_finding(loss_scale_collapse, scaled(lambda step: 2.0 ** (16 - step), lambda step: True, events=events))

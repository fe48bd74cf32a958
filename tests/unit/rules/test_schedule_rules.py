"""The rules about schedules: too often, too rarely, never, before the optimizer, and a warm-up that does not end."""

from __future__ import annotations

import math

import pytest

from schedule_steps import EPOCH, LINE, begins, made, passes, run
from sonde.events import Event, Severity
from sonde.rules.rule import Clear
from sonde.rules.schedule.lr_stuck_in_warmup import RULE as lr_stuck_in_warmup
from sonde.rules.schedule.scheduler_before_optimizer import RULE as scheduler_before_optimizer
from sonde.rules.schedule.scheduler_never_stepped import RULE as scheduler_never_stepped
from sonde.rules.schedule.scheduler_too_often import RULE as scheduler_too_often
from sonde.rules.schedule.scheduler_too_rarely import RULE as scheduler_too_rarely
from synthetic_steps import ask, opening, stuck, the_finding, training, why_not

# -- too often -------------------------------------------------------------------------------------


def test_a_rate_that_is_gone_in_the_first_epoch_is_found_with_the_line_that_steps():
    step_lr = made(plan={"step_size": 3, "gamma": 0.1})
    finding = the_finding(scheduler_too_often, run(scheduler=step_lr, rate=lambda s: 0.1 * 0.1 ** (s // 3), loss=stuck))
    assert finding.severity == Severity.CRITICAL
    assert finding.step == 9
    assert finding.evidence["source"] == "train.py:25"
    assert "StepLR(step_size=3, gamma=0.1)" in finding.cause
    assert "epoch 1 of 10" in finding.cause


def test_a_rate_that_is_gone_early_is_an_error_even_where_something_was_learnt():
    assert the_finding(scheduler_too_often, run(scheduler=made(), rate=lambda s: 0.1 * 0.7**s)).severity == Severity.ERROR


def test_milestones_that_all_lie_in_the_first_epoch_are_found():
    multi = made("MultiStepLR", plan={"milestones": [8, 12], "gamma": 0.1})
    finding = the_finding(scheduler_too_often, run(scheduler=multi, rate=lambda s: 0.1 * 0.1 ** ((s > 8) + (s > 12))))
    assert "first of 10 epochs" in finding.cause


def test_a_cosine_over_the_number_of_epochs_that_swings_with_the_batches_is_found():
    cosine = made("CosineAnnealingLR", plan={"T_max": 10})
    swinging = run(scheduler=cosine, planned=10, rate=lambda s: 0.05 + 0.05 * math.cos(math.pi * s / 10))
    assert the_finding(scheduler_too_often, swinging).severity == Severity.WARNING


def test_a_cosine_that_swings_and_is_not_the_number_of_epochs_may_be_meant():
    cosine = made("CosineAnnealingLR", plan={"T_max": 7})
    assert ask(scheduler_too_often, run(scheduler=cosine, planned=10, rate=lambda s: 0.05 + 0.05 * math.cos(math.pi * s / 7))) == Clear()


@pytest.mark.parametrize(
    "rate",
    [
        pytest.param(lambda s: 0.05 + 0.05 * math.cos(math.pi * s / 200), id="cosine to zero"),
        pytest.param(lambda s: 0.1 * 0.97**s, id="exponential to a five hundredth"),
        pytest.param(lambda s: 0.1 * (1 - s / 200) ** 2, id="polynomial"),
        pytest.param(lambda s: 0.1 * 0.1 ** ((s > 100) + (s > 150) + (s > 180)), id="late milestones"),
        pytest.param(lambda s: 0.05 + 0.05 * math.cos(math.pi * (s % 50) / 50), id="restarts"),
        pytest.param(lambda s: 0.1 * min(1, s / 100), id="warm-up"),
    ],
)
def test_schedules_that_are_meant_to_move_with_every_update_are_clear(rate):
    assert ask(scheduler_too_often, run(scheduler=made(), rate=rate)) == Clear()


def test_milestones_at_which_the_rate_grows_are_a_warm_up():
    multi = made("MultiStepLR", plan={"milestones": [8, 12], "gamma": 2.0})
    assert ask(scheduler_too_often, run(scheduler=multi, rate=lambda s: 0.01 * 2 ** ((s > 8) + (s > 12)))) == Clear()


@pytest.mark.parametrize("epochs", [True, False], ids=["with_epochs", "without"])
def test_a_rate_that_is_small_for_most_of_the_run_may_be_meant_where_the_loss_goes_on_falling(epochs):
    def small(s):
        return 0.1 * 0.89**s  # gone in the third epoch

    assert ask(scheduler_too_often, run(scheduler=made(), rate=small, epochs=epochs, loss=lambda s: 3.3 - s / 100)) == Clear()
    assert the_finding(scheduler_too_often, run(scheduler=made(), rate=small, epochs=epochs, loss=stuck)).severity == Severity.CRITICAL


def test_what_had_learnt_nearly_all_before_its_rate_was_gone_may_be_meant_where_no_epoch_is_known():
    steps = run(scheduler=made(), rate=lambda s: 0.1 * 0.89**s, epochs=False, loss=lambda s: 2.3 if s < 30 else 0.2)
    assert ask(scheduler_too_often, steps) == Clear()


def test_where_an_epoch_is_one_update_every_update_is_an_epoch():
    each = {s: [Event("pass", s, {"loader": 0, "num": s + 1, "num_batches": 1})] for s in range(200)}
    steps = training(200, loss=stuck, start=[*opening(), made(), LINE, begins()], events=each,
                     scalars=lambda s: {"lr": 0.1 * 0.7**s, "scheduler_steps": float(s > 0)})  # fmt: skip
    assert ask(scheduler_too_often, steps) == Clear()


def test_a_plateau_scheduler_whose_epochs_are_not_known_may_have_waited_for_what_it_saw():
    plateau = made("ReduceLROnPlateau", plan={"patience": 5})
    steps = run(300, scheduler=plateau, epochs=False, rate=lambda s: 0.1 * 0.5 ** (s // 10), loss=stuck)
    assert ask(scheduler_too_often, steps) == Clear()


def test_a_schedule_in_epochs_is_clear():
    assert ask(scheduler_too_often, run(scheduler=made(), every=EPOCH, rate=lambda s: 0.1 * 0.1 ** (s // EPOCH))) == Clear()


def test_too_often_cannot_be_told_after_a_few_updates():
    assert "only 30 updates" in why_not(scheduler_too_often, run(30, scheduler=made()))


# -- too rarely ------------------------------------------------------------------------------------


def one_cycle(total):
    return made("OneCycleLR", plan={"total_steps": total}, rates=[0.004], initial=[0.004])


def test_a_plan_over_all_updates_that_is_stepped_per_epoch_is_found():
    finding = the_finding(scheduler_too_rarely, run(scheduler=one_cycle(200), every=EPOCH, rate=lambda s: 0.004 + 1e-5 * (s // EPOCH)))
    assert finding.severity == Severity.ERROR
    assert finding.evidence["total"] == 200
    assert "stepped 9 times in 200 updates" in finding.cause


def test_it_is_found_before_the_end_where_the_loop_says_how_many_epochs_it_is_to_have():
    steps = run(100, scheduler=one_cycle(200), every=EPOCH, planned=10, rate=lambda s: 0.004, ended=False)
    assert the_finding(scheduler_too_rarely, steps).evidence["updates"] == 100


def test_a_plan_in_epochs_that_is_stopped_early_is_clear():
    cosine = made("CosineAnnealingLR", plan={"T_max": 100})
    assert ask(scheduler_too_rarely, run(100, scheduler=cosine, every=EPOCH, planned=100)) == Clear()
    assert ask(scheduler_too_rarely, run(60, scheduler=cosine, every=EPOCH)) == Clear()


def test_a_plan_in_updates_that_keeps_pace_and_is_stopped_early_is_clear():
    assert ask(scheduler_too_rarely, run(100, scheduler=one_cycle(500), planned=25)) == Clear()


def test_short_stages_with_a_schedule_each_before_a_long_one_are_clear():
    """Each keeps pace with its own updates; on average they have a fifth of those of the last."""
    stages = [event for i in range(1, 6) for event in (made("OneCycleLR", i, plan={"total_steps": 20}), begins(index=i))]
    steps = run(200, scheduler=one_cycle(200), planned=10, more=stages)
    assert ask(scheduler_too_rarely, steps) == Clear()


def test_while_no_loop_says_how_long_a_run_is_to_be_no_plan_is_as_long_as_it_is_now():
    assert ask(scheduler_too_rarely, run(scheduler=one_cycle(200), every=EPOCH, ended=False)) == Clear()


@pytest.mark.parametrize("total", [200, 191, 201], ids=["all", "without_the_last_batches", "one_more"])
def test_at_its_end_a_run_has_the_updates_of_its_plan_up_to_one_in_each_epoch(total):
    assert the_finding(scheduler_too_rarely, run(scheduler=one_cycle(total), every=EPOCH)).evidence["total"] == total
    assert ask(scheduler_too_rarely, run(scheduler=one_cycle(total - 4), every=EPOCH)) == Clear()


def test_a_plan_in_epochs_that_is_left_in_the_second_epoch_is_clear_whatever_its_number_of_updates():
    cosine = made("CosineAnnealingLR", plan={"T_max": 100})
    steps = run(100, scheduler=cosine, every=40, epochs=False, more=[event for each in passes(2, 100, 50).values() for event in each])
    assert ask(scheduler_too_rarely, steps) == Clear()


def test_a_scheduler_that_makes_half_of_its_steps_is_clear():
    assert ask(scheduler_too_rarely, run(scheduler=one_cycle(200), every=2)) == Clear()


def test_after_one_step_of_a_scheduler_its_unit_cannot_be_told():
    assert "1 steps of a scheduler" in why_not(scheduler_too_rarely, run(60, scheduler=one_cycle(60), every=40))


def test_a_plan_that_is_followed_is_clear():
    assert ask(scheduler_too_rarely, run(scheduler=one_cycle(200))) == Clear()


def test_a_plan_over_all_batches_that_is_stepped_with_the_updates_is_found_where_gradients_are_accumulated():
    steps = [_scaled(step, backwards=4.0) for step in run(scheduler=one_cycle(800))]
    finding = the_finding(scheduler_too_rarely, steps)
    assert "one per batch" in finding.cause
    assert "divide" in finding.fix
    assert ask(scheduler_too_rarely, [_scaled(step, backwards=4.0) for step in run(scheduler=one_cycle(800), ended=False)]) == Clear()


def _scaled(step, **scalars):
    return type(step)(step.number, step.rank, {**step.scalars, **scalars}, step.frames, step.events, step.sites)


def test_parts_of_a_sequence_make_one_plan():
    start = [
        made("LinearLR", 0, plan={"total_iters": 20}), made("CosineAnnealingLR", 1, plan={"T_max": 180}),
        made("SequentialLR", 2, parts=[0, 1], plan={"milestones": [20]}),
    ]  # fmt: skip
    steps = run(scheduler=start[0], more=start[1:], every=EPOCH, first=begins(EPOCH, index=2))
    assert the_finding(scheduler_too_rarely, steps).evidence["total"] == 200


# -- a warm-up that does not end -------------------------------------------------------------------


def test_a_warm_up_that_is_never_stepped_is_found_with_the_line_that_made_it():
    warm = made("LinearLR", rates=[1e-5], plan={"total_iters": 100, "start_factor": 1e-4})
    finding = the_finding(lr_stuck_in_warmup, run(scheduler=warm, every=0, rate=lambda s: 1e-5, loss=stuck))
    assert finding.severity == Severity.CRITICAL
    assert finding.evidence["source"] == "train.py:13"
    assert finding.evidence["meant_rate"] == 0.1


def test_a_warm_up_over_updates_that_is_stepped_per_epoch_is_found():
    warm = made("LambdaLR", rates=[2e-4])
    finding = the_finding(lr_stuck_in_warmup, run(scheduler=warm, every=EPOCH, rate=lambda s: 2e-4 * (1 + s // EPOCH)))
    assert finding.cause.startswith("LambdaLR begins with a warm-up")
    assert "stepped 9 times in 200 updates" in finding.cause


def test_a_warm_up_that_is_known_from_the_optimizer_alone_is_found():
    optimizer = Event("optimizer", 0, {"optimizer": 0, "class": "Adam", "groups": [{"lr": 1e-5, "initial_lr": 0.1}]})
    steps = training(200, start=[optimizer], events=passes(10), scalars=lambda s: {"lr": 1e-5})
    assert the_finding(lr_stuck_in_warmup, steps).evidence["rate"] == 1e-5


def test_a_warm_up_that_goes_on_with_every_update_is_clear_however_long_it_is():
    assert ask(lr_stuck_in_warmup, run(scheduler=made(rates=[1e-5]), rate=lambda s: 1e-5 * (s + 1))) == Clear()


def test_a_warm_up_of_some_epochs_is_clear_once_it_is_on_its_way():
    steps = run(scheduler=made(rates=[1e-3]), every=EPOCH, rate=lambda s: min(0.1, 1e-3 + 0.02 * (s // EPOCH)))
    assert ask(lr_stuck_in_warmup, steps) == Clear()


def test_a_warm_up_of_many_epochs_is_clear_where_it_will_come_to_its_end():
    steps = run(scheduler=made(rates=[1e-3]), every=EPOCH, rate=lambda s: 1e-3 * (1 + s // EPOCH))
    assert ask(lr_stuck_in_warmup, steps) == Clear()


def test_a_small_rate_that_becomes_smaller_is_no_warm_up():
    assert ask(lr_stuck_in_warmup, run(scheduler=made(rates=[1e-3]), every=0, rate=lambda s: 1e-3 * 0.99**s)) == Clear()


def test_after_a_few_updates_neither_warm_up_nor_schedule_is_missed():
    assert "only 30 updates" in why_not(lr_stuck_in_warmup, run(30, scheduler=made(rates=[1e-5]), every=0, rate=lambda s: 1e-5))
    assert "only 30 updates" in why_not(scheduler_never_stepped, run(30, scheduler=made(), every=0))


def test_in_the_first_epoch_a_warm_up_cannot_be_called_stuck():
    warm = made(rates=[1e-5])
    first = Event("pass", 0, {"loader": 0, "num": 1, "num_batches": 5000})
    assert "first epoch" in why_not(lr_stuck_in_warmup, run(scheduler=warm, every=0, epochs=False, rate=lambda s: 1e-5, more=[first]))


def test_a_small_rate_without_a_schedule_is_no_warm_up():
    assert ask(lr_stuck_in_warmup, training(200, scalars=lambda s: {"lr": 1e-6})) == Clear()


# -- never -----------------------------------------------------------------------------------------


def test_a_scheduler_that_is_never_stepped_is_found_after_some_epochs():
    finding = the_finding(scheduler_never_stepped, run(scheduler=made(), every=0, ended=False))
    assert finding.severity == Severity.WARNING
    assert finding.evidence["source"] == "train.py:13"


def test_a_scheduler_that_is_never_stepped_is_found_at_the_end_of_a_run_without_a_loader():
    assert the_finding(scheduler_never_stepped, run(scheduler=made(), every=0, epochs=False)).evidence["updates"] == 200
    assert "first epoch" in why_not(scheduler_never_stepped, run(scheduler=made(), every=0, epochs=False, ended=False))


def test_a_warm_up_that_is_never_stepped_is_told_of_once():
    assert ask(scheduler_never_stepped, run(scheduler=made("LinearLR", rates=[1e-5]), every=0, rate=lambda s: 1e-5)) == Clear()


def test_a_part_of_a_sequence_is_stepped_by_the_whole():
    start = [made("LinearLR", 0), made("SequentialLR", 1, parts=[0])]
    assert ask(scheduler_never_stepped, run(scheduler=start[0], more=start[1:], first=begins(index=1))) == Clear()


def test_a_second_scheduler_of_the_same_optimizer_may_be_for_later():
    assert ask(scheduler_never_stepped, run(scheduler=made(), more=[made("SWALR", 1)])) == Clear()


def test_the_scheduler_of_an_optimizer_that_does_not_train_yet_is_not_judged():
    second = Event("optimizer", 0, {"optimizer": 1, "class": "Adam", "groups": [{"lr": 0.1}]})
    later = made("LinearLR", 0, optimizer=1, rates=[1e-6])
    for rule in (scheduler_never_stepped, lr_stuck_in_warmup):
        assert ask(rule, run(scheduler=later, every=0, more=[second], rate=lambda s: 1e-4)) == Clear()


def test_a_scheduler_that_steps_by_itself_is_not_judged():
    assert "not counted" in why_not(scheduler_never_stepped, run(scheduler=made("Mine", heard=False), every=0))


def test_a_rate_that_moves_without_a_scheduler_that_is_heard_is_not_judged():
    assert "changes" in why_not(scheduler_never_stepped, run(scheduler=made(), every=0, rate=lambda s: 0.1 / (s + 1)))


def test_without_a_scheduler_all_is_clear():
    for rule in (scheduler_never_stepped, scheduler_before_optimizer, scheduler_too_often, scheduler_too_rarely, lr_stuck_in_warmup):
        assert ask(rule, training()) == Clear()


# -- before the optimizer --------------------------------------------------------------------------


def test_a_scheduler_that_steps_first_is_found_with_the_value_that_it_skips():
    early = run(scheduler=made("ExponentialLR", plan={"gamma": 0.5}), every=EPOCH, first=begins(before_optimizer=True),
                rate=lambda s: 0.05 * 0.5 ** (s // EPOCH))  # fmt: skip
    finding = the_finding(scheduler_before_optimizer, early)
    assert finding.severity == Severity.WARNING
    assert finding.evidence["skipped_rate"] == 0.1
    assert finding.evidence["first_rate"] == 0.05
    assert "one epoch too early" in finding.cause


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"given": True}, id="told where it is"),
        pytest.param({"last_epoch": 8}, id="with loaded state"),
        pytest.param({"before_optimizer": False}, id="in the right order"),
    ],
)
def test_these_skip_nothing(given):
    first = begins(**({"before_optimizer": True} | given))
    assert ask(scheduler_before_optimizer, run(scheduler=made(), every=EPOCH, first=first)) == Clear()


def test_a_plateau_scheduler_has_no_first_value_to_skip():
    steps = run(scheduler=made("ReduceLROnPlateau"), every=EPOCH, first=begins(before_optimizer=True))
    assert ask(scheduler_before_optimizer, steps) == Clear()


def test_one_step_before_the_optimizer_may_be_part_of_setting_it_up():
    steps = run(scheduler=made(), every=150, first=begins(before_optimizer=True))
    assert "only once" in why_not(scheduler_before_optimizer, steps)


def test_a_schedule_that_is_brought_forward_by_another_line_is_clear():
    other = Event("source", 0, {"call": "scheduler_step", "line": "train.py:14", "text": "scheduler.step()"})
    steps = run(scheduler=made(), every=EPOCH, first=begins(before_optimizer=True), more=[other])
    assert ask(scheduler_before_optimizer, steps) == Clear()


def test_a_scheduler_that_counts_batches_of_which_several_make_an_update_is_clear():
    steps = run(scheduler=made(), first=begins(before_optimizer=True))
    assert ask(scheduler_before_optimizer, [_scaled(step, scheduler_steps=4.0) for step in steps]) == Clear()


def test_to_skip_a_first_rate_of_zero_is_only_mentioned():
    warm = made("LambdaLR", rates=[0.0])
    steps = run(scheduler=warm, first=begins(before_optimizer=True), rate=lambda s: 1e-3 * (s + 1))
    assert the_finding(scheduler_before_optimizer, steps).severity == Severity.INFO

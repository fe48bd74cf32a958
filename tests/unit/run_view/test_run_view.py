"""RunView: steps as columns, events with their rows, views that grow, and logs that nobody's training wrote."""

from __future__ import annotations

import tracemalloc
from math import inf, isnan, nan

import numpy as np
import pytest
from handmade_logs import SCALARS, HandmadeLog

from sonde.events import (
    BatchInspected,
    CallSiteFound,
    FatalSignalReceived,
    Kind,
    NonFinite,
    OriginFound,
    OriginUnknown,
    Site,
    TextLogged,
)
from sonde.run_view import newest_views, run_view, step_columns
from sonde.runlog import record_format as f
from sonde.runlog.fatal_signal_file import dump_path


@pytest.fixture
def log(tmp_path):
    return HandmadeLog(tmp_path)


def texts(located):
    """Rows and texts of logged texts."""
    return [(row, event.text) for row, event in located]


# ---- steps


def test_scalars_are_columns_with_nan_where_a_step_has_none(log):
    log.step(0, {"loss": 2.0, "backwards": 1})
    log.step(1, {"loss": 1.0})
    log.step(2, {"backwards": 3, "loss": 0.5})
    view = log.view()
    assert view.step_numbers.tolist() == [0, 1, 2]
    assert view.steps["loss"].tolist() == [2.0, 1.0, 0.5]
    assert np.array_equal(view.steps["backwards"], [1.0, nan, 3.0], equal_nan=True)
    assert view.counts("backwards").tolist() == [1, 0, 3]
    assert list(view.steps) == ["loss", "backwards"]
    assert ("loss" in view.steps, "lr" in view.steps) == (True, False)
    assert view.steps.is_present("backwards").tolist() == [True, False, True]
    assert all(isnan(value) for value in view.steps["lr"])


def test_counts_of_a_damaged_log_stay_integers(log):
    for number, value in enumerate((1.0, nan, inf, -inf, 1e300)):
        log.step(number, {"backwards": value})
    counts = log.view().counts("backwards")
    assert counts[:4].tolist() == [1, 0, 0, 0]
    assert counts[4] > 0
    assert counts.sum() > 0


def test_columns_cannot_be_written(log):
    log.step(0)
    log.step(1, {"lr": 0.1})
    view = log.view()
    for name in ("loss", "lr"):
        with pytest.raises(ValueError, match="read-only"):
            view.steps[name][0] = 5.0


def test_of_a_repeated_step_number_the_first_row_counts(log):
    for number, loss in ((0, 1.0), (1, 2.0), (1, 3.0), (0, 4.0), (2, 5.0)):
        log.step(number, {"loss": loss})
    view = log.view()
    assert view.step_numbers.tolist() == [0, 1, 2]
    assert view.steps["loss"].tolist() == [1.0, 2.0, 5.0]
    assert view.num_repeated_steps == 2


def test_a_scalar_may_be_described_after_its_first_step(tmp_path):
    log = HandmadeLog(tmp_path, sites=[])
    log.step(0, {"loss": 1.5})
    log.write(*f.sites_records([SCALARS["loss"]]))
    assert log.view().steps["loss"].tolist() == [1.5]


def test_the_steps_of_several_files_of_a_process_are_one_table(tmp_path):
    log = HandmadeLog(tmp_path)
    log.step(0, {"loss": 1.0})
    second = tmp_path / "rank0-hand-002.sonde"
    plan = f.FramePlan(Kind.STEP, ("value",), [SCALARS["loss"].id], exact=True)
    second.write_bytes(f.header() + f.manifest_record({"rank": 0}) + plan.encode_column(1, 0, [2.0]))
    view = log.view()
    assert view.step_numbers.tolist() == [0, 1]
    assert view.steps["loss"].tolist() == [1.0, 2.0]


def test_the_number_of_a_row_after_the_last_step_is_the_next_one(log):
    log.step(4)
    log.step(6)
    view = log.view()
    assert [view.step_number(row) for row in (0, 1, 2)] == [4, 6, 7]
    assert (view.num_steps, view.last_step) == (2, 6)


def test_an_end_alone_is_no_training(log):
    log.event("end", 0, how="finished")
    assert log.view().is_empty
    log.event("log", 0, name="note", text="hello")
    assert not log.view().is_empty


def test_a_view_without_steps_answers_all_questions(log):
    log.event("log", 0, name="note", text="hello")
    view = log.view()
    assert (view.num_steps, view.last_step, view.step_number(0)) == (0, -1, 0)
    assert (view.calls.updates, view.loss_trend.failing, view.times.num, view.epochs.num) == (0, "", 0, 0)
    assert len(view.losses.value) == len(view.steps["loss"]) == len(view.counts("backwards")) == 0
    assert texts(view.events_with_rows(TextLogged)) == [(0, "hello")]


def test_numbers_of_the_user_are_series_with_their_steps(log):
    log.write(*f.sites_records([Site(900, "scalar", "accuracy")]))
    plan = f.FramePlan(Kind.LOG, ("value",), [900], exact=True)
    for number in (3, 5):
        log.write(plan.encode_column(number, 0, [number / 10]))
    log.step(5)
    steps, values = log.view().logged("accuracy")
    assert (steps.tolist(), values.tolist()) == ([3, 5], [0.3, 0.5])
    assert len(log.view().logged("other")[0]) == 0


# ---- events


def test_an_event_belongs_to_the_step_that_ends_after_it(log):
    for number in range(3):
        log.event("log", number, name="note", text=f"in {number}")
        log.step(number)
    assert texts(log.view().events_with_rows(TextLogged)) == [(0, "in 0"), (1, "in 1"), (2, "in 2")]


def test_an_event_of_an_incomplete_step_belongs_to_the_next_complete_one(log):
    log.step(0)
    log.event("log", 1, name="note", text="of a step that did not end")
    log.step(2)
    assert texts(log.view().events_with_rows(TextLogged)) == [(1, "of a step that did not end")]


def test_an_event_of_a_later_step_waits_for_it(log):
    log.event("log", 2, name="note", text="early")
    for number in range(4):
        log.step(number)
    assert texts(log.view().events_with_rows(TextLogged)) == [(2, "early")]


def test_an_event_with_a_number_that_is_over_belongs_to_the_next_step(log):
    log.step(0)
    log.step(1)
    log.event("log", 0, name="note", text="late")
    log.step(2)
    assert texts(log.view().events_with_rows(TextLogged)) == [(2, "late")]


def test_events_after_the_last_step_have_the_row_after_it(log):
    log.step(0)
    log.event("log", 1, name="note", text="after")
    view = log.view()
    assert texts(view.events_with_rows(TextLogged)) == [(1, "after")]
    assert texts(view.each_event(TextLogged)) == [(1, "after")]
    assert view.num_steps == 1


def test_the_answer_of_a_search_belongs_to_the_step_that_was_searched(log):
    for number in range(3):
        log.event("nonfinite", number, what="gradient", where="a")
        log.step(number)
    log.event("origin", 1, what="gradient", operation="log")  # found two steps later
    log.event("origin_unknown", 9, reason="gone")
    log.step(3)
    view = log.view()
    assert [row for row, _ in view.events_with_rows(OriginFound)] == [1]
    assert [row for row, _ in view.events_with_rows(OriginUnknown)] == [view.num_steps]
    rows = [(row, type(event)) for row, event in view.events_with_rows(NonFinite, OriginFound)]
    assert rows == [(0, NonFinite), (1, NonFinite), (1, OriginFound), (2, NonFinite)]


def test_events_of_several_types_keep_the_order_of_the_log(log):
    log.event("log", 0, name="note", text="first")
    log.event("source", 0, call="backward", line="train.py:1", text="loss.backward()")
    log.event("log", 0, name="note", text="second")
    log.step(0)
    view = log.view()
    assert [type(event) for event in view.events(TextLogged, CallSiteFound)] == [TextLogged, CallSiteFound, TextLogged]
    assert [event.text for event in view.events(TextLogged)] == ["first", "second"]


def test_events_with_values_of_the_wrong_type_are_left_out(log):
    log.event("log", 0, name="note", text=5)
    log.event("log", 0, name="note", text="fine")
    log.step(0)
    assert [event.text for event in log.view().events(TextLogged)] == ["fine"]
    assert log.run().num_unreadable_events == 1


def test_events_one_by_one_are_the_same_as_all_together(log):
    for number in range(6):
        if number % 3:
            log.event("data", number, num_fetched=1, num_inputs=1, num_alike=0, size=number, sample=None, labels=None)
        log.step(number)
    view = log.view()
    assert list(view.each_event(BatchInspected)) == view.events_with_rows(BatchInspected)
    assert [row for row, _ in view.each_event(BatchInspected)] == [1, 2, 4, 5]


# ---- a run that grows


def test_refresh_gives_a_longer_view_and_leaves_the_old_one_alone(log):
    log.step(0, {"loss": 3.0})
    run = log.run()
    (before,) = newest_views(run).values()
    old_losses = before.steps["loss"]
    log.frame(1, {100: 7.0})
    log.event("log", 1, name="note", text="new")
    for number in range(1, 50):
        log.step(number, {"loss": float(number)})
    run.refresh()
    after = before.refresh()
    assert (before.num_steps, old_losses.tolist(), before.steps["loss"].tolist()) == (1, [3.0], [3.0])
    assert list(before.blocks(Kind.GRADIENT)) == []
    assert before.events(TextLogged) == ()
    assert after.num_steps == 50
    assert after.steps["loss"].tolist() == [3.0, *map(float, range(1, 50))]
    assert texts(after.events_with_rows(TextLogged)) == [(1, "new")]
    assert [block.numbers.tolist() for block in after.blocks(Kind.GRADIENT)] == [[1]]


def test_refresh_decodes_only_what_is_new(log, monkeypatch):
    for number in range(20):
        log.step(number)
    run = log.run()
    (view,) = newest_views(run).values()
    decoded = []
    values = run_view.RecordIndex.values
    monkeypatch.setattr(run_view.RecordIndex, "values", lambda index, positions: decoded.append(len(positions)) or values(index, positions))
    log.step(20, {"loss": 0.25})
    run.refresh()
    assert view.refresh().steps["loss"][-1] == 0.25
    assert decoded == [1]


def test_views_refreshed_many_times_equal_a_view_that_is_opened_at_the_end(log):
    log.step(0)
    run = log.run()
    (view,) = newest_views(run).values()
    for number in range(1, 60):
        log.step(number, {"loss": float(number), **({"lr": 0.1} if number % 7 == 0 else {})})
        if number % 3 == 0:
            run.refresh()
            view = view.refresh()
    run.refresh()
    view, fresh = view.refresh(), log.view()
    assert view.step_numbers.tolist() == fresh.step_numbers.tolist() == list(range(60))
    for name in ("loss", "lr"):
        assert np.array_equal(view.steps[name], fresh.steps[name], equal_nan=True)


def test_repeated_steps_are_recognized_across_refreshes(log):
    log.step(0, {"loss": 1.0})
    log.step(1, {"loss": 2.0})
    run = log.run()
    (view,) = newest_views(run).values()
    log.step(1, {"loss": 9.0})
    log.step(2, {"loss": 3.0})
    run.refresh()
    view = view.refresh()
    assert (view.steps["loss"].tolist(), view.num_repeated_steps) == ([1.0, 2.0, 3.0], 1)


def test_a_fact_is_computed_once_per_view(log):
    log.step(0)
    view, calls = log.view(), []

    def fact(of):
        calls.append(of)
        return of.num_steps

    assert (view.remember(fact), view.remember(fact), len(calls)) == (1, 1, 1)
    assert view.refresh().remember(fact) == 1
    assert len(calls) == 2


# ---- which attempt is judged


def attempt(directory, number, steps):
    """A process of rank 0 that was started after `number` others."""
    plan = f.FramePlan(Kind.STEP, ("value",), [SCALARS["loss"].id], exact=True)
    records = [f.header(), f.manifest_record({"rank": 0, "attempt": number}), *f.sites_records([SCALARS["loss"]])]
    (directory / f"rank0-a{number}-001.sonde").write_bytes(b"".join([*records, *(plan.encode_column(step, 0, [1.0]) for step in steps)]))


def test_the_newest_attempt_with_a_step_is_judged(tmp_path):
    attempt(tmp_path, 0, range(10))
    attempt(tmp_path, 1, range(10, 13))
    attempt(tmp_path, 2, ())
    (view,) = newest_views(run_view.Run(tmp_path)).values()
    assert (view.attempt, view.step_numbers.tolist()) == (1, [10, 11, 12])


KILLED = """Fatal Python error: Segmentation fault

Current thread 0x00007f1b (most recent call first):
  File "train.py", line 41 in main
"""


@pytest.mark.parametrize("steps", [range(3), ()], ids=["after three steps", "before the first step"])
def test_a_signal_that_killed_the_process_is_an_event_after_its_last_step(tmp_path, steps):
    attempt(tmp_path, 0, steps)
    dump_path(tmp_path, {}).write_text(KILLED)
    (view,) = newest_views(run_view.Run(tmp_path)).values()
    ((row, event),) = view.events_with_rows(FatalSignalReceived)
    assert (row, event.step, event.signal) == (len(steps), len(steps), "SIGSEGV")
    assert not view.is_empty


# ---- malicious logs


def test_events_that_are_held_in_memory_are_limited(log, monkeypatch):
    monkeypatch.setattr(run_view, "MAX_EVENTS", 10)
    log.write(*(f.event_record("log", 0, 0, {"name": "note", "text": str(number)}) for number in range(50)))
    log.step(0)
    view = log.view()
    assert [event.text for event in view.events(TextLogged)] == [str(number) for number in range(10)]
    assert len(list(view.each_event(TextLogged))) == 50


def test_sets_of_scalars_beyond_the_limit_are_not_read(log, monkeypatch):
    monkeypatch.setattr(step_columns, "MAX_PARTS", 2)
    log.step(0, {"loss": 1.0})
    log.step(1, {"loss": 2.0, "lr": 0.5})
    log.step(2, {"lr": 0.25})
    log.step(3, {"loss": 3.0})
    view = log.view()
    assert view.step_numbers.tolist() == [0, 1, 2, 3]
    assert np.array_equal(view.steps["loss"], [1.0, 2.0, nan, 3.0], equal_nan=True)
    assert np.array_equal(view.steps["lr"], [nan, 0.5, nan, nan], equal_nan=True)


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.GRADIENT])
def test_a_log_with_a_new_layout_in_every_frame_does_not_fill_the_memory(log, kind):
    """Of such a log the view takes a few times its length, not an object per frame."""
    num_steps = 20_000
    step = f.FramePlan(Kind.STEP, ("value",), [SCALARS["loss"].id], exact=True)
    records = []
    for number in range(num_steps):
        records.append(f.FramePlan(kind, ("value",), [1000 + number], exact=True).encode_column(number, 0, [1.0]))
        if kind != Kind.STEP:
            records.append(step.encode_column(number, 0, [1.0]))
    log.write(*records)
    run = log.run()
    tracemalloc.start()
    (view,) = newest_views(run).values()
    assert np.isnan(view.steps["lr"]).all()
    assert sum(len(block) for block in view.blocks(Kind.GRADIENT)) == (0 if kind == Kind.STEP else num_steps)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * log.path.stat().st_size


def test_an_event_after_lost_steps_has_the_last_number_in_the_log(log):
    log.step(0)
    log.event("nonfinite", 7, what="loss", where="loss")  # steps 1 to 6 could not be written, step 7 was not completed
    view = log.view()
    assert view.step_number(view.num_steps) == 7
    assert view.loss_trend.first_nonfinite_step == 7

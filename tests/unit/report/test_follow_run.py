"""follow(path) judges a growing run again: when it has grown by a tenth, not before ten seconds, with at most 5 % of one core."""

from __future__ import annotations

import queue
import threading

import pytest

from sample_runs import write_sample_run
from sonde.events import Finding, Severity
from sonde.report.follow_run import follow, new_and_gone


class GrowingRun:
    """A run of this process that gets steps when the test says so."""

    def __init__(self, path, **rest):
        self.path, self._losses = path, queue.Queue()
        self._thread = threading.Thread(target=write_sample_run, args=(path, self._given()), kwargs={"ending": {}} | rest, daemon=True)
        self._thread.start()
        self.grow(10)

    def _given(self):
        while (loss := self._losses.get()) is not None:
            yield loss
            self._losses.task_done()  # the step is written now

    def grow(self, num_steps):
        for number in range(num_steps):
            self._losses.put(1.0 + 1.0 / (1 + number))
        self._losses.join()

    def end(self):
        self._losses.put(None)
        self._thread.join()


class Clocks:
    """Time passes in `wait`, CPU time in `clock` calls of a judgement."""

    def __init__(self, run, events=()):
        self.now, self.used, self.run, self.waits, self.events = 0.0, 0.0, run, [], dict(events)

    def wait(self, seconds):
        self.now += seconds
        self.waits.append(seconds)
        for at in [at for at in self.events if at <= self.now]:
            self.events.pop(at)()

    def follow(self):
        return follow(self.run.path, clock=lambda: self.now, cpu=lambda: self.used, wait=self.wait)


@pytest.fixture
def growing(tmp_path):
    run = GrowingRun(tmp_path / "growing")
    yield run
    run.end()


def test_it_judges_at_once_then_after_ten_seconds_if_the_run_has_grown_by_a_tenth(growing):
    clocks = Clocks(growing, {1.0: lambda: growing.grow(20)})
    reports = clocks.follow()
    assert next(reports).run.num_steps == 10
    assert next(reports).run.num_steps == 30
    assert clocks.now == 10.0


def test_ten_seconds_without_growth_are_no_reason_to_judge_again(growing):
    clocks = Clocks(growing, {42.0: lambda: growing.grow(20)})
    reports = clocks.follow()
    next(reports)
    assert next(reports).run.num_steps == 30
    assert clocks.now == 42.0


def test_growth_below_a_tenth_is_no_reason_either(growing):
    growing.grow(90)
    clocks = Clocks(growing, {5.0: lambda: growing.grow(4), 30.0: lambda: growing.grow(10)})
    reports = clocks.follow()
    next(reports)
    assert next(reports).run.num_steps == 114


def test_the_end_of_the_run_is_judged_at_once_and_is_the_last_judgement(growing):
    clocks = Clocks(growing, {2.0: growing.end})
    reports = list(clocks.follow())
    assert [report.run.ended for report in reports] == ["running", "finished"]
    assert clocks.now <= 3.0  # one more poll notices that the log does not grow any more


def test_a_run_that_has_ended_is_judged_once(growing):
    growing.end()
    clocks = Clocks(growing)
    assert [report.run.ended for report in clocks.follow()] == ["finished"]
    assert clocks.waits == []


def test_judging_takes_at_most_a_twentieth_of_the_time(growing):
    clocks = Clocks(growing, {1.0: lambda: growing.grow(20)})
    reports = clocks.follow()
    next(reports)
    clocks.used += 3.0  # seconds that the judgement took
    next(reports)
    assert clocks.now >= 60.0


def test_polling_counts_and_becomes_rarer_where_it_is_expensive(growing):
    clocks = Clocks(growing, {200.0: lambda: growing.grow(20)})
    spent = iter(range(1_000_000))
    cost = 0.02  # seconds for each reading of the clock: one within a poll
    reports = follow(growing.path, clock=lambda: clocks.now, cpu=lambda: cost * next(spent), wait=clocks.wait)
    next(reports)
    next(reports)
    assert min(clocks.waits[1:]) >= 0.99 * cost / 0.01
    assert cost * next(spent) <= 0.05 * clocks.now


def finding(rule, where="", step=1):
    return Finding(rule, Severity.ERROR, where, step, "cause", "fix")


def test_a_finding_is_new_once_whatever_its_step_says_later():
    first = [finding("dead-relu", "fc1"), finding("dead-relu", "fc2", 3), finding("dead-relu", "fc2", 9)]
    assert [(each.where, each.step) for each in new_and_gone((), first)[0]] == [("fc1", 1), ("fc2", 3)]
    assert new_and_gone(first, [finding("dead-relu", "fc1", 7), finding("dead-relu", "fc2", 7)]) == ([], [])


def test_a_finding_that_disappears_is_reported_as_gone():
    before, now = [finding("loss-plateau"), finding("lr-zero")], [finding("lr-zero"), finding("dead-relu", "fc1")]
    new, gone = new_and_gone(before, now)
    assert ([each.rule for each in new], [each.rule for each in gone]) == (["dead-relu"], ["loss-plateau"])

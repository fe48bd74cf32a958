"""Times and memory: changed beyond their own spread or unchanged, and how many samples a second."""

import itertools

import numpy as np
import pytest

from comparison_runs import falling, write_pair_run
from sonde.comparison.speed_and_memory import compare_speed_and_memory
from sonde.run_view import RunView
from sonde.runlog.run_reader import Run

LOSSES = falling(200)


@pytest.fixture
def pace(tmp_path):
    number = itertools.count()

    def compare(a, b, losses=LOSSES, **rest):
        paths = [write_pair_run(tmp_path / str(next(number)), losses, scalars=scalars, **rest) for scalars in (a, b)]
        return compare_speed_and_memory(*(RunView(Run(path).processes[0]) for path in paths))

    return compare


def wavering(level, spread=0.05, seed=0, num=200):
    return (level * (1 + spread * np.abs(np.random.default_rng(seed).standard_normal(num)))).tolist()


def directions(found):
    return {change.name: change.direction for change in found.times}


def test_the_phase_that_became_slower_is_named_and_the_others_are_unchanged(pace):
    slower = {"step_ms": wavering(15, seed=1), "backward_ms": wavering(10, seed=1)}
    found = pace({"step_ms": wavering(10), "backward_ms": wavering(5)}, slower)
    assert directions(found) == {"step": "more", "forward": "same", "backward": "more", "optimizer": "same"}
    assert found.step.ratio == pytest.approx(1.5, rel=0.03)


def test_the_other_way_round_it_is_faster(pace):
    found = pace({"step_ms": wavering(15)}, {"step_ms": wavering(10, seed=1)})
    assert directions(found)["step"] == "less"


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_wavers_makes_no_difference(pace, seed):
    """Half of a run beside a neighbour: its blocks lie as far apart as the runs do."""
    rng = np.random.default_rng(seed)
    load = np.repeat(rng.choice([1.0, 1.4, 1.8], 8), 25)
    found = pace({"step_ms": wavering(10)}, {"step_ms": (np.array(wavering(10, seed=1)) * load).tolist()})
    assert directions(found)["step"] in ("same", "unclear")


def test_a_phase_that_hardly_matters_may_change_as_it_likes(pace):
    found = pace({"optimizer_ms": 0.05}, {"optimizer_ms": 0.15})
    assert directions(found)["optimizer"] == "slight"


def test_what_few_steps_do_is_compared_by_its_mean(pace):
    a, b = ([size if step % 10 == 9 else 0.0 for step in range(200)] for size in (20.0, 60.0))
    found = pace({"validation_ms": a}, {"validation_ms": b})
    (change,) = [change for change in found.times if change.name == "validation"]
    assert (change.a.median, change.b.median, change.direction) == (2.0, 6.0, "more")


def test_a_phase_that_nobody_has_is_left_out_and_one_that_is_new_is_told(pace):
    found = pace({}, {"data_ms": 4.0})
    assert directions(found)["data"] == "only in B"
    assert "transfer" not in directions(found)


def test_few_steps_are_not_enough(pace):
    assert set(directions(pace({"step_ms": 10.0}, {"step_ms": 30.0}, LOSSES[:10])).values()) == {"unknown"}


def test_observed_steps_are_not_timed_where_there_are_others(pace):
    slow_where_observed = [30.0 if step % 2 else 10.0 for step in range(200)]
    found = pace({"step_ms": slow_where_observed}, {"step_ms": 10.0}, observed=range(1, 200, 2))
    assert directions(found)["step"] == "same"
    assert found.step.a.median == pytest.approx(9.9)


def test_steps_and_samples_per_second_come_from_the_time_without_sondes_own(pace):
    found = pace({"step_ms": 10.1}, {"step_ms": 20.1})
    assert found.steps_per_s == (pytest.approx(100.0), pytest.approx(50.0))
    assert found.samples_per_s == (pytest.approx(3200.0), pytest.approx(1600.0))


def test_samples_are_not_counted_where_a_step_is_fed_in_another_way(pace):
    found = pace({"forwards": 2.0}, {})
    assert np.isnan(found.samples_per_s[0])
    assert found.samples_per_s[1] > 0


def test_accumulated_steps_have_as_many_samples_as_backwards(pace):
    found = pace({"forwards": 4.0, "backwards": 4.0, "step_ms": 10.1}, {"step_ms": 10.1})
    assert found.samples_per_s[0] == pytest.approx(4 * found.samples_per_s[1])


def test_memory_is_whatever_was_recorded_in_bytes_or_megabytes(pace):
    found = pace({"peak_bytes": 1e9, "rss_mb": 100.0}, {"peak_bytes": 1.2e9, "rss_mb": 101.0})
    assert {change.name: change.direction for change in found.memory} == {"peak": "more", "rss": "same"}
    assert found.memory[1].a.median == 100 * 2**20


def test_without_times_there_is_no_pace_to_tell(pace):
    found = pace({"step_ms": 0.0, "sonde_ms": 0.0}, {"step_ms": 0.0, "sonde_ms": 0.0})
    assert np.isnan(found.steps_per_s).all()
    assert directions(found)["step"] in ("same", "unknown")

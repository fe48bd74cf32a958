"""Which samples carry a number that is too large."""

import pytest

from sonde.replay.heaviest_samples import carriers


class Batch:
    """What each sample adds to the number; counts how often it was asked."""

    def __init__(self, **heavy):
        self.num, self.weights, self.asked = heavy.pop("num", 64), {int(name[1:]): weight for name, weight in heavy.items()}, 0

    def __call__(self, group):
        self.asked += 1
        return sum(self.weights.get(sample, 0.01) for sample in group)

    @property
    def excess(self):
        return sum(self.weights.get(sample, 0.01) for sample in range(self.num))


def found(batch, **more):
    return carriers(batch.num, batch.excess, batch, **more)


def test_one_sample_is_found_in_a_few_trials():
    batch = Batch(_37=100.0)
    told = found(batch)
    assert told.samples == (37,)
    assert told.shares == pytest.approx((1.0,), abs=0.01)
    assert batch.asked <= 14


def test_the_heaviest_comes_first():
    assert found(Batch(_3=10.0, _50=80.0, _22=30.0)).samples == (50, 22, 3)


def test_a_batch_that_is_heavy_as_a_whole_has_no_carriers():
    assert found(Batch(**{f"_{sample}": 5.0 for sample in range(64)})).samples == ()


def test_it_gives_up_on_a_large_batch_without_carriers_in_time():
    batch = Batch(num=4096)
    assert found(batch).samples == ()
    assert batch.asked < 150


def test_a_batch_that_cannot_be_divided_says_why():
    def refuses(group):
        raise ValueError("expected more than 1 value per channel")

    told = carriers(8, 10.0, refuses)
    assert told.samples is None
    assert "more than 1 value" in told.note


def test_samples_that_do_it_only_together_are_not_named():
    def together(group):
        return 0.0

    told = carriers(16, 10.0, together)
    assert told.samples is None
    assert "both" in told.note


def test_a_model_that_takes_too_long_is_not_run_forever():
    told = found(Batch(_5=50.0), max_s=0.0)
    assert told.samples is None
    assert "no time" in told.note


@pytest.mark.parametrize("num", [0, 1])
def test_a_batch_of_one_has_nobody_to_choose_from(num):
    assert carriers(num, 1.0, lambda group: 1.0).samples is None

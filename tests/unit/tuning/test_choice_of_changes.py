"""Which changes are measured again, and which are put together."""

from sonde.tuning.measured_gain import Gain, LossCheck
from sonde.tuning.proposals import Patch, Proposal
from sonde.tuning.trial_messages import CallSite
from sonde.tuning.tune import _best_of_families, _promising, _rank
from sonde.tuning.tuning_result import MeasuredChange


def measured(family, name, factor, *, verdict="faster", loss="same", same_training=True):
    proposal = Proposal(family, name, name, CallSite(), Patch(), same_training=same_training)
    gain = None if factor is None else Gain(factor, factor, factor, 3, verdict)
    return MeasuredChange((proposal,), gain, LossCheck(loss))


def names(results):
    return [each.name for each in results]


def test_what_looks_slower_is_measured_again_only_where_that_may_be_noise():
    slow = [measured("threads", "threads=1", 0.95)]
    assert names(_promising(slow, noise=0.01)) == []
    assert names(_promising(slow, noise=0.10)) == ["threads=1"]


def test_what_is_far_behind_another_one_of_its_family_is_not_measured_again():
    results = [measured("workers", "1", 1.3), measured("workers", "2", 2.0), measured("workers", "4", 1.9), measured("compile", "c", 1.2)]
    assert names(_promising(results, noise=0.0)) == ["2", "4", "c"]


def test_what_failed_is_not_measured_again():
    assert _promising([measured("compile", "compile", None)], noise=0.5) == []


def test_one_of_each_family_is_put_together_and_only_what_keeps_the_training():
    results = [
        measured("workers", "workers=2", 1.5),
        measured("workers", "workers=4", 1.8),
        measured("optimizer", "fused", 2.0),
        measured("autocast", "bfloat16", 3.0, loss="departs"),
        measured("batch", "batch_size=64", 4.0, same_training=False),
        measured("threads", "threads=1", 1.2, verdict="noise"),
    ]
    assert names(_best_of_families(results)) == ["fused", "workers=4"]


def test_what_was_measured_once_does_not_beat_what_was_measured_often():
    once = MeasuredChange(measured("workers", "workers=2", 1.9).proposals, Gain(1.9, 1.9, 1.9, 1, "faster"), LossCheck("same"))
    often = measured("workers", "workers=1", 1.7)
    assert names(_best_of_families([once, often])) == ["workers=1"]


def test_results_are_ranked_by_what_they_are_worth():
    results = [
        measured("a", "failed", None),
        measured("b", "slower", 0.5, verdict="slower"),
        measured("c", "noise", 1.4, verdict="noise"),
        measured("d", "other training", 5.0, same_training=False),
        measured("e", "departs", 4.0, loss="departs"),
        measured("f", "good", 1.2),
        measured("g", "better", 1.5),
    ]
    assert names(sorted(results, key=_rank)) == ["better", "good", "departs", "other training", "noise", "slower", "failed"]

"""Bottlenecks and recommendations, computed from the numbers of a profile."""

from __future__ import annotations

import pytest

from sonde.profiler import LayerCost, ProfileReport, TimeSpread


def ms(value: float) -> TimeSpread:
    return TimeSpread(value, value, value, 10)


def layer(path: str, forward: float, *, flops: int = 0, calls: float = 1.0) -> LayerCost:
    return LayerCost(path, "Linear", depth=1, calls=calls, forward=ms(forward), forward_self=ms(forward), flops_self=flops)


def test_layers_of_a_stack_are_one_bottleneck_with_its_speed() -> None:
    layers = tuple(layer(f"layers.{i}.linear", 10.0, flops=10**9) for i in range(4))
    report = ProfileReport(layers=layers, step=ms(50.0), remainder={"optimizer": 10.0}, peak_flops_per_s=1e12)
    (found,) = report.bottlenecks()
    assert (found.where, found.ms, found.share) == ("layers.*.linear", 40.0, 0.8)
    assert "100 GFLOP/s, 10 % of this machine's peak" in found.why


def test_a_single_layer_keeps_its_path_and_small_ones_are_left_out() -> None:
    report = ProfileReport(layers=(layer("head", 30.0), layer("tail", 1.0)), step=ms(50.0))
    assert [one.where for one in report.bottlenecks()] == ["head"]


def test_waiting_for_data_gets_a_recommendation() -> None:
    report = ProfileReport(step=ms(100.0), phases={"data": ms(60.0), "optimizer": ms(5.0)})
    assert report.bottlenecks()[0].where == "(data)"
    (advice,) = report.recommendations()
    assert "60 % of the step (60 ms) is waiting for data" in advice
    assert "num_workers" in advice


def test_a_heavy_optimizer_gets_a_recommendation() -> None:
    report = ProfileReport(step=ms(10.0), phases={"optimizer": ms(4.0)})
    assert "fused=True" in report.recommendations()[0]


def test_many_tiny_calls_and_slow_arithmetic_get_different_recommendations() -> None:
    tiny = ProfileReport(layers=tuple(layer(f"{i}", 0.02, flops=1000) for i in range(100)), step=ms(4.0), peak_flops_per_s=1e11)
    slow = ProfileReport(layers=(layer("conv", 3.0, flops=10**7),), step=ms(4.0), peak_flops_per_s=1e11)
    assert "torch.compile" in tiny.recommendations()[0]
    assert "channels_last" in slow.recommendations()[0]


def test_a_balanced_profile_gets_no_recommendation() -> None:
    layers = (layer("a", 40.0, flops=3 * 10**9), layer("b", 40.0, flops=3 * 10**9))
    phases = {"data": ms(1.0), "optimizer": ms(5.0)}
    assert ProfileReport(layers=layers, step=ms(90.0), peak_flops_per_s=1e11, phases=phases).recommendations() == ()


def test_an_empty_profile_has_no_bottlenecks_and_no_recommendations() -> None:
    assert ProfileReport().bottlenecks() == ()
    assert ProfileReport().recommendations() == ()


def test_shares_refer_to_the_sum_if_other_programs_disturbed_the_step() -> None:
    layers = (layer("a", 30.0), layer("b", 10.0))
    assert ProfileReport(layers=layers, step=ms(42.0)).share(30.0) == 30 / 42
    assert ProfileReport(layers=layers, step=ms(400.0)).share(30.0) == 30 / 40
    assert ProfileReport(layers=layers, step=ms(20.0)).share(30.0) == 30 / 40


def test_phase_shares_add_up_to_one_even_if_their_medians_do_not_add_up_to_the_step() -> None:
    report = ProfileReport(step=ms(100.0), phases={"data": ms(10.0), "forward": ms(30.0), "backward": ms(30.0), "other": ms(10.0)})
    assert sum(report.phase_share(phase) for phase in report.phases) == pytest.approx(1)

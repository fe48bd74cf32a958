"""Comparing two profiles: a change beyond the variation of both is named once, at the innermost layer that explains it."""

from __future__ import annotations

import gzip
import json
import math
import re
from itertools import permutations, product
from pathlib import Path

import pytest

from sonde.profiler import LayerCost, ProfileReport, TimeSpread
from sonde.profiler.profile_report import from_dict


def around(ms: float, spread: float = 0.03) -> TimeSpread:
    return TimeSpread(ms, ms * (1 - spread), ms * (1 + spread), 10)


def profile(spread: float = 0.03, **times: float) -> ProfileReport:
    """Times of leaves in ms by path, with `_` for dots. A module takes one millisecond more than the modules inside."""
    leaves = {path.replace("_", "."): ms for path, ms in times.items()}
    groups = {above: 0.0 for path in leaves for above in _above(path)}
    for above in groups:
        groups[above] = sum(ms for path, ms in leaves.items() if above in _above(path)) + 1.0
    totals = {**groups, **leaves}
    layers = tuple(
        LayerCost(path, "Part", forward=around(ms / 3, spread), backward=around(2 * ms / 3, spread)) for path, ms in sorted(totals.items())
    )
    return ProfileReport(layers=layers, step=around(totals[""] + 2, spread), phases={"optimizer": around(2.0, spread)})


def _above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:num]) for num in range(len(parts))]


OLD = profile(embed=4.0, layers_0_attention=10.0, layers_0_mlp=12.0, layers_1_attention=10.0, layers_1_mlp=12.0, head=5.0)


def test_two_profiles_of_the_same_are_unchanged() -> None:
    found = OLD.compare(OLD)
    assert found.sentence == "everything unchanged"
    assert not found.changed


def test_equal_layers_are_named_once_and_everything_else_is_unchanged() -> None:
    new = profile(embed=4.0, layers_0_attention=18.0, layers_0_mlp=12.0, layers_1_attention=18.0, layers_1_mlp=12.0, head=5.0)
    found = new.compare(OLD)
    assert found.sentence == "layers.*.attention 1.8x slower, everything else unchanged"
    assert {one.path: one.verdict for one in found.layers}["layers.0.mlp"] == "unchanged"


def test_faster_layers_are_named_as_faster() -> None:
    new = profile(embed=4.0, layers_0_attention=5.0, layers_0_mlp=12.0, layers_1_attention=5.0, layers_1_mlp=12.0, head=5.0)
    assert new.compare(OLD).sentence == "layers.*.attention 2.0x faster, everything else unchanged"


def test_if_all_parts_changed_alike_the_model_is_named() -> None:
    new = profile(**{name: 1.5 * ms for name, ms in _times(OLD).items()})
    sentence = new.compare(OLD).sentence
    assert sentence.startswith("everything 1.")
    assert sentence.endswith("slower")


def test_one_part_slower_and_another_faster_are_both_named() -> None:
    new = profile(embed=4.0, layers_0_attention=18.0, layers_0_mlp=4.0, layers_1_attention=10.0, layers_1_mlp=12.0, head=5.0)
    sentence = new.compare(OLD).sentence
    assert "layers.0.attention 1.8x slower" in sentence
    assert "layers.0.mlp 3.0x faster" in sentence


def test_a_change_within_the_variation_of_either_is_not_reported() -> None:
    times = _times(OLD) | {"head": 7.0}
    assert "head" in profile(**times).compare(OLD).sentence
    assert profile(0.4, **times).compare(OLD).sentence == "nothing changed beyond the noise"


def test_a_layer_that_is_new_or_gone_is_named() -> None:
    times = _times(OLD)
    del times["embed"]
    sentence = profile(**times, tail=6.0).compare(OLD).sentence
    assert "tail new" in sentence
    assert "embed gone" in sentence


def test_a_tiny_layer_is_not_reported_whatever_its_ratio() -> None:
    old, new = profile(big=100.0, tiny=0.01), profile(big=100.0, tiny=0.09)
    assert new.compare(old).sentence == "everything unchanged"


def test_a_phase_is_compared_too() -> None:
    old, new = OLD, ProfileReport(layers=OLD.layers, step=OLD.step, phases={"optimizer": around(9.0)})
    assert new.compare(old).sentence == "(optimizer) 4.5x slower, everything else unchanged"


def test_differences_that_limit_the_comparison_are_noted() -> None:
    old = ProfileReport(layers=OLD.layers, step=OLD.step, batch="float32 [8, 4]", environment={"threads": "1"})
    new = ProfileReport(layers=OLD.layers, step=OLD.step, batch="float32 [16, 4]", environment={"threads": "2"})
    assert new.compare(old).notes == (
        "the batches differ: float32 [8, 4] before, float32 [16, 4] after", "threads differs: 1 before, 2 after",
    )  # fmt: skip


def test_nan_gives_no_verdict() -> None:
    bad = ProfileReport(layers=(LayerCost("", "Net", forward=TimeSpread(math.nan, math.nan, math.nan, 3)),), step=around(5.0))
    assert bad.compare(bad).layers[0].verdict == "could not tell"


def test_two_empty_profiles_cannot_be_compared() -> None:
    assert "nothing to compare" in ProfileReport().compare(ProfileReport()).sentence


def test_a_comparison_is_strict_json_for_programs() -> None:
    document = profile(a=0.0).compare(profile(a=1.0)).to_dict()
    assert document["sentence"]
    assert all(value == value for row in document["rows"] for value in row.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("num", [2, 30])
def test_the_verdict_does_not_depend_on_how_many_steps_were_measured(num: int) -> None:
    wide = TimeSpread(10.0, 5.0, 15.0, num)
    old = ProfileReport(layers=(LayerCost("", "Net", forward=TimeSpread(8.0, 7.9, 8.1, num)),), step=wide)
    new = ProfileReport(layers=(LayerCost("", "Net", forward=wide),), step=wide)
    assert new.compare(old).layers[0].verdict == "could not tell"


def _times(report: ProfileReport) -> dict[str, float]:
    inside = {above for layer in report.layers for above in _above(layer.path)}
    leaves = [layer for layer in report.layers if layer.path and layer.path not in inside]
    return {layer.path.replace(".", "_"): layer.total_ms for layer in leaves}


def test_one_layer_of_a_long_stack_is_named_alone() -> None:
    stack = {f"blocks_{i}_{part}": 10.0 for i in range(12) for part in ("attention", "mlp")}
    found = profile(**(stack | {"blocks_5_attention": 18.0})).compare(profile(**stack))
    assert found.sentence == "blocks.5.attention 1.8x slower, everything else unchanged"


def test_layers_of_a_sequential_are_not_joined() -> None:
    old, new = profile(a_0=5.0, a_1=5.0, a_2=5.0), profile(a_0=5.0, a_1=5.0, a_2=15.0)
    assert new.compare(old).sentence == "a.2 3.0x slower, everything else unchanged"


def test_a_slower_step_that_no_layer_explains_is_reported_by_its_phases() -> None:
    def made(ms: float) -> ProfileReport:
        layers = (LayerCost("", "Net", forward=TimeSpread(ms, ms - 6, ms + 6, 5)),)
        return ProfileReport(layers=layers, step=around(2 * ms), phases={"forward": around(ms), "other": around(1.0)})

    assert made(13.0).compare(made(10.0)).sentence == "(forward) 1.3x slower, the rest within the noise"


# ---- on a busy machine


@pytest.fixture(scope="module")
def busy() -> dict[str, list[ProfileReport]]:
    """Ten profiles each of four models, and of two of them with a layer that computes its product twice, measured while other programs used
    both cores. The usual step took up to four times as long as the fastest one."""
    path = Path(__file__).with_name("profiles_of_a_busy_machine.json.gz")
    return {name: [from_dict(each) for each in profiles] for name, profiles in json.loads(gzip.decompress(path.read_bytes())).items()}


@pytest.mark.parametrize("model", ["mlp", "wide mlp", "cnn", "transformer"])
def test_an_unchanged_model_gets_no_verdict_on_a_busy_machine(model: str, busy: dict[str, list[ProfileReport]]) -> None:
    pairs = list(permutations(busy[model], 2))
    assert len(pairs) == 90
    found = [after.compare(before) for before, after in pairs]
    assert [(one.sentence, each.path) for one in found for each in (one.step, *one.phases, *one.layers) if each.is_change] == []


@pytest.mark.parametrize("model", ["mlp", "wide mlp"])
def test_a_layer_that_takes_twice_as_long_is_found_on_a_busy_machine(model: str, busy: dict[str, list[ProfileReport]]) -> None:
    for before, after in product(busy[model], busy[f"{model}, layer 2 twice"]):
        assert re.match(r"2 [12]\.\dx slower, (everything else unchanged|the rest within the noise)$", after.compare(before).sentence)
        assert re.match(r"2 [12]\.\dx faster, ", before.compare(after).sentence)


def measured(*steps_ms: float) -> TimeSpread:
    return TimeSpread.of(steps_ms)


def test_a_step_is_not_slower_because_other_programs_disturbed_most_of_its_repetitions() -> None:
    before = ProfileReport(layers=(LayerCost("", "Net", latency=measured(9, 9, 9, 9, 9)),), step=measured(10, 10, 10, 10, 10))
    after = ProfileReport(layers=(LayerCost("", "Net", latency=measured(9, 35, 36, 36, 36)),), step=measured(10, 40, 40, 40, 40))
    slower = ProfileReport(layers=(LayerCost("", "Net", latency=measured(27, 29, 36, 36, 36)),), step=measured(30, 32, 40, 40, 40))
    assert after.compare(before).step.verdict == "could not tell"
    assert after.compare(before).sentence == "nothing changed beyond the noise"
    assert slower.compare(before).sentence == "everything 3.0x slower"


def test_a_machine_that_is_slower_as_a_whole_is_no_change_of_a_layer() -> None:
    def made(factor: float, **other: float) -> ProfileReport:
        times = {name: factor * ms for name, ms in {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": 6.0}.items()} | other
        layers = tuple(LayerCost(name, "Part", latency=measured(ms, 1.01 * ms, 1.02 * ms)) for name, ms in times.items())
        return ProfileReport(layers=layers, step=measured(20 * factor, 20.1 * factor, 20.2 * factor))

    assert not made(1.3).compare(made(1.0)).changed  # all layers alike: the clock rate, or caches that are shared with other programs
    assert [one.path for one in made(1.15, e=12.0).compare(made(1.0)).changed] == ["e"]
    assert len(made(1.6).compare(made(1.0)).changed) == 5


def test_with_several_threads_a_disturbed_profile_is_compared_layer_with_layer_alone() -> None:
    """Threads wait for each other: if another program has one core, every parallel operation takes a time slice longer."""

    def made(factor: float, disturbed_share: float, threads: str = "2", **other: float) -> ProfileReport:
        times = {name: factor * ms for name, ms in {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0}.items()} | other
        layers = tuple(LayerCost(name, "Part", latency=measured(ms, 1.01 * ms, 1.02 * ms)) for name, ms in times.items())
        step = measured(sum(times.values()), 1.01 * sum(times.values()))
        return ProfileReport(layers=layers, step=step, disturbed_share=disturbed_share, environment={"threads": threads})

    quiet = made(1.0, 0.0)
    found = made(300.0, 0.9).compare(quiet)
    assert (found.sentence, found.step.verdict) == ("nothing changed beyond the noise", "could not tell")
    assert found.notes == (
        "other programs interrupted 90 % of the steps after: with several threads, only a layer that differs from the others can be named",
    )
    assert [one.path for one in made(1.5, 0.9, d=9.0).compare(quiet).changed] == ["d"]
    assert len(made(300.0, 0.9, "1").compare(made(1.0, 0.0, "1")).changed) == 4  # one thread: hardly a layer is disturbed in every step
    assert len(made(300.0, 0.0).compare(quiet).changed) == 4  # nothing disturbed it

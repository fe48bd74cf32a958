"""Profile reports and their files: everything is restored, including NaN and infinity, and other files are rejected."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.errors import SondeError
from sonde.profiler import LayerCost, ProfileReport, Section, Span, TimeSpread, load

REPORT = ProfileReport(
    title="Net",
    layers=(
        LayerCost(
            "", "Net", forward=TimeSpread(3.0, 2.5, 3.5, 10), backward=TimeSpread(5.0, 4.5, 5.5, 10), flops_forward=10, parameter_bytes=64
        ),
        LayerCost("a\x1b[31m", "Linear", depth=1, forward_self=TimeSpread(math.inf, math.nan, math.inf, 3), source="net.py:12"),
    ),
    sections=(Section("load", 3, 12.5, TimeSpread(4.0, 3.0, 5.0, 3), parent="epoch"),),
    step=TimeSpread(10.0, 9.0, 11.0, 10),
    phases={"forward": TimeSpread(3.0, 2.5, 3.5, 10), "data": TimeSpread()},
    remainder={"optimizer": 2.0, "loss, backward": math.nan},
    num_samples=32,
    num_tokens=640,
    flops_per_step=10**12,
    peak_flops_per_s=1e14,
    utilisation={"cpu_share": math.nan, "gpu": "none"},
    batch="int64 [32, 20]",
    environment={"torch": "2.13.0"},
    notes=("one", "two"),
    own_cost=1.2,
    spans=(Span(0, "forward", "", 0.0, 3.0), Span(0, "backward", "a", 3.0, math.inf, 1)),
)


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # NaN is not equal to itself, but its repr is


def test_a_saved_profile_is_loaded_unchanged(tmp_path: Path) -> None:
    path = REPORT.save(tmp_path / "profile.json")
    back = load(path)
    assert same(back, REPORT)
    assert same(back.spans, REPORT.spans)


def test_the_file_is_strict_json(tmp_path: Path) -> None:
    text = REPORT.save(tmp_path / "profile.json").read_text(encoding="utf-8")
    document = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert document["remainder"]["loss, backward"] == "NaN"
    assert document["spans"][1][4] == "Infinity"
    assert document["derived"]["samples_per_s"] == 3200


def test_a_field_of_a_later_version_is_ignored(tmp_path: Path) -> None:
    path = REPORT.save(tmp_path / "profile.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    document["colour"] = document["layers"][0]["colour"] = "red"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert same(load(path), REPORT)


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "profile.json")
    with pytest.raises(SondeError, match="exists already"):
        REPORT.save(tmp_path / "profile.json")
    assert load(replace(REPORT, title="new").save(tmp_path / "profile.json", replace=True)).title == "new"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        ("{}", "not a profile of Sonde"),
        ('{"format": "sonde-profile", "schema": 99}', "Upgrade with"),
        ('{"format": "sonde-profile", "schema": 1, "step": [1]}', "damaged"),
        ('{"format": "sonde-profile", "schema": 1, "layers": [{"path": "a"}]}', "damaged"),
    ],
    ids=["half", "list", "other", "newer", "short", "incomplete"],
)
def test_a_file_that_is_not_a_profile_is_rejected_with_an_explanation(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SondeError, match=message):
        load(path)


def test_for_a_missing_file_the_error_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(SondeError, match="sonde profile"):
        load(tmp_path / "none.json")


def test_rates_are_computed_from_the_step() -> None:
    assert REPORT.samples_per_s == 3200
    assert REPORT.tokens_per_s == 64000
    assert REPORT.flops_per_s == 1e14
    assert REPORT.mfu == 1.0


def test_values_that_were_not_measured_are_nan() -> None:
    empty = ProfileReport()
    assert all(math.isnan(value) for value in (empty.samples_per_s, empty.mfu, empty.step.median_ms, LayerCost("a", "b").total_ms))
    assert empty.tokens_per_s is None


def test_a_time_spread_has_the_median_the_quartiles_and_the_percentiles() -> None:
    assert TimeSpread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == TimeSpread(3.0, 2.0, 4.0, 5, 4.8, 4.96, 1.0)
    assert TimeSpread.of([7.0]) == TimeSpread(7.0, 7.0, 7.0, 1, 7.0, 7.0, 7.0)
    assert not TimeSpread.of([]).is_known


@pytest.mark.parametrize("num", [2, 3, 10, 101, 1000])
def test_percentiles_agree_with_numpy(num: int) -> None:
    values = np.random.default_rng(num).lognormal(size=num)
    spread = TimeSpread.of(values.tolist())
    found = (spread.p50_ms, spread.low_ms, spread.high_ms, spread.p95_ms, spread.p99_ms, spread.fastest_ms)
    assert found == pytest.approx(np.quantile(values, [0.5, 0.25, 0.75, 0.95, 0.99, 0.0]))


def test_a_layer_is_found_by_its_path_and_an_unknown_path_gets_the_nearest_one() -> None:
    assert REPORT.layer("").kind == "Net"
    report = ProfileReport(layers=(LayerCost("", "Net"), LayerCost("encoder.attention", "Attention"), LayerCost("head", "Linear")))
    with pytest.raises(SondeError, match=r"named 'encoder.atention'.\nNearest: encoder.attention$"):
        report.layer("encoder.atention")
    with pytest.raises(SondeError, match=r"There are: encoder\.attention, head"):
        report.layer(None)  # type: ignore[arg-type]
    with pytest.raises(SondeError, match="has no layers"):
        ProfileReport().layer("head")


@pytest.mark.parametrize("other", [None, "old.json", {}])
def test_a_profile_is_compared_with_a_profile_alone(other: Any) -> None:
    with pytest.raises(SondeError, match=r"takes another ProfileReport, not (None|a str|a dict): new.compare\(old\)"):
        REPORT.compare(other)


def test_a_file_of_the_first_format_is_read_without_percentiles(tmp_path: Path) -> None:
    path = REPORT.save(tmp_path / "profile.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    document["schema"], document["step"] = 1, [10.0, 9.0, 11.0, 10]
    path.write_text(json.dumps(document), encoding="utf-8")
    assert load(path).step[:4] == (10.0, 9.0, 11.0, 10)
    assert math.isnan(load(path).step.p99_ms)

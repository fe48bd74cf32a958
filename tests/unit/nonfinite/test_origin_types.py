"""An origin is plain data: it survives strict JSON, and its summary is readable."""

from __future__ import annotations

import json
import math
import subprocess
import sys

from sonde.nonfinite.origin_types import Origin, TensorSummary

SUMMARY = TensorSummary("input", (32, 10), "float32", 320, 0.0, 0.73, 12, 0, 0)
ORIGIN = Origin(
    kind="inf",
    phase="forward",
    operation="log",
    module="head",
    source="train.py:41",
    text="return torch.log(p)",
    cause="log of 12 zeros among 320 values",
    fix="clamp(min=1e-8) before the logarithm",
    key="log-of-zero",
    inputs=(SUMMARY,),
    output=TensorSummary("", (32, 10), "float32", 320, -9.0, 0.0, 0, 0, 12),
    parameters=("head.weight",),
    samples=(3, 17),
    indices=(1003, 1017),
    caveats=("dropout was off",),
)


def test_an_origin_survives_strict_json():
    assert Origin.from_dict(json.loads(json.dumps(ORIGIN.to_dict(), allow_nan=False))) == ORIGIN


def test_non_finite_numbers_are_written_as_strings():
    infinite = TensorSummary("x", (), "float64", 1, -math.inf, math.inf, 0, 0, 0)
    origin = Origin("nan", "input", "to", "", "", "", "c", "f", "other", inputs=(infinite,))
    data = json.loads(json.dumps(origin.to_dict(), allow_nan=False))
    assert (data["inputs"][0]["low"], data["inputs"][0]["high"]) == ("-Infinity", "Infinity")
    assert Origin.from_dict(data) == origin


def test_samples_that_were_not_searched_differ_from_the_whole_batch():
    unknown = Origin.from_dict(ORIGIN.to_dict() | {"samples": None})
    whole = Origin.from_dict(ORIGIN.to_dict() | {"samples": []})
    assert (unknown.samples, whole.samples) == (None, ())
    assert "samples" not in unknown.summary()
    assert "it takes the whole batch" in whole.summary()


def test_fields_of_later_versions_are_ignored():
    assert Origin.from_dict(ORIGIN.to_dict() | {"weather": "rain"}) == ORIGIN


def test_the_summary_shows_kind_location_cause_and_fix():
    assert ORIGIN.summary().splitlines() == [
        "Inf made by log in head (train.py:41)",
        "    return torch.log(p)",
        "  cause   log of 12 zeros among 320 values",
        "  fix     clamp(min=1e-8) before the logarithm",
        "  inputs  input float32 [32, 10], 0 to 0.73, 12 zeros",
        "  output  float32 [32, 10], -9 to 0, 12 Inf",
        "  weights head.weight",
        "  samples 3, 17 of the batch, 1003, 1017 of the dataset",
        "  note    dropout was off",
    ]
    assert str(ORIGIN) == ORIGIN.summary()


def test_the_summary_lists_at_most_eight_samples():
    many = Origin.from_dict(ORIGIN.to_dict() | {"samples": list(range(100)), "indices": None})
    assert "0, 1, 2, 3, 4, 5, 6, 7 and 92 more of the batch" in many.summary()


def test_reading_an_origin_needs_no_torch():
    code = "import sys, sonde.nonfinite.origin_types; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"

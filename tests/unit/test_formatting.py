"""One value reads the same in every output: numbers, lists, units, layer names, strict JSON."""

import json
import math

import pytest

from sonde.formatting import (
    counted,
    layer_name,
    listing,
    milliseconds,
    number,
    percent,
    rate,
    shorten,
    si_number,
    size,
    strict_json,
    whole_percent,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (3.0, "3"), (1e6, "1e+06"), (-0.5, "-0.5"), (math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")],
)
def test_a_number_has_three_digits_and_non_finite_values_have_names(value, text):
    assert number(value) == text


def test_a_list_names_the_first_and_counts_the_rest():
    assert listing(["a", "b"]) == "a, b"
    assert listing(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_a_count_has_its_plural():
    assert [counted(num, "step") for num in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (percent(0.0001), "< 0.1 %"), (percent(0.013), "1.3 %"), (percent(math.nan), "unknown"),
        (whole_percent(0.001), "<1 %"), (whole_percent(math.nan), "–"),
        (milliseconds(0.0001), "<0.001"), (milliseconds(12.345), "12.3"), (milliseconds(math.nan), "–"),
        (milliseconds(math.inf), "Infinity"),
        (size(512), "512 bytes"), (size(-3 * 2**20), "-3 MiB"), (si_number(1.26e9), "1.26 G"), (si_number(640e3, "B"), "640 kB"),
        (rate(1250.4), "1,250"), (rate(12.34), "12.3"), (rate(math.nan), "–"),
    ],
)  # fmt: skip
def test_a_quantity_has_its_unit_and_a_dash_where_nothing_was_measured(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("path", "type_", "shown"),
    [
        ("4", "Linear", "layer 4 (Linear)"), ("4", "", "layer 4"), ("encoder.4", "Linear", "encoder.4"), ("4.weight", "Linear", "4.weight"),
        ("head", "Linear", "head"), ("", "", ""),
    ],
)  # fmt: skip
def test_only_a_layer_that_is_named_by_a_number_gets_a_longer_name(path, type_, shown):
    assert layer_name(path, type_) == shown


def test_a_long_text_keeps_its_beginning_and_its_end():
    assert shorten("encoder.layers.11.attention.query", 16) == "encod…tion.query"
    assert shorten("head", 16) == "head"


def test_json_is_strict_whatever_is_in_it():
    document = json.loads(strict_json({"loss": [math.nan, -math.inf, 1.5], 3: (True, None), "path": object}), parse_constant=pytest.fail)
    assert document == {"loss": ["NaN", "-Infinity", 1.5], "3": [True, None], "path": str(object)}

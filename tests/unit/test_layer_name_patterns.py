"""Globs, regular expressions, and errors about names that do not exist."""

import logging

import pytest

from sonde.errors import SondeError
from sonde.layer_name_patterns import LayerPatterns, require_name

NAMES = [
    "encoder", "encoder.layer.0", "encoder.layer.0.attention", "encoder.layer.0.attention.query", "encoder.layer.1.attention",
    "encoder.layer.10.attention", "encoder.layer.0.attention_norm", "head",
]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("head", ["head"]),
        ("layer.0", []),  # a name without a wildcard is the whole name
        ("encoder.layer.?.attention", ["encoder.layer.0.attention", "encoder.layer.1.attention"]),
        ("encoder.layer.1.*", ["encoder.layer.1.attention"]),  # not layer 10
        ("attention.*", [name for name in NAMES if "attention" in name]),  # as a regular expression also attention_norm
        ("attention_n.*", ["encoder.layer.0.attention_norm"]),
        ("ttention.*", []),  # not from the middle of a part of the name
        ("encoder.layer.[01].*", [name for name in NAMES if "layer.0" in name or "layer.1." in name]),  # not layer 10
        ("*ead", ["head"]),  # not a regular expression
        ("[[]", []),
        ("*.query", ["encoder.layer.0.attention.query"]),
        ("encoder.*.query", ["encoder.layer.0.attention.query"]),
        ("layer.[01].*", [name for name in NAMES if "layer.0" in name or "layer.1." in name]),
        ("*", NAMES),
        (r"re:layer\.1", ["encoder.layer.1.attention", "encoder.layer.10.attention"]),
        (r"layer\.\d\.attention$", ["encoder.layer.0.attention", "encoder.layer.1.attention"]),
        ("^(encoder|head)$", ["encoder", "head"]),
    ],
)
def test_a_pattern_selects_the_expected_names(pattern, expected):
    assert [name for name in NAMES if LayerPatterns(pattern).matches(name)] == expected


def test_several_patterns_select_each_name_once_and_in_its_order():
    assert LayerPatterns(["head", "enc*der", "h*"]).select(NAMES) == ["encoder", "head"]


@pytest.mark.parametrize("pattern", ["re:layer[", "(encoder", "re:", "", [], [3], 3, None])
def test_an_invalid_pattern_is_refused_at_construction(pattern):
    with pytest.raises(SondeError):
        LayerPatterns(pattern)


def test_a_pattern_that_matches_nothing_warns_once_and_names_the_nearest(caplog):
    patterns = LayerPatterns(["head", "heat*"])
    with caplog.at_level(logging.WARNING, "sonde"):
        assert patterns.select(NAMES) == ["head"]
        assert patterns.select(NAMES) == ["head"]
    (record,) = caplog.records
    assert "'heat*' matches nothing. Nearest: head" in record.getMessage()


def test_a_wrong_name_is_answered_with_the_nearest_names():
    with pytest.raises(SondeError) as caught:
        require_name("encoder.layer.0.atention", NAMES)
    first, second = str(caught.value).splitlines()
    assert first == "no layer is named 'encoder.layer.0.atention'."
    assert second.startswith("Nearest: encoder.layer.0.attention, ")


def test_an_unknown_name_without_a_near_one_is_answered_with_all_names():
    with pytest.raises(SondeError, match=r"There are: encoder, .* and 5 more"):
        require_name("zzz", NAMES)
    with pytest.raises(SondeError, match="There are none"):
        require_name("zzz", [], "parameter")


def test_a_known_name_is_returned():
    assert require_name("head", NAMES) == "head"

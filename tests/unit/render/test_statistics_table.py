"""The table of statistics on a page: what a tensor has nothing of is not shown as a zero."""

from __future__ import annotations

import pytest

from sonde.render.html.report_html import COLUMNS, statistics_cells

NOTHING_FINITE = {"num": 8.0, "mean": 0.0, "std": 0.0, "min": 0.0, "max": 0.0, "l2": 0.0, "zeros": 0.0, "nan": 6.0, "inf": 2.0}


def shown(values: dict[str, float]) -> dict[str, str]:
    return dict(zip(COLUMNS, (text for text, _ in statistics_cells(values))))


def test_a_tensor_without_a_finite_number_has_no_mean_and_no_range():
    cells = shown(NOTHING_FINITE)
    assert (cells["nan"], cells["inf"]) == ("6", "2")
    assert {cells[name] for name in COLUMNS if name not in ("nan", "inf")} == {"–"}


@pytest.mark.parametrize("changed", [{"nan": 5.0}, {"nan": 0.0, "inf": 0.0, "zeros": 8.0}], ids=["one is finite", "all are zero"])
def test_a_tensor_with_a_finite_number_has_them(changed):
    assert shown(NOTHING_FINITE | changed)["mean"] == "0"

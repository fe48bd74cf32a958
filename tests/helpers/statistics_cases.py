"""Shared by the tests of sonde.statistics: every implementation, and reference values by numpy in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sonde.events import STATISTICS
from sonde.statistics import native_extension
from sonde.statistics.tensor_statistics_table import StatisticsTable

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = {
    "native": {"on": True},
    "native-without-dlpack": {"on": True, "use_dlpack": False},
    "native-avx2": {"on": True, "level": 1},
    "native-sse2": {"on": True, "level": 0},
    "torch": {"on": False},
}


@pytest.fixture(name="implementation", params=IMPLEMENTATIONS)
def each_implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """A test with this fixture runs once with each implementation."""
    before = native_extension.ENABLED
    is_enabled = native_extension.use_native(**IMPLEMENTATIONS[request.param])
    if is_enabled != IMPLEMENTATIONS[request.param]["on"]:
        pytest.skip("the native extension is not built here")
    yield request.param
    native_extension.use_native(before)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def synchronized_rows(rows: StatisticsTable) -> list[dict[str, float]]:
    rows.synchronize()
    return [dict(zip(STATISTICS, row)) for row in rows.values.tolist()]


def measured(tensor: torch.Tensor | None) -> dict[str, float]:
    rows = StatisticsTable(3)
    rows.values[:] = 77.0
    rows.measure(1, [tensor])
    rows.synchronize()
    assert (rows.values[[0, 2]] == 77.0).all(), "a neighbouring row was written"
    assert not rows.unsupported, rows.unsupported
    return dict(zip(STATISTICS, rows.values[1].tolist()))


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = tensor.to(torch.complex128).abs()
    return tensor.to(torch.float64).numpy()


def reference(values: np.ndarray) -> dict[str, float]:
    """The statistics by numpy, in long double, because squares may leave the range of float64."""
    finite = values[np.isfinite(values)].astype(np.longdouble).ravel()
    expected = dict.fromkeys(STATISTICS, 0.0)
    expected |= {"num": values.size, "nan": int(np.isnan(values).sum()), "inf": int(np.isinf(values).sum())}
    expected["zeros"] = int((values == 0).sum())
    if finite.size:
        mean = finite.mean()
        expected |= {"mean": float(mean), "std": float(np.sqrt(((finite - mean) ** 2).mean()))}
        expected |= {"min": float(finite.min()), "max": float(finite.max()), "l2": float(np.sqrt((finite**2).sum()))}
    return expected


def assert_right(found: dict[str, float], expected: dict[str, float]) -> None:
    """Counts, minimum and maximum are exact, the rest to 1e-5; for a mean that cancels out, relative to the deviation."""
    for name in ("num", "min", "max", "zeros", "nan", "inf"):
        assert found[name] == expected[name], (name, found, expected)
    magnitude = max(abs(expected["min"]), abs(expected["max"]))
    assert found["l2"] == pytest.approx(expected["l2"], rel=1e-5, abs=0), (found, expected)
    # float64 itself has a rounding error of about this size where the true deviation is zero
    assert found["std"] == pytest.approx(expected["std"], rel=1e-5, abs=1e-12 * magnitude), (found, expected)
    scale = 1e-5 * abs(expected["mean"]) + 1e-6 * expected["std"]
    assert abs(found["mean"] - expected["mean"]) <= scale + 1e-12 * magnitude, (found, expected)


def check(tensor: torch.Tensor) -> None:
    assert_right(measured(tensor), reference(as_numpy(tensor)))

"""What the kernel's tests share: every way through the kernel, and the answers by numpy in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sonde.events import STATISTICS
from sonde.statistics import native
from sonde.statistics.table import StatisticsTable

WAYS = {
    "native": {"on": True},
    "native-by-methods": {"on": True, "by_table": False},
    "native-avx2": {"on": True, "level": 1},
    "native-plain": {"on": True, "level": 0},
    "torch": {"on": False},
}


@pytest.fixture(name="way", params=WAYS)
def each_way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test that asks for it runs once by every way through the kernel."""
    before = native.ENABLED
    in_use = native.use_native(**WAYS[request.param])
    if in_use != WAYS[request.param]["on"]:
        pytest.skip("the native kernel is not built here")
    yield request.param
    native.use_native(before)


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
    """By numpy, in long double where squares could leave float64."""
    finite = values[np.isfinite(values)].astype(np.longdouble).ravel()
    answer = dict.fromkeys(STATISTICS, 0.0)
    answer |= {"num": values.size, "nan": int(np.isnan(values).sum()), "inf": int(np.isinf(values).sum())}
    answer["zeros"] = int((values == 0).sum())
    if finite.size:
        mean = finite.mean()
        answer |= {"mean": float(mean), "std": float(np.sqrt(((finite - mean) ** 2).mean()))}
        answer |= {"min": float(finite.min()), "max": float(finite.max()), "l2": float(np.sqrt((finite**2).sum()))}
    return answer


def assert_right(found: dict[str, float], expected: dict[str, float]) -> None:
    """Counts, minimum and maximum exactly; the rest to 1e-5. A mean that cancels out is compared beside what it is the mean of."""
    for name in ("num", "min", "max", "zeros", "nan", "inf"):
        assert found[name] == expected[name], (name, found, expected)
    magnitude = max(abs(expected["min"]), abs(expected["max"]))
    assert found["l2"] == pytest.approx(expected["l2"], rel=1e-5, abs=0), (found, expected)
    # float64 itself leaves about this much where the true deviation is none
    assert found["std"] == pytest.approx(expected["std"], rel=1e-5, abs=1e-12 * magnitude), (found, expected)
    scale = 1e-5 * abs(expected["mean"]) + 1e-6 * expected["std"]
    assert abs(found["mean"] - expected["mean"]) <= scale + 1e-12 * magnitude, (found, expected)


def check(tensor: torch.Tensor) -> None:
    assert_right(measured(tensor), reference(as_numpy(tensor)))

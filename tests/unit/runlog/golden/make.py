"""Writes the golden run of format 1: python make.py DIRECTORY. Kept to say what is in it; never run again over the files in the repository.

Everything that differs from machine to machine (host, process, times) is fixed here, so the bytes are the same wherever it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from sonde.events import BATCH_FIELDS, STATISTICS, Site
from sonde.runlog import record_format as f

MANIFEST = {"format": 1, "host": "golden", "pid": 1, "rank": 0, "world_size": 1, "started": 1.5e9, "attempt": 0, "sonde": "0.1.0"}
SITES = [
    Site(0, "scalar", "loss"),
    Site(1, "scalar", "lr"),
    Site(2, "parameter", "fc1.weight", "net", "Linear", shape=(3, 4), dtype="float32"),
    Site(3, "parameter", "fc1.bias", "net", "Linear", shape=(3,), dtype="float32", trainable=False),
    Site(4, "output", "naïve \ud800\x00 name", "net", "ReLU", call=1, item=2),
    Site(5, "input", "x"),
]
NUM_STEPS = 5


def gradients(step: int) -> np.ndarray:
    rows = np.arange(18, dtype=np.float64).reshape(2, 9) + step
    rows[1] = [12, np.nan, np.inf, -np.inf, -0.0, 1e-30, 0, 1, 2]
    return rows


def losses(step: int) -> np.ndarray:
    return np.array([[float("nan") if step == 3 else 1.0 / (step + 1)], [0.1]])


def batch(step: int) -> np.ndarray:
    return np.array([[8.0, 0.5, 0.1, 0.0, 1.0, 2.0, 1.0, 0.0, 0.0, 2.0, 2.0**52 - 1 - step]])


def content() -> bytes:
    parts = [f.header(), f.manifest_record(MANIFEST), *f.sites_records(SITES)]
    parts.append(f.event_record("start", 0, 7, {"argv": ["train.py"], "huge": 10**40, "odd": [float("nan"), None, True]}))
    gradient = f.FramePlan("gradient", STATISTICS, [2, 3], exact=False)
    inputs = f.FramePlan("batch", BATCH_FIELDS, [5], exact=True)
    scalars = f.FramePlan("step", ("value",), [0, 1], exact=True)
    exponents = f.FramePlan("gradient_exponents", ("exponent", "count"), [2, 2, 3], exact=False)
    for step in range(NUM_STEPS):
        if step % 2 == 0:
            parts.append(inputs.encode(step, 10 * step, batch(step)))
            parts.append(gradient.encode(step, 10 * step, gradients(step)))
            parts.append(exponents.encode(step, 10 * step, np.array([[-3.0, 5.0], [0.0, 7.0], [-149.0, 1.0]])))
        if step == 3:
            parts.append(f.event_record("nonfinite", 3, 31, {"what": "loss", "where": "", "num_nan": 1}))
            parts.append(f.gap_record(f.Gap(4, 2, 3, "[Errno 28] No space left on device")))
        parts.append(scalars.encode(step, 10 * step + 5, losses(step)))
    parts.append(f.record(77, b"a type that nobody knows"))
    parts.append(f.event_record("end", 4, 50, {"how": "exception", "exit_code": 1, "exception": "ValueError: no"}))
    return b"".join(parts)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True)
    (directory / "run.json").write_text('{"format": 1, "name": "golden", "started": 1500000000.0}\n', encoding="utf-8")
    (directory / "rank0-golden-1-0-000.sonde").write_bytes(content())

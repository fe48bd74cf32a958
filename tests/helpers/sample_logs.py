"""Runs to ill-treat: a small one with every type of record, and trainings without torch in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

import sonde
from sonde.events import STATISTICS, Site
from sonde.runlog import record_format as f

LOSS, LR = Site(0, "scalar", "loss"), Site(1, "scalar", "lr")
WEIGHTS = [Site(10 + i, "parameter", f"layer{i}.weight", "net", "Linear", shape=(8, 8)) for i in range(6)]


def records(num_steps: int) -> list[bytes]:
    """The records of a run, one after the other. Frames tell their step, events carry it."""
    parts = [f.manifest_record({"rank": 0, "host": "h", "pid": 1}), *f.sites_records([LOSS, LR, *WEIGHTS])]
    gradients = f.FramePlan("gradient", STATISTICS, [site.id for site in WEIGHTS], exact=False)
    scalars = f.FramePlan("step", ("value",), [0, 1], exact=True)
    for step in range(num_steps):
        if step % 3 == 0:
            rows = np.random.default_rng(step).normal(size=(len(WEIGHTS), len(STATISTICS)))
            parts.append(gradients.encode(step, step, rows))
        if step % 5 == 0:
            parts.append(f.event_record("log", step, step, {"step": step, "text": "ü" * (step % 50)}))
        parts.append(scalars.encode(step, step, np.array([[1.0 / (step + 1)], [0.1]])))
    parts.append(f.gap_record(f.Gap(3, num_steps, num_steps, "test")))
    parts.append(f.event_record("end", num_steps - 1, 0, {"how": "finished", "exit_code": 0}))
    return parts


def log_of(parts: list[bytes]) -> bytes:
    return f.header() + b"".join(parts)


def write_log(directory: Path, content: bytes, name: str = "rank0-h-1-1-000.sonde") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(content)
    return directory


WRITER = """
import os, sys, signal
from pathlib import Path
import numpy as np
from sonde.events import STATISTICS, Site
from sonde.runlog.writer import Writer

class Training:
    def __init__(self, directory):
        self.writer = Writer(Path(directory))
        self.writer.sites([Site(0, "scalar", "loss"), *(Site(i, "parameter", f"p{i}") for i in range(1, 43))])
        self.scalars = self.writer.plan("step", ("value",), [0])
        self.weights = self.writer.plan("gradient", STATISTICS, range(1, 43))
        self.rows = np.random.default_rng(0).normal(size=(42, 9))

    def step(self, number):
        self.writer.frame(self.weights, number, self.rows)
        self.writer.frame(self.scalars, number, np.array([[float(number)]]))
        self.writer.flush()
"""


def start_training(directory: Path, code: str, **rest: Any) -> subprocess.Popen[bytes]:
    """A process without torch in which `training = Training(directory)` can be used."""
    environment = os.environ | {"PYTHONPATH": str(Path(sonde.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    program = f"{WRITER}\ndirectory = sys.argv[1]\n{textwrap.dedent(code)}"
    command = [sys.executable, "-X", "faulthandler=0", "-c", program, str(directory)]
    return subprocess.Popen(command, env=environment, **rest)

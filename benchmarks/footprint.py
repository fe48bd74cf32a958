"""What Sonde takes besides time per step: attaching, importing, bytes on disk, memory; and how fast a run is written and read.

    python benchmarks/footprint.py [--quick] [--json out.json]

Times are process CPU time, the best of a few: what the code needs, not what the machine was busy with. A row over its budget
ends the program with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

import numpy as np
import torch
from machine import facts
from torch import nn
from workloads import WORKLOADS, Training

import sonde
from sonde.events import STATISTICS, STEP_SCALARS, Kind, Site
from sonde.runlog.writer import Writer

NUM_MODULES = 5000
NUM_SITES = 42  # of each kind in the synthetic run: the MLP's
STATISTICS_KINDS = (Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT, Kind.PARAMETER, Kind.GRADIENT, Kind.UPDATE)
WARM_STEPS = 5000  # before memory is looked at: allocators and caches have filled by then

_MEMORY = """
import sys, psutil, torch, sonde
from torch import nn
torch.set_num_threads(1)
num_warm, num_steps, run = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
inputs = torch.randn(8, 4)
def train(num):
    for _ in range(num):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return psutil.Process().memory_info().rss
with sonde.watch(model, optimizer, to=run, strict=True):
    before = train(num_warm)
    print(train(num_steps) - before)
"""
_IMPORT = "import sys, time; t = time.process_time(); import sonde; print(time.process_time() - t); assert 'torch' not in sys.modules"


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    value: float
    unit: str
    budget: float | None = None

    @property
    def is_over(self) -> bool:
        return self.budget is not None and self.value > self.budget

    @property
    def verdict(self) -> str:
        if self.budget is None:
            return ""
        return f"{'over' if self.is_over else 'within'} budget ({self.budget:g} {self.unit})"


def best(call: Callable[[], float], num: int) -> float:
    return min(call() for _ in range(num))


def attach(scratch: Path) -> Iterator[Row]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(NUM_MODULES - 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def once() -> float:
        directory = tempfile.mkdtemp(dir=scratch)
        started = process_time()
        session = sonde.watch(model, optimizer, to=directory)
        elapsed_s = process_time() - started
        session.close()
        return elapsed_s

    yield Row(f"attach to {NUM_MODULES} modules", best(once, 3), "s", 2.0)


def starting(quick: bool) -> Iterator[Row]:
    num = 3 if quick else 7
    yield Row("import sonde (without torch)", best(lambda: float(_child("-c", _IMPORT)), num) * 1e3, "ms", 100.0)

    def helped() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _child("-m", "sonde", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3

    yield Row("sonde --help (whole process)", best(helped, num), "ms", 300.0)


def _child(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def log_size(scratch: Path, quick: bool) -> Iterator[Row]:
    for workload in WORKLOADS[:1] if quick else WORKLOADS:
        num_bytes, _ = _bytes_of_run(scratch, workload.name, every=1, num_steps=16)
        yield Row(f"log of the {workload.name}, every step", num_bytes / 1e3, "kB a step")
    num_bytes, num_observed = _bytes_of_run(scratch, "mlp", every=None, num_steps=1000)
    yield Row(f"log of the mlp, default ({num_observed} of 1000 steps observed)", num_bytes / 1e3, "kB a step")


def _bytes_of_run(scratch: Path, name: str, *, every: int | None, num_steps: int) -> tuple[float, int]:
    training = Training(next(workload for workload in WORKLOADS if workload.name == name))
    directory = Path(tempfile.mkdtemp(dir=scratch))
    session = sonde.watch(training.model, training.optimizer, to=directory, every=every)
    for _ in range(num_steps):
        training.step()
    session.close()
    _, observed = sonde.Run(directory).scalar("observed")
    return _size(directory) / num_steps, int(observed.sum())


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.sonde"))


def run_speed(scratch: Path, num_steps: int) -> Iterator[Row]:
    """A synthetic run with everything at every step, of the MLP's shape."""
    directory = Path(tempfile.mkdtemp(dir=scratch))
    rows = np.random.default_rng(0).normal(size=(NUM_SITES, len(STATISTICS)))
    scalars = np.ones((len(STEP_SCALARS), 1))
    writer = Writer(directory)
    writer.sites([Site(id=i, kind="scalar", path=name) for i, name in enumerate(STEP_SCALARS)])
    offset = len(STEP_SCALARS)
    writer.sites([Site(id=offset + i, kind="parameter", path=f"layer{i}.weight") for i in range(NUM_SITES)])
    plans = [writer.plan(kind, STATISTICS, range(offset, offset + NUM_SITES)) for kind in STATISTICS_KINDS]
    step_plan = writer.plan(Kind.STEP, ("value",), range(offset))
    started = process_time()
    for step in range(num_steps):
        for plan in plans:
            writer.frame(plan, step, rows)
        writer.frame(step_plan, step, scalars)
        writer.flush()
    elapsed_s = process_time() - started
    writer.close()
    num_mb = _size(directory) / 1e6
    yield Row("write a run", num_mb / elapsed_s, "MB/s")
    yield Row("write a run", num_steps / elapsed_s, "steps/s")

    started = process_time()
    run = sonde.Run(directory)
    open_s = process_time() - started
    yield Row(f"open a run of {num_mb:.0f} MB, {num_steps} steps", open_s * 1e3, "ms")
    started = process_time()
    num_read = sum(1 for _ in run.steps())
    elapsed_s = process_time() - started
    assert num_read == num_steps, f"{num_read} of {num_steps} steps came back"
    yield Row("read all steps", num_mb / elapsed_s, "MB/s")
    yield Row("read all steps", num_steps / elapsed_s, "steps/s")
    started = process_time()
    steps, _ = run.series(Kind.GRADIENT, "layer0.weight", "l2")
    assert len(steps) == num_steps, f"{len(steps)} of {num_steps} steps in the series"
    yield Row("read one series of it", (process_time() - started) * 1e3, "ms")


def memory(scratch: Path, num_steps: int) -> Iterator[Row]:
    run = tempfile.mkdtemp(dir=scratch)
    grown = float(_child("-c", _MEMORY, str(WARM_STEPS), str(num_steps), run))
    yield Row(f"growth of memory over {num_steps:,} steps", grown / 2**20, "MiB", 1.0)


def measure(scratch: Path, quick: bool) -> Iterator[Row]:
    yield from starting(quick)
    yield from attach(scratch)
    yield from log_size(scratch, quick)
    yield from run_speed(scratch, 1000 if quick else 10_000)
    yield from memory(scratch, 10_000 if quick else 100_000)


def main() -> int:
    parser = argparse.ArgumentParser(description="What Sonde takes besides time per step.")
    parser.add_argument("--quick", action="store_true", help="fewer steps: a first look, not numbers to publish")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(facts() + "\n")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for each in measure(Path(scratch), arguments.quick):
            print(f"{each.what:56}{each.value:10,.1f} {each.unit:10} {each.verdict}".rstrip(), flush=True)
            rows.append(each)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": facts(), "rows": [asdict(each) for each in rows]}, indent=1) + "\n")
    num_over = sum(each.is_over for each in rows)
    print(f"\n{num_over} over budget" if num_over else "\nall within budget")
    return 1 if num_over else 0


if __name__ == "__main__":
    sys.exit(main())

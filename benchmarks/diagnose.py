"""How long `sonde diagnose` takes, and how much memory, for long runs.

    python benchmarks/diagnose.py [--old SRC] [--case NAME]

A real training is recorded (a 5-layer MLP, or a model of 100 layers) and its log is extended by its own records with later step numbers, up
to the wanted length. Time is CPU time of the process (user and system), less that of `sonde --help`. `--old` measures another version of
Sonde on the same logs: the `src` directory of a checkout. The exit code is 1 if a budget does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from sonde.events import Kind
from sonde.runlog import record_format as f
from sonde.runlog.find_record_boundaries import scan

ROUNDS = 3

RECORD = """
import sys, torch, sonde
from torch import nn
num_layers, every, num_steps, to = int(sys.argv[1]), int(sys.argv[2]) or None, int(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
width = 64
layers = [part for _ in range(num_layers - 1) for part in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(width, 10))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
with sonde.watch(model, optimizer, to=to, every=every):
    for step in range(num_steps):
        x, y = torch.randn(32, width), torch.randint(10, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


class Case(NamedTuple):
    num_steps: int
    num_layers: int
    every: int  # 0: by the overhead budget
    recorded: int  # steps of the real training
    max_cpu_s: float
    max_mb: float


CASES = {
    "100k-5": Case(100_000, 5, 0, 5000, 2.0, 300),
    "100k-100": Case(100_000, 100, 50, 500, 5.0, 500),
    "1m-5": Case(1_000_000, 5, 0, 5000, 20.0, 1000),  # ten times the steps of the first case, at most ten times its time
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, metavar="SRC", help="src directory of another version, measured on the same logs")
    parser.add_argument("--case", choices=CASES, help="one case only")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    is_within = True
    with tempfile.TemporaryDirectory() as directory:
        for name in [chosen.case] if chosen.case else CASES:
            is_within &= measure_case(name, CASES[name], Path(directory), chosen.old, chosen.rounds)
    return 0 if is_within else 1


def measure_case(name: str, case: Case, directory: Path, old: Path | None, rounds: int) -> bool:
    run = directory / name
    command = [sys.executable, "-c", RECORD, str(case.num_layers), str(case.every), str(case.recorded), str(run)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (log,) = run.glob("*.sonde")
    extend(log, case.recorded, case.num_steps)
    new = [measure(run, None) for _ in range(rounds)]
    cpu_s, mb = median(each[0] for each in new), max(each[1] for each in new)
    print(f"{name}: {case.num_steps:,} steps, {case.num_layers} layers, {log.stat().st_size / 1e6:.0f} MB", flush=True)
    print(f"  this version: {cpu_s:.2f} s CPU ({min(c for c, _ in new):.2f} to {max(c for c, _ in new):.2f}), {mb:.0f} MB;", end=" ")
    print(f"goal {case.max_cpu_s:g} s, {case.max_mb:g} MB", flush=True)
    if old is not None:
        old_cpu_s, old_mb = measure(run, old)
        print(f"  {old}: {old_cpu_s:.2f} s CPU, {old_mb:.0f} MB", flush=True)
    log.unlink()
    return cpu_s <= case.max_cpu_s and mb <= case.max_mb


def measure(run: Path, source: Path | None) -> tuple[float, float]:
    """CPU seconds beyond `sonde --help`, and peak memory in MB."""
    help_s, _ = resources(["--help"], source)
    cpu_s, mb = resources(["diagnose", str(run), "--json"], source)
    return cpu_s - help_s, mb


def resources(arguments: list[str], source: Path | None) -> tuple[float, float]:
    environment = dict(os.environ, **({"PYTHONPATH": str(source)} if source else {}))
    process = subprocess.Popen([sys.executable, "-m", "sonde", *arguments], env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise SystemExit(f"sonde {' '.join(arguments)} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def extend(log: Path, num_recorded: int, num_steps: int) -> None:
    """Repeat the records of the settled part of a training (its second half) with later step numbers."""
    data = log.read_bytes()
    records = [(found.type, data[found.start : found.end]) for found in scan(data, f.HEADER_BYTES).records]
    half = num_recorded // 2
    steps = [_step(type_, payload) for type_, payload in records]
    first = next(index for index, (step, (type_, payload)) in enumerate(zip(steps, records)) if _is_step(type_, payload) and step >= half)
    body = [(step, type_, payload) for step, (type_, payload) in zip(steps, records) if step is not None and half <= step < num_recorded]
    last = max(index for index, (type_, payload) in enumerate(records) if _is_step(type_, payload))
    tail = [f.record(type_, _moved(type_, payload, num_steps)) for type_, payload in records[last + 1 :]]
    assert first < last
    with log.open("wb") as file:
        file.write(f.header())
        for type_, payload in records[: last + 1]:
            file.write(f.record(type_, payload))
        offset = num_recorded - half
        while half + offset < num_steps:
            for step, type_, payload in body:
                if step + offset < num_steps:
                    file.write(f.record(type_, _moved(type_, payload, step + offset)))
            offset += num_recorded - half
        file.writelines(tail)


def _is_step(type_: int, payload: bytes) -> bool:
    return type_ == f.FRAME and f.layout(payload).kind == Kind.STEP


def _step(type_: int, payload: bytes) -> int | None:
    if type_ == f.FRAME:
        return int.from_bytes(payload[:8], "little", signed=True)
    return f.event(payload)[0].step if type_ == f.EVENT else None


def _moved(type_: int, payload: bytes, step: int) -> bytes:
    if type_ == f.FRAME:
        return step.to_bytes(8, "little", signed=True) + payload[8:]
    if type_ == f.EVENT:
        return json.dumps(json.loads(payload) | {"step": step}).encode()
    return payload


if __name__ == "__main__":
    sys.exit(main())

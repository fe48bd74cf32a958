"""What profiling costs: time of a profiled step over that of a bare one, for Sonde's profiler and for torch's at the same detail.

    python benchmarks/profiler.py                    about ten minutes
    python benchmarks/profiler.py --quick            a first look

All take turns in one process, as in overhead.py. The detail is forward and backward time of every layer, for every step. torch.profiler
records what a report by layer needs (shapes, memory, FLOPs, modules); its last row also converts its events into averages, without which
there is nothing to read. Sonde's row includes its report. Exit code 1: Sonde is not the cheapest on every workload.
"""

from __future__ import annotations

import argparse
import sys
from time import thread_time_ns
from typing import Any

import torch
from machine import facts
from overhead import BARE, HEADING, Row, row, show, table, take_turns
from peers import Watcher
from workloads import WORKLOADS, Training, Workload, prepare

from sonde.capture import torch_patches
from sonde.profiler.profile_model import profile_model
from sonde.profiler.profile_training_loop import StepWatcher

SONDE = "Sonde, every layer, every step"


class Sonde(Watcher):
    """Steps of a live training, all of them timed; the report is made at the end of the turn."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._watcher: StepWatcher | None = None

    def begin(self) -> None:
        self._watcher = StepWatcher([self._training.model], 1_000_000, 0, None)
        self._watcher._plan = ["timed"] * 1_000_000
        torch_patches.subscribe(self._watcher)

    def flush(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher.report()
            self._watcher = None


class Torch(Watcher):
    def __init__(self, training: Training, *, averages: bool, **detail: bool) -> None:
        self._averages, self._detail = averages, detail
        self._profile: Any = None

    def begin(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **self._detail)
        self._profile.start()

    def flush(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            if self._averages:
                self._profile.key_averages()
            self._profile = None


DETAIL = {"record_shapes": True, "profile_memory": True, "with_flops": True, "with_modules": True}


def rows(workload: Workload, num_rounds: int) -> list[Row]:
    bare = Training(workload)
    trainings = [Training(workload) for _ in range(4)]
    watchers: dict[str, Watcher] = {
        SONDE: Sonde(trainings[0]),
        "torch.profiler, default settings": Torch(trainings[1], averages=False),
        "torch.profiler, same detail": Torch(trainings[2], averages=False, **DETAIL),
        "torch.profiler, same detail, averaged": Torch(trainings[3], averages=True, **DETAIL),
    }
    num_steps = max(2, workload.chunk // 3)
    times = take_turns(workload, [(t, w, num_steps) for t, w in zip(trainings, watchers.values())], [bare], num_rounds)
    found = [row(workload, BARE, [(bare, bare) for _, bare in times[0]])]
    return found + [row(workload, name, each) for name, each in zip(watchers, times)]


def accounted(workload: Workload, repeats: int) -> str:
    """How much of the bare step, by the clock of the training thread, the layers and the named remainder add up to."""
    training = Training(workload)
    report, _ = profile_model(
        training.model, (training.inputs,), {}, loss=training.loss,
        optimizer=training.optimizer, warmup=2, repeats=repeats, backward=True, read=thread_time_ns,
    )  # fmt: skip
    share = report.accounted_ms / report.step.median_ms
    return f"{workload.name:12} layers and remainder add up to {share:.1%} of the step of {report.step.median_ms:.2f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description="What profiling costs, as a ratio of CPU time to the bare training.")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--quick", action="store_true", help="few rounds: a first look, not numbers to publish")
    parser.add_argument("--only", choices=[workload.name for workload in WORKLOADS], action="append", help="this workload; may be repeated")
    arguments = parser.parse_args()
    prepare(arguments.threads)
    print(f"{facts()}\n\n{HEADING}")
    found: list[Row] = []
    for workload in WORKLOADS:
        if not arguments.only or workload.name in arguments.only:
            for each in rows(workload, 3 if arguments.quick else 11):
                show(each)
                found.append(each)
    print("\n" + table(found) + "\n")
    for workload in WORKLOADS:
        if not arguments.only or workload.name in arguments.only:
            print(accounted(workload, workload.chunk), flush=True)
    ours = {each.workload: each.ratio for each in found if each.variant == SONDE}
    dearer = [each for each in found if each.variant.startswith("torch.profiler, same") and each.ratio < ours[each.workload]]
    print(f"\ncheaper than Sonde: {', '.join(f'{e.variant} ({e.workload})' for e in dearer)}" if dearer else "\nSonde costs least")
    return 1 if dearer else 0


if __name__ == "__main__":
    sys.exit(main())

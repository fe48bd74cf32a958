"""torch computes with more threads than there are cores.

What it finds    torch.set_num_threads, OMP_NUM_THREADS or a default that counts cores which this process may not use (a container's quota).
Why it matters   the threads of one operation wait for each other at its end; with more threads than cores one of them is always waiting for
                 a core, and so all wait. A step may take several times as long.
How it knows     two numbers: the threads that torch uses for an operation, and the cores that this process may run on (its affinity and
                 the quota of its container). How often the process was pushed off a core stands beside them as evidence.
Known problems   the workers of a DataLoader use one thread each, and wait for a disk as often as they compute: they are not counted. Other
                 programs on the same machine are not seen. What fewer threads gain depends on the operations: measured on two cores
                 with 8 and 16 threads, steps took 2 to 10 times as long; less than half of that is promised.
Fix              use as many threads as there are cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Step
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.timing import Timing, Xrays, severity, with_gain
from sonde.rules.words import amount, number

MOST_GAIN = 0.4  # promised, however many threads there are


@dataclass(slots=True)
class CpuOversubscribed:
    name: ClassVar[str] = "cpu-oversubscribed"
    explains: ClassVar[tuple[str, ...]] = ("slow-layer", "unfused-optimizer")

    timing: Timing = field(default_factory=Timing)
    xrays: Xrays = field(default_factory=Xrays)

    def see(self, step: Step) -> None:
        self.timing.see(step)
        self.xrays.see(step)

    def answer(self) -> Answer:
        timing = self.timing
        if reason := timing.too_short():
            return NotEvaluated(reason)
        machine = self.xrays.machine
        if not machine:
            return NotEvaluated("no step was looked at closely")
        threads, cores = amount(machine, "threads"), amount(machine, "cores")
        if not cores or threads <= max(cores, 1):
            return Clear()
        gain = min(MOST_GAIN, (1 - max(cores, 1) / threads) / 2) * timing.share("forward", "backward", "optimizer")
        if not timing.worth(gain):
            return Clear()
        pushed = amount(machine, "pushed_off_per_s")
        fitting = max(int(cores), 1)
        return [
            Finding(
                rule=self.name,
                severity=severity(gain),
                where="",
                step=self.xrays.first_step,
                cause=f"torch computes with {number(threads)} threads on {number(cores)} cores; the process was pushed off a core "
                f"{number(pushed)} times a second",
                fix=with_gain(f"call torch.set_num_threads({fitting}), or set OMP_NUM_THREADS={fitting}", gain),
                evidence={
                    "gain": gain, "threads": threads, "cores": cores, "pushed_off_per_s": pushed, "load": amount(machine, "load"),
                },
            )
        ]  # fmt: skip

"""What watching costs inside of a framework: time per step of Lightning, of the Trainer of transformers and of a loop of accelerate, with
Sonde's callback over without it.

    python benchmarks/integrations.py                    more than an hour (needs: pip install -e '.[bench]')
    python benchmarks/integrations.py --workload mlp     the smallest workload, where every microsecond shows
    python benchmarks/integrations.py --only accelerate --workload conv --nobody
                                                         neither of the two is watched: the distance from 1 is noise

A framework has its own loop, so each of the two trainings, bare and watched, is a greenlet: a few steps of the one, then a few of the
other, with Sonde paused meanwhile. They share one thread, because threads have heaps of their own, and two equal trainings in two threads
differ by up to 5 % for as long as they live. A ratio is to the bare steps just before and after, as in overhead.py, for process CPU time
and for wall time. The densely observed start of a run is left out. Budgets are on CPU time and are judged as in overhead.py: at most the
budget plus 0.01 over at least 20 rounds, in two runs. Exit code 1: a budget does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import logging
import signal
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from machine import facts
from torch import nn
from torch.utils.data import DataLoader
from workloads import MIN_ROUNDS, NUM_RUNS, WORKLOADS, Training, Workload, is_over_budget, prepare

import sonde

WARM_TURNS = 5  # times as many steps as are timed: the cost of an expensive first observation is made up for by then


class Lane:
    """One of the two trainings: `step` is called after every step and switches to the other one after each slice."""

    def __init__(self, workload: Workload, num_rounds: int) -> None:
        self._num_start = WARM_TURNS * workload.chunk
        self._num_warm, self._num_timed = workload.num_warm, workload.num_in_slice  # of a slice
        self._num_in_slice = self._num_warm + self._num_timed
        self.num_steps = self._num_start + num_rounds * (workload.chunk // workload.num_in_slice) * self._num_in_slice
        self.session: Callable[[], sonde.DebugSession | None] = lambda: None
        self._run: Path | None = None
        self.cpu_ms: list[float] = []  # per step, by slice
        self.wall_ms: list[float] = []
        self._num, self._cpu_s, self._wall_s = 0, 0.0, 0.0

    def step(self) -> None:
        """A step has ended."""
        self._num += 1
        num_past_start = self._num - self._num_start
        if num_past_start < 0:
            return
        place = num_past_start % self._num_in_slice
        if place == 0:
            if num_past_start:
                self.cpu_ms.append((process_time() - self._cpu_s) * 1e3 / self._num_timed)
                self.wall_ms.append((perf_counter() - self._wall_s) * 1e3 / self._num_timed)
            if self._num < self.num_steps:
                self._switch()
        if place == self._num_warm:
            self._cpu_s, self._wall_s = process_time(), perf_counter()

    def _switch(self) -> None:
        session = self.session()
        self._run = session.run if session is not None else None
        with session.pause() if session is not None else contextlib.nullcontext():
            getcurrent().parent.switch()

    def observed(self) -> list[bool]:
        """For each step after the start: whether it was observed. A low ratio says little if nothing was."""
        return [] if self._run is None else [bool(value) for value in sonde.Run(self._run).scalar("observed")[1]][self._num_start :]


def by_lightning(workload: Workload, lane: Lane, to: Path | None) -> None:
    import lightning.pytorch as pl

    from sonde.integrations.lightning import SondeCallback

    training = Training(workload)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return training.loss(self.model(training.inputs))

        def on_train_batch_end(self, *args: Any) -> None:
            lane.step()

        def configure_optimizers(self) -> Any:
            return training.optimizer

    callbacks = [SondeCallback(to=to)] if to else []
    lane.session = lambda: callbacks[0].session if callbacks else None
    pl.Trainer(
        max_steps=lane.num_steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks,
    ).fit(Module(), DataLoader(range(lane.num_steps), batch_size=1))  # fmt: skip


def by_trainer(workload: Workload, lane: Lane, to: Path | None) -> None:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from sonde.integrations.transformers import SondeCallback

    training = Training(workload)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def forward(self, number: Any) -> Any:
            return {"loss": training.loss(self.model(training.inputs))}

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            lane.step()

    callbacks = [SondeCallback(to=to)] if to else []
    lane.session = lambda: callbacks[0].session if callbacks else None
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch, max_steps=lane.num_steps, per_device_train_batch_size=1, report_to="none", save_strategy="no",
            logging_strategy="no", disable_tqdm=True, use_cpu=True, log_level="error", dataloader_pin_memory=False, max_grad_norm=0.0,
        )  # fmt: skip
        trainer = Trainer(
            model=WithLoss(), args=arguments, train_dataset=[{"number": torch.tensor([i])} for i in range(lane.num_steps)],
            callbacks=[Watch(), *callbacks], optimizers=(training.optimizer, None),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def by_accelerate(workload: Workload, lane: Lane, to: Path | None) -> None:
    from accelerate import Accelerator

    from sonde.integrations.accelerate import SondeTracker

    training = Training(workload)
    tracker = SondeTracker(to=to) if to else None
    lane.session = lambda: tracker.session if tracker else None
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("benchmark")
    model, optimizer = accelerator.prepare(training.model, training.optimizer)
    for _ in range(lane.num_steps):
        optimizer.zero_grad()
        accelerator.backward(training.loss(model(training.inputs)))
        optimizer.step()
        lane.step()
    accelerator.end_training()


WAYS: dict[str, Callable[[Workload, Lane, Path | None], None]] = {
    "lightning": by_lightning,
    "transformers": by_trainer,
    "accelerate": by_accelerate,
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What was found in one framework."""

    step_ms: float  # of a bare step
    ratios: list[float]  # of CPU time, one per round
    wall_ratios: list[float]
    observed: list[bool]

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            (self.step_ms + other.step_ms) / 2, self.ratios + other.ratios, self.wall_ratios + other.wall_ratios,
            self.observed + other.observed,
        )  # fmt: skip


def cost(way: str, workload: Workload, num_rounds: int, to: Path | None) -> Cost:
    """Without `to`, nothing is watched. Of two equal trainings the one that was created first may be slower for good: in half of the rounds
    that is the bare one, in half the watched one."""
    return cost_where(way, workload, num_rounds // 2, to and to / "0", 0) + cost_where(way, workload, num_rounds // 2, to and to / "1", 1)


def cost_where(way: str, workload: Workload, num_rounds: int, to: Path | None, first: int) -> Cost:
    """The same; `first`: the bare one (0) or the watched one (1) is created first, and begins."""
    bare, watched = Lane(workload, num_rounds), Lane(workload, num_rounds)
    trainings = [greenlet(lambda: WAYS[way](workload, bare, None)), greenlet(lambda: WAYS[way](workload, watched, to))]
    gc.collect()
    gc.freeze()  # objects of the libraries are not collected in somebody's turn
    by_default = signal.getsignal(signal.SIGTERM)
    while any(not training.dead for training in trainings):
        for training in trainings if first == 0 else reversed(trainings):
            if not training.dead:
                training.switch()
    signal.signal(signal.SIGTERM, by_default)  # two Trainers of Lightning restore each other's handler, which would ignore SIGTERM
    num = workload.chunk // workload.num_in_slice
    cpu, wall = (ratios(each[0], each[1][first:], num) for each in ((bare.cpu_ms, watched.cpu_ms), (bare.wall_ms, watched.wall_ms)))
    return Cost(statistics.median(bare.cpu_ms), cpu, wall, watched.observed())


def ratios(bare_ms: list[float], watched_ms: list[float], num: int) -> list[float]:
    """One per round of `num` slices; each watched slice is between two bare ones."""
    beside = [(before + after) / 2 for before, after in itertools.pairwise(bare_ms)]
    rounds = [slice(start, start + num) for start in range(0, len(beside), num)]
    return [sum(watched_ms[each][: len(beside[each])]) / sum(beside[each]) for each in rounds if beside[each]]


def spread(found: list[float]) -> str:
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WAYS, help="one framework")
    parser.add_argument("--workload", choices=[workload.name for workload in WORKLOADS], help="one workload")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"turns of each (default: {MIN_ROUNDS}, as judging takes)")
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help=f"times each is measured (default: {NUM_RUNS}, as judging takes)")
    parser.add_argument("--nobody", action="store_true", help="without Sonde: the ratio of two bare trainings")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: at least 2, one for each order of the two trainings")
    prepare(1)
    warnings.simplefilter("ignore")  # those of the frameworks about themselves
    logging.disable(logging.WARNING)
    print(f"{facts()}\n\n| | workload | bare step | CPU ratio (quartiles) | wall ratio (quartiles) | budget | steps observed |")
    print("|---|---|---|---|---|---|---|")
    over = False
    with tempfile.TemporaryDirectory() as scratch:
        for run in range(options.runs):
            for workload in (workload for workload in WORKLOADS if options.workload in (None, workload.name)):
                for way in WAYS if options.only is None else [options.only]:
                    to = None if options.nobody else Path(scratch) / f"{way}-{workload.name}-{run}"
                    found = cost(way, workload, options.rounds, to)
                    budget = workload.default_budget if way == "accelerate" else workload.framework_budget
                    is_judged = options.rounds >= MIN_ROUNDS and not options.nobody
                    over = over or (is_judged and is_over_budget(statistics.median(found.ratios), budget))
                    share = f"{statistics.mean(found.observed):.1%}" if found.observed else "–"
                    cells = [way, workload.name, f"{found.step_ms:.2f} ms", spread(found.ratios), spread(found.wall_ratios)]
                    print(f"| {' | '.join([*cells, f'{budget:.2f}', share])} |", flush=True)
    if options.rounds < MIN_ROUNDS or options.runs < NUM_RUNS:
        print(f"\nno verdict on budgets: that takes {NUM_RUNS} runs of at least {MIN_ROUNDS} rounds")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())

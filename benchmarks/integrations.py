"""What watching costs inside of a framework: CPU time per step of Lightning, of the Trainer of transformers and of a loop of accelerate,
with Sonde's callback over without it.

    python benchmarks/integrations.py                    about a quarter of an hour
    python benchmarks/integrations.py --quick            a first look: the smallest workload, where every microsecond shows

A framework has its own loop, so the two trainings, bare and watched, run in two threads of which only one has the baton: a few steps of
the one, then a few of the other, with Sonde paused meanwhile. A ratio is to the bare steps just before and after, as in overhead.py. The
densely observed start of a run is not in it. Exit code 1: a framework is over its budget, which is that of a loop by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import statistics
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch
from machine import facts
from torch import nn
from torch.utils.data import DataLoader
from workloads import WORKLOADS, Training, Workload, prepare

import sonde

NUM_ROUNDS = 10
WARM_TURNS = 5  # times as many steps as are timed: an expensive first observation is paid off by then, and what follows is how it goes on


class Lane:
    """One of the two trainings: it is told of every step, and passes the baton on after each slice."""

    def __init__(self, workload: Workload, num_rounds: int) -> None:
        self.num_warm = WARM_TURNS * workload.chunk
        self._num_timed = workload.num_in_slice  # and one more before them is not
        self.num_steps = self.num_warm + num_rounds * (workload.chunk // workload.num_in_slice) * (1 + self._num_timed)
        self.baton = threading.Semaphore(0)
        self.other: Lane | None = None
        self.session: Callable[[], sonde.Session | None] = lambda: None
        self.slices_ms: list[float] = []  # per step
        self.error: BaseException | None = None
        self._num, self._began = 0, 0.0

    def step(self) -> None:
        """A step has ended."""
        self._num += 1
        place = (self._num - self.num_warm) % (1 + self._num_timed)
        if self._num < self.num_warm or place > 1:
            return
        if place == 1:
            self._began = process_time()
            return
        if self._num > self.num_warm:
            self.slices_ms.append((process_time() - self._began) * 1e3 / self._num_timed)
        if self._num < self.num_steps:
            self._pass_on()

    def _pass_on(self) -> None:
        session = self.session()
        assert self.other is not None
        with session.pause() if session is not None else contextlib.nullcontext():
            self.other.baton.release()
            self.baton.acquire()

    def run(self, train: Callable[[], None]) -> None:
        self.baton.acquire()
        try:
            prepare(1)  # some of it is a thread's own
            train()
        except BaseException as error:
            self.error = error
        finally:
            assert self.other is not None
            self.other.baton.release()


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


def ratios(way: str, workload: Workload, num_rounds: int, to: Path) -> tuple[float, list[float]]:
    """Milliseconds of a bare step, and one ratio per round. Of two equal trainings the one that was made first may be slower for good: in
    half of the rounds that is the bare one, in half the watched one."""
    halves = [ratios_where(way, workload, num_rounds // 2, to / str(first), first) for first in (0, 1)]
    return statistics.median(step_ms for step_ms, _ in halves), sorted(ratio for _, found in halves for ratio in found)


def ratios_where(way: str, workload: Workload, num_rounds: int, to: Path, first: int) -> tuple[float, list[float]]:
    """The same where the bare one (0) or the watched one (1) is made first, and begins."""
    lanes = bare, watched = Lane(workload, num_rounds), Lane(workload, num_rounds)
    bare.other, watched.other = watched, bare
    threads = [
        threading.Thread(target=bare.run, args=[lambda: WAYS[way](workload, bare, None)]),
        threading.Thread(target=watched.run, args=[lambda: WAYS[way](workload, watched, to)]),
    ]
    gc.collect()
    gc.freeze()  # what the libraries hold need not be gone through again in somebody's turn
    for thread in threads:
        thread.start()
    lanes[first].baton.release()
    for thread in threads:
        thread.join()
    for lane in lanes:
        if lane.error is not None:
            raise lane.error
    beside = [(before + after) / 2 for before, after in zip(bare.slices_ms, bare.slices_ms[1:])]
    between = watched.slices_ms[first:]  # each between two bare ones
    num = workload.chunk // workload.num_in_slice
    rounds = [slice(start, start + num) for start in range(0, len(beside), num)]
    found = [sum(between[each][: len(beside[each])]) / sum(beside[each]) for each in rounds if beside[each]]
    return statistics.median(bare.slices_ms), found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one workload")
    parser.add_argument("--only", choices=WAYS, help="one framework")
    options = parser.parse_args()
    prepare(1)
    warnings.simplefilter("ignore")  # those of the frameworks about themselves
    logging.disable(logging.WARNING)
    print(f"{facts()}\n\n| | workload | bare step | ratio (quartiles) | budget |\n|---|---|---|---|---|")
    over = False
    with tempfile.TemporaryDirectory() as scratch:
        for workload in WORKLOADS[:1] if options.quick else WORKLOADS:
            for way in WAYS if options.only is None else [options.only]:
                step_ms, found = ratios(way, workload, NUM_ROUNDS, Path(scratch) / f"{way}-{workload.name}")
                low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
                budget = workload.default_budget
                over = over or middle > budget
                print(f"| {way} | {workload.name} | {step_ms:.2f} ms | {middle:.3f} ({low:.3f}–{high:.3f}) | {budget:.2f} |", flush=True)
    return int(over)


if __name__ == "__main__":
    sys.exit(main())

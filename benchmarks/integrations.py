"""What watching costs inside of a framework: CPU time per step of Lightning, of the Trainer of transformers and of a loop of accelerate,
with Sonde's callback over without it.

    python benchmarks/integrations.py                    about twenty minutes
    python benchmarks/integrations.py --quick            a first look: the smallest workload, where every microsecond shows

Whole trainings take turns in one process, bare and watched, each from the same seed; a ratio is to the bare trainings just before and
after. Both are timed by the same stopwatch after a number of steps, so that neither building the framework's objects nor the densely
observed start of a run is in it, nor looking back from a step whose loss leapt. Exit code 1: a framework is over its budget, which is
that of a loop by hand.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import tempfile
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

WARM_TURNS = 5  # times as many steps as are timed: an expensive first observation is paid off by then, and what follows is how it goes on


class Stopwatch:
    """CPU seconds between two steps."""

    def __init__(self, num_timed: int) -> None:
        self.num_warm = WARM_TURNS * num_timed
        self.num_steps, self.num, self.began, self.elapsed_s = self.num_warm + num_timed, 0, 0.0, 0.0

    def step(self) -> None:
        self.num += 1
        if self.num == self.num_warm:
            self.began = process_time()
        elif self.num == self.num_steps:
            self.elapsed_s = process_time() - self.began


def by_lightning(workload: Workload, watch: Stopwatch, to: Path | None) -> None:
    import lightning.pytorch as pl

    from sonde.integrations.lightning import SondeCallback

    training = Training(workload)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.criterion = training.model, training.criterion

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.criterion(self.model(training.inputs).flatten(0, -2), training.targets)

        def on_train_batch_end(self, *args: Any) -> None:
            watch.step()

        def configure_optimizers(self) -> Any:
            return training.optimizer

    pl.Trainer(
        max_steps=watch.num_steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[SondeCallback(to=to)] if to else [],
    ).fit(Module(), DataLoader(range(watch.num_steps), batch_size=1))  # fmt: skip


def by_trainer(workload: Workload, watch: Stopwatch, to: Path | None) -> None:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from sonde.integrations.transformers import SondeCallback

    training = Training(workload)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.criterion = training.model, training.criterion

        def forward(self, number: Any) -> Any:
            return {"loss": self.criterion(self.model(training.inputs).flatten(0, -2), training.targets)}

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step()

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch, max_steps=watch.num_steps, per_device_train_batch_size=1, report_to="none", save_strategy="no",
            logging_strategy="no", disable_tqdm=True, use_cpu=True, log_level="error", dataloader_pin_memory=False, max_grad_norm=0.0,
        )  # fmt: skip
        trainer = Trainer(
            model=WithLoss(), args=arguments, train_dataset=[{"number": torch.tensor([i])} for i in range(watch.num_steps)],
            callbacks=[Watch(), *([SondeCallback(to=to)] if to else [])], optimizers=(training.optimizer, None),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def by_accelerate(workload: Workload, watch: Stopwatch, to: Path | None) -> None:
    from accelerate import Accelerator

    from sonde.integrations.accelerate import SondeTracker

    training = Training(workload)
    accelerator = Accelerator(cpu=True, log_with=SondeTracker(to=to) if to else None)
    accelerator.init_trackers("benchmark")
    model, optimizer = accelerator.prepare(training.model, training.optimizer)
    for _ in range(watch.num_steps):
        optimizer.zero_grad()
        accelerator.backward(training.criterion(model(training.inputs).flatten(0, -2), training.targets))
        optimizer.step()
        watch.step()
    accelerator.end_training()


WAYS: dict[str, Callable[[Workload, Stopwatch, Path | None], None]] = {
    "lightning": by_lightning,
    "transformers": by_trainer,
    "accelerate": by_accelerate,
}


def turn(way: str, workload: Workload, num_steps: int, to: Path | None) -> float:
    """Milliseconds per step."""
    gc.collect()
    watch = Stopwatch(num_steps)
    WAYS[way](workload, watch, to)
    return (watch.elapsed_s * 1e3 - (looked_back_ms(to, watch.num_warm) if to else 0)) / num_steps


def looked_back_ms(to: Path, first_step: int) -> float:
    """The tiny model leaps at times, and then the step is looked at again, once in a run: a bad step is not what this is about."""
    events = [event for event in sonde.Run(to).events("spike") if event.step >= first_step]
    return sum(event.data["look_back_ms"] for event in events)


def ratios(way: str, workload: Workload, num_steps: int, num_rounds: int, scratch: Path) -> tuple[float, list[float]]:
    """Milliseconds of a bare step, and one ratio per round."""
    found = []
    bare = [turn(way, workload, num_steps, None)]
    for number in range(num_rounds):
        own = turn(way, workload, num_steps, scratch / f"{way}-{workload.name}-{number}")
        bare.append(turn(way, workload, num_steps, None))
        found.append(own / ((bare[-2] + bare[-1]) / 2))
    return statistics.median(bare), sorted(found)


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
                step_ms, found = ratios(way, workload, workload.chunk, 5, Path(scratch))
                low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
                budget = workload.default_budget
                over = over or middle > budget
                print(f"| {way} | {workload.name} | {step_ms:.2f} ms | {middle:.3f} ({low:.3f}–{high:.3f}) | {budget:.2f} |", flush=True)
    return int(over)


if __name__ == "__main__":
    sys.exit(main())

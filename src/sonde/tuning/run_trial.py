"""One trial, in a process of its own: runs the script under one change until `StepTimer` has measured enough steps.

The process then ends by `os._exit`. Code of the script that follows does not run, `finally` and `atexit` included: a model of twenty steps
must not be saved over one of twenty epochs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import runpy
import shutil
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch

from sonde.capture.monkeypatch import override
from sonde.capture.torch_patches import subscribe
from sonde.run_as_main import die_with_parent, run_file
from sonde.tuning.dataloader_changes import DataLoaderPatcher
from sonde.tuning.model_changes import ModelPatcher
from sonde.tuning.optimizer_changes import OptimizerPatcher
from sonde.tuning.proposals import Patch
from sonde.tuning.stable_call_site_ids import call_site_here
from sonde.tuning.step_timer import StepTimer
from sonde.tuning.trial_messages import CallSite, Survey, Trial, TrialRequest

SEED = 0  # for scripts that set none: trials must compute the same losses


def run_trial(request: TrialRequest) -> NoReturn:
    """Run the script of a request, write the result file and end the process."""
    patch = Patch(**request.patch)
    loaders, optimizers = DataLoaderPatcher(patch.loaders), OptimizerPatcher(patch.optimizers)
    models = ModelPatcher(patch.models, request.num_models)
    timer = StepTimer(warmup=request.warmup, num_steps=request.num_steps, seconds=request.seconds)
    threads = ThreadCountPatcher(patch.threads)
    progress = os.open(request.progress, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    owner = os.getpid()

    def finish(outcome: str, error: str = "") -> NoReturn:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if os.getpid() != owner:
            os._exit(0)  # a child that the script forked has reached the end of the script
        parts = loaders.describe(), optimizers.describe(), models.describe()
        survey = Survey(*parts, threads.number, threads.site, num_cores(), has_compiler(), _world_size())
        times = timer.num_steps, timer.seconds, *loaders.totals(), timer.warmup_s
        trial = Trial(outcome, error, *times, timer.total_steps, timer.losses(), survey)
        unfinished = Path(request.result + ".part")
        unfinished.write_text(json.dumps(dataclasses.asdict(trial)), encoding="utf-8")
        unfinished.replace(request.result)
        os._exit(0)

    def on_step_end() -> None:
        os.write(progress, b".")
        loaders.on_step_end()
        models.on_step_end(timer.total_steps)

    timer.on_step, timer.on_warmup_end, timer.on_enough = on_step_end, loaders.start_measuring, lambda: finish("measured")
    _seed()
    for part in (loaders, optimizers, models, threads):
        part.install()
    subscribe(timer)
    sys.argv = [request.target, *request.args]
    sys.path.insert(0, os.getcwd() if request.module else str(Path(request.target).resolve().parent))
    try:
        if request.module:
            runpy.run_module(request.target, run_name="__main__", alter_sys=True)
        else:
            run_file(request.target)
    except SystemExit as exit_request:
        if exit_request.code not in (None, 0):
            finish("failed", f"it exited with {exit_request.code!r}")
    except BaseException as raised:
        traceback.print_exc()
        finish("failed", f"{type(raised).__name__}: {raised}"[:500])
    finish("ended")


class ThreadCountPatcher:
    """Sets the number of threads of operations; if the trial sets it, calls of the script have no effect."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.site = CallSite()

    @property
    def number(self) -> int:
        return torch.get_num_threads()

    def install(self) -> None:
        if self._number:
            torch.set_num_threads(self._number)
        override(torch, "set_num_threads", self._wrap)

    def _wrap(self, original: Any) -> Any:
        def set_num_threads(nthreads: int) -> None:
            self.site = call_site_here()
            if not self._number:
                original(nthreads)

        return set_num_threads


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++", "cl"))


def redirect_streams(log: str) -> None:
    """Output goes to the log; stdin is empty."""
    empty, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, stream in ((empty, 0), (file, 1), (file, 2)):
        os.dup2(source, stream)
    os.close(empty)
    os.close(file)


def _seed() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def main() -> NoReturn:
    """A trial where processes cannot be forked: `python -m sonde.tuning.run_trial REQUEST`."""
    request = TrialRequest(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    die_with_parent()
    redirect_streams(request.log)
    run_trial(request)


if __name__ == "__main__":
    main()

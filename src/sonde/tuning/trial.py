"""One trial, in the process that is all its own: the script runs under one change until the stopwatch has seen enough.

The process then ends on the spot. Nothing that the script would do afterwards is done, `finally` and `atexit` included: a model of twenty
steps must not be saved over one of twenty epochs.
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
from typing import NoReturn

import numpy
import torch

from sonde.capture.patches import subscribe
from sonde.launcher import die_with_parent, run_file
from sonde.tuning.call_site_keys import place_here
from sonde.tuning.dataloader_changes import Loaders
from sonde.tuning.messages import Place, Request, Survey, Trial
from sonde.tuning.model_changes import Models
from sonde.tuning.optimizer_changes import Optimizers
from sonde.tuning.proposals import Patch
from sonde.tuning.step_timer import Stopwatch

SEED = 0  # for scripts that set none: two trials must train alike


def run_trial(request: Request) -> NoReturn:
    patch = Patch(**request.patch)
    loaders, optimizers = Loaders(patch.loaders), Optimizers(patch.optimizers)
    models = Models(patch.models, request.num_models)
    watch = Stopwatch(warmup=request.warmup, num_steps=request.num_steps, seconds=request.seconds)
    threads = Threads(patch.threads)
    progress = os.open(request.progress, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    owner = os.getpid()

    def leave(outcome: str, error: str = "") -> NoReturn:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if os.getpid() != owner:
            os._exit(0)  # a child that the script forked came to the end of it
        survey = Survey(
            loaders.facts(), optimizers.facts(), models.facts(), threads.number, threads.place, num_cores(), has_compiler(), _world_size()
        )  # fmt: skip
        trial = Trial(
            outcome, error, watch.num_steps, watch.seconds, *loaders.totals(), watch.warmup_s, watch.total_steps, watch.losses(), survey
        )  # fmt: skip
        unfinished = Path(request.result + ".part")
        unfinished.write_text(json.dumps(dataclasses.asdict(trial)), encoding="utf-8")
        unfinished.replace(request.result)
        os._exit(0)

    def step_ended() -> None:
        os.write(progress, b".")
        loaders.step_ended()
        models.step_ended(watch.total_steps)

    watch.on_step, watch.on_settled, watch.on_enough = step_ended, loaders.mark, lambda: leave("measured")
    _seed()
    for part in (loaders, optimizers, models, threads):
        part.install()
    subscribe(watch)
    sys.argv = [request.target, *request.args]
    sys.path.insert(0, os.getcwd() if request.module else str(Path(request.target).resolve().parent))
    try:
        if request.module:
            runpy.run_module(request.target, run_name="__main__", alter_sys=True)
        else:
            run_file(request.target)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            leave("failed", f"it left with {leaving.code!r}")
    except BaseException as raised:
        traceback.print_exc()
        leave("failed", f"{type(raised).__name__}: {raised}"[:500])
    leave("ended")


class Threads:
    """Threads inside of an operation. Where the trial sets them, the script's own word does not count."""

    def __init__(self, number: int) -> None:
        self._asked = number
        self.place = Place()

    @property
    def number(self) -> int:
        return torch.get_num_threads()

    def install(self) -> None:
        if self._asked:
            torch.set_num_threads(self._asked)
        original = torch.set_num_threads

        def set_num_threads(nthreads: int) -> None:
            self.place = place_here()
            if not self._asked:
                original(nthreads)

        torch.set_num_threads = set_num_threads


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++", "cl"))


def take_streams(log: str) -> None:
    """What the script prints goes to its log; it has nothing to read."""
    nothing, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, stream in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, stream)
    os.close(nothing)
    os.close(file)


def _seed() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def main() -> NoReturn:
    """A trial where processes cannot be forked: `python -m sonde.tuning.trial REQUEST`."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    die_with_parent()
    take_streams(request.log)
    run_trial(request)


if __name__ == "__main__":
    main()

"""One trial, in a process of its own: runs the script under one change until `StepTimer` has measured enough steps.

The process then ends by `os._exit`. Code of the script that follows does not run, `finally` and `atexit` included: a model of twenty steps
must not be saved over one of twenty epochs. Where processes can be forked, a server imports torch once and forks a child for every trial:
importing torch takes longer than most trials. The server never uses torch: its threads and devices do not survive a fork.
"""

import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch

from sonde.capture.monkeypatch import override
from sonde.capture.step_profiler.cpu_usage import num_cores
from sonde.capture.torch_patches import subscribe
from sonde.script_runner import Script, die_with_parent
from sonde.statistics.private_torch_api import load_compiler
from sonde.tuning.apply_changes import DataLoaderPatcher, ModelPatcher, OptimizerPatcher, call_site_here
from sonde.tuning.proposals import Patch
from sonde.tuning.step_timer import StepTimer
from sonde.tuning.trial_messages import CallSite, Survey, Trial, TrialRequest

CRASHED = 70  # exit code of a child: EX_SOFTWARE of sysexits.h, an internal error
SEED = 0  # for scripts that set none: trials must compute the same losses


def run_trial(request: TrialRequest) -> NoReturn:
    """Run the script of a request, write the result file and end the process."""
    patch = Patch(**request.patch)
    loaders, optimizers = DataLoaderPatcher(patch.loaders), OptimizerPatcher(patch.optimizers)
    models, threads = ModelPatcher(patch.models, request.num_models), ThreadCountPatcher(patch.threads)
    timer = StepTimer(warmup=request.warmup, num_steps=request.num_steps, seconds=request.seconds)
    progress = os.open(request.progress, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    owner = os.getpid()

    def finish(outcome: str, error: str = "") -> NoReturn:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if os.getpid() != owner:
            os._exit(0)  # a child that the script forked has reached the end of the script
        parts = loaders.describe(), optimizers.describe(), models.describe()
        compiler = any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++", "cl"))
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        world_size = torch.distributed.get_world_size() if is_distributed else 1
        survey = Survey(*parts, torch.get_num_threads(), threads.site, max(1, int(num_cores())), compiler, world_size)
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
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(SEED)
    for part in (loaders, optimizers, models, threads):
        part.install()
    subscribe(timer)
    # Not sys.flags: this process was started with -P.
    script = Script(request.target, request.args, module=request.module, safe_path=bool(os.environ.get("PYTHONSAFEPATH")))
    script.enter()
    try:
        script.run()
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


def _redirect_streams(log: str) -> None:
    """Output goes to the log; stdin is empty."""
    empty, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, stream in ((empty, 0), (file, 1), (file, 2)):
        os.dup2(source, stream)
    os.close(empty)
    os.close(file)


def serve_forks() -> None:
    """Requests are lines of JSON on stdin. The answers on stdout are the process id of the child, and its exit code when it has ended."""
    load_compiler()  # here, once: the first optimizer of every trial would load it, which takes a second or two
    die_with_parent()
    _write_message({"ready": os.getpid()})
    while line := _read_line():
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()  # its DataLoader workers are killed with its process group
                run_request(line)
            finally:
                os._exit(CRASHED)
        _write_message({"pid": pid})
        _, status = os.waitpid(pid, 0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _write_message({"code": os.waitstatus_to_exitcode(status)})


def _read_line() -> str:
    """One line of stdin; empty at its end. Unbuffered: a child must not inherit a part of the next request."""
    line = bytearray()
    while (byte := os.read(0, 1)) and byte != b"\n":
        line += byte
    return line.decode()


def _write_message(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def run_request(text: str) -> NoReturn:
    request = TrialRequest(**json.loads(text))
    die_with_parent()
    _redirect_streams(request.log)
    run_trial(request)


if __name__ == "__main__":  # with the file of a request: that trial; without: the server
    if len(sys.argv) > 1:
        run_request(Path(sys.argv[1]).read_text(encoding="utf-8"))
    serve_forks()

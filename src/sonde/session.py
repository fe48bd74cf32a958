"""DebugSession: one watched training, from start to stop. `watch` is the one line that most people need."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import multiprocessing
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sonde.config import DebugConfig, load_config
from sonde.errors import SondeError

try:
    import torch
except ImportError as error:
    raise SondeError(
        "watching a training needs torch, which is not installed here. Install it with: pip install torch\n"
        "Reading runs (sonde diagnose, sonde report) works without it."
    ) from error

from torch import nn

import sonde
from sonde.capture import patches
from sonde.capture.beat import Latch
from sonde.capture.early_stopping import EarlyStopping
from sonde.capture.error_isolation import Faults
from sonde.capture.gradient_state import optimizer_parameters
from sonde.capture.live.session_controls import Controls
from sonde.capture.model_discovery import ModelDiscovery
from sonde.capture.model_registry import Models
from sonde.capture.recorder import Journal
from sonde.capture.step_tracker import Loop
from sonde.incidents.nonfinite_handler import Alarm
from sonde.incidents.out_of_memory_handler import autopsy, is_out_of_memory
from sonde.incidents.spike_handler import Lookout
from sonde.runlog.directory import new_run_directory, open_run_directory, write_run_json
from sonde.runlog.writer import Writer
from sonde.session_plots import draw
from sonde.session_tools import Bench
from sonde.spike_detection import Leap
from sonde.statistics import native
from sonde.statistics.tensor_utils import read_scalar

if TYPE_CHECKING:
    from sonde.report import Report

STALLED_S = 1.0  # a write that takes longer when a program ends is not waited for

_log = logging.getLogger("sonde")


class DebugSession(Bench, Controls):
    """Watches models while it is started; writes a run; `report()` judges it. Use as a context manager, or `start()` and `stop()`."""

    def __init__(
        self, config: DebugConfig | None = None, *, to: str | Path | None = None, name: str | None = None, strict: bool = False
    ) -> None:
        Bench.__init__(self)
        self.config = config if config is not None else load_config()
        Controls.__init__(self, self.config)
        self.strict = strict
        self.run: Path | None = None
        self._to, self._name = to, name
        self._given: list[tuple[nn.Module, str]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._discovers = True  # watches whatever trains, unless models are given
        self._concern: dict[int, tuple[weakref.ref[torch.optim.Optimizer], bool]] = {}
        self._started = False
        self._loop: Loop | None = None

    # -- life --------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, optimizer: Any = None, *, name: str = "model") -> Self:
        """Watch this model, and this optimizer or all that hold its parameters."""
        if not isinstance(model, nn.Module):
            raise SondeError(
                f"watch needs a torch.nn.Module, not {type(model).__name__}. Pass the model itself, not its output or its parameters."
            )
        given = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
        for each in given:
            if not isinstance(each, torch.optim.Optimizer):
                raise SondeError(f"optimizer must be a torch.optim.Optimizer or a list of them, not {type(each).__name__}.")
        self._discovers = False
        self._given.append((model, name))
        self._optimizers.extend(weakref.ref(each) for each in given)
        if self._loop is not None:
            self._watch_given()
        return self

    def start(self, **about: Any) -> Self:
        """Begin to watch. Everything that can fail, fails here, clearly; afterwards nothing reaches the training."""
        if self._started:
            raise SondeError("this session was started already; a new run needs a new session.")
        self._started = True
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # A spawned worker imports the script again: that is not a second training.
            _log.info("sonde: this process only re-imports the script; nothing is watched here.")
            return self
        rank, world_size = _rank()
        if self._to is not None:
            self.run = open_run_directory(Path(self._to))
        elif world_size > 1:
            self.run = open_run_directory(Path(self.config.output_dir) / f"{self._name or _script_name()}_{_job()}")
        else:
            self.run = new_run_directory(Path(self.config.output_dir), self._name or _script_name())
        description = {
            "name": self._name or self.run.name, "argv": list(sys.argv), "sonde": sonde.__version__,
            "python": sys.version.split()[0], "torch": torch.__version__, "every": self.config.every,
            "mode": self.config.mode.value, "level": self.config.level.value,
            "overhead_budget": self.config.overhead_budget, "native_kernel": native.ENABLED, "threads": torch.get_num_threads(), **about,
        }  # fmt: skip
        write_run_json(self.run, description)
        writer = Writer(self.run, rank=rank, world_size=world_size, manifest=description, lock=Latch())
        self._journal = Journal(writer)
        self._journal.event("start", 0, **description)
        self._faults = Faults(self._retired, strict=self.strict)
        self._models = Models(self._journal)
        loop = Loop(self._journal, self.config, self._faults, self._models, self._concerns)
        self._models.connect(loop.forward_begins, loop.forward_ended)
        self._look_back_from(loop)
        self._loop = loop
        self._switches.connect(loop, self._journal, self._faults, self.run)
        self._triggers.connect(loop, self._journal, self._faults)
        self._discovery = ModelDiscovery(self._models, loop, lambda probe, error: self._faults.caught(probe, "", error))
        self._watch_given()
        if self.config.measured.anything:
            patches.listen(loop)
            if self._discovers:
                self._discovery.start()
        else:
            loop.deaf = True  # nothing is put into torch, and nothing heard
        self._journal.flush()
        atexit.register(self._left_open)
        return self

    def stop(self) -> Report:
        """End watching and say what was found."""
        self.close()
        return self.report()

    def close(self, how: str = "finished", *, exit_code: int | None = 0, exception: str = "") -> None:
        """End watching: every hook and patch is removed and the run is closed. Closing twice is fine."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        atexit.unregister(self._left_open)
        try:
            # Each of these is tried, whatever becomes of those before it: a hook that stays is worse than a run without its last word.
            with contextlib.ExitStack() as last:
                if self.config.enable_visualization and self.run is not None:
                    last.callback(draw, self.visualizer, self.run, self._bodies())
                last.callback(self._journal.close)
                last.callback(self._journal.flush)
                last.callback(self._journal.event, "end", loop.clock.number, how=how, exit_code=exit_code, exception=exception)
                last.callback(self._models.close)
                last.callback(self.clear_bench)
                last.callback(self._discovery.stop)
                last.callback(patches.unlisten, loop)
                last.callback(loop.pause)
                last.callback(self._switches.close)
                if not self._journal.wait(STALLED_S):
                    _log.warning("sonde: the disk does not answer; the end of the run in %s is not written.", self.run)
                loop.finish()
        except Exception as error:
            if self.strict:
                raise
            _log.warning("sonde: the run could not be closed properly (%s: %s).", type(error).__name__, error)

    def tell_of(self, error: BaseException | None) -> None:
        """The training ends with this error: where memory ran out, what had filled it goes into the run."""
        loop, error = self._loop, is_out_of_memory(error)
        if loop is None or error is None:
            return
        try:
            found = autopsy(error, self._bodies(), [each for _, each in loop.ledger.optimizers()], loop.kept, loop._panel.outside_bytes)
            self._journal.event("out_of_memory", loop.clock.number, **found)
        except Exception as failure:
            if self.strict:
                raise
            _log.warning("sonde: why memory ran out could not be found (%s: %s).", type(failure).__name__, failure)

    def _lost(self) -> str:
        """What could not be written and is not mentioned in the run either, as a sentence; "" where all is well."""
        if self.run is None:
            return ""
        if not self.run.is_dir():
            return f"the run in {self.run} was removed while the script ran"
        gap = self._journal.writer.unsaid
        since = f", from step {gap.first_step} on," if gap and gap.first_step >= 0 else ""
        return f"{gap.num_dropped:,} records of this run{since} could not be written ({gap.reason})" if gap else ""

    def _left_open(self) -> None:
        """The program ends and nobody has closed us: what was recorded since the last step is written, and that it ended."""
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # set where an exception ends the program
        if error is None:
            self.close("exit", exit_code=None)  # with which code cannot be known here
        else:
            self.tell_of(error)
            self.close("exception", exit_code=1, exception=f"{type(error).__name__}: {error}"[:2000])

    def __enter__(self) -> Self:
        return self if self._started else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif isinstance(error, KeyboardInterrupt):
            self.close("interrupted", exit_code=130, exception="KeyboardInterrupt")
        else:
            self.tell_of(error)
            self.close("exception", exit_code=1, exception=f"{type(error).__name__}: {error}"[:2000])

    # -- use ---------------------------------------------------------------------------------------

    def log(self, **values: Any) -> None:
        """Keep numbers (or texts) of this step. Tensors are welcome: on the CPU they are read as they are, without a torch operation."""
        loop = self._loop
        if loop is None or loop.deaf:
            return
        step = loop.clock.number if loop.clock.active or loop.clock.number == 0 else loop.clock.number - 1
        numbers: dict[str, float] = {}
        for name, value in values.items():
            try:
                if isinstance(value, str):
                    self._journal.event("log", step, name=name, text=value[:10_000])
                    continue
                number = read_scalar(value)
                if number is None:
                    loop.log_later(name, value, step)
                else:
                    numbers[name] = number
            except Exception as error:
                self._faults.caught("log", name, error)
        try:
            if numbers:
                self._journal.log(step, numbers)
                self._tell_hooks(numbers)
                self._switches.tellers.logged(numbers)
        except Exception as error:
            self._faults.caught("log", "", error)

    def early_stopping(self, monitor: str = "val_loss", *, patience: int = 5, min_delta: float = 0.0, mode: str = "auto") -> EarlyStopping:
        """When to stop: `if stopping.step(val_loss): break`. Each value and the decision, with its reason, are written into the run."""
        stopping = EarlyStopping(monitor, patience=patience, min_delta=min_delta, mode=mode, session=self)
        if self._loop is not None:
            self._switches.tellers.stopping = stopping
        return stopping

    def training_step(self, function: Any = None, /) -> Any:
        """One step of the loop, as a context or as a decorator: a step that fails is told of, and numbers that it returns are kept."""
        from sonde.step_decorator import TrainingStep  # stands on this module

        return TrainingStep(self) if function is None else TrainingStep(self)(function)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing is watched inside: for a profiler or a FLOP counter that must not see Sonde's operations."""
        loop = self._loop
        if loop is None or loop.deaf:  # a pause inside a pause ends with the outer one
            yield
            return
        loop.pause()
        patches.unlisten(loop)
        try:
            yield
        finally:
            if self._loop is loop:  # not closed meanwhile
                patches.listen(loop)
                loop.resume()

    def report(self) -> Report:
        """What is wrong with this training so far, and why."""
        if self.run is None:
            raise SondeError("nothing was watched in this process, so there is nothing to report.")
        return sonde.judge(self.run)  # by the public door: reading is another room, loaded only when asked for

    # -- inside ------------------------------------------------------------------------------------

    def _look_back_from(self, loop: Loop) -> None:
        """Who is told of bad numbers, leaps and skipped updates."""
        loop.kept.on_spike = self._triggers.spiked
        if not self.config.measured.looks_back:
            return
        assert self.run is not None
        alarm = Alarm(self._journal, self.config, loop.kept, self._bodies, self._live, self.run)
        loop.kept.on_bad, loop.kept.on_bad_evaluation = alarm.ring, alarm.ring_for_evaluation
        lookout = Lookout(self._journal, loop.kept, self._models, self._bodies)

        def spiked(what: str, where: str, leap: Leap, step: int) -> None:
            self._triggers.spiked(what, where, leap, step)
            lookout.spiked(what, where, leap, step)

        loop.kept.on_spike, loop.kept.on_skip = spiked, lookout.skipped

    def _live(self) -> Iterator[tuple[nn.Module, torch.optim.Optimizer | None]]:
        loop = self._loop
        if loop is None:
            return
        for watched in self._models:
            model = watched.model
            if model is not None:
                own = {id(p) for p in model.parameters()}
                optimizers = [each for _, each in loop.ledger.optimizers() if any(id(p) in own for p in optimizer_parameters(each))]
                yield model, optimizers[0] if len(optimizers) == 1 else None

    def _directory(self) -> Path | None:
        return self.run

    def _bodies(self) -> dict[str, nn.Module]:
        return {watched.name: body for watched in self._models if (body := watched.body) is not None}

    def _watch_given(self) -> None:
        loop = self._loop
        if loop is None or not self.config.measured.anything:
            return
        for model, name in self._given:
            self._models.watch(model, name, loop.clock.number)
        for ref in self._optimizers:
            optimizer = ref()
            if optimizer is not None:
                loop.known(optimizer)

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Is this optimizer part of the watched training?"""
        if self._discovers or any(ref() is optimizer for ref in self._optimizers):
            return True
        known = self._concern.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            watched = {id(p) for model in self._models for _, p in model.parameters()}
            known = (weakref.ref(optimizer), any(id(p) in watched for p in optimizer_parameters(optimizer)))
            self._concern[id(optimizer)] = known
        return known[1]

    def _retired(self, probe: str, where: str, error: str) -> None:
        step = self._loop.clock.number if self._loop is not None else 0
        self._journal.event("retired", step, probe=probe, where=where, error=error)


def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    to: str | Path | None = None,
    name: str | None = None,
    every: int | None = None,
    config: DebugConfig | None = None,
    strict: bool = False,
) -> DebugSession:
    """Watch a training from here on. `with sonde.watch(model, optimizer) as session:` around the loop is all that is needed."""
    session = DebugSession(load_config(config, every=every), to=to, name=name, strict=strict)
    return session.attach(model, optimizer).start()


def debug_session() -> DebugSession:
    """A session with defaults, not started: it watches whatever trains between `start()` and `stop()`."""
    return DebugSession()


def _script_name() -> str:
    return Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"


def _job() -> str:
    """What the ranks of one job have in common and no other job has: they share a run directory without having spoken to each other."""
    parts = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT")]
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        parts.append(str(os.getppid()))  # on one host, the launcher; run ids are often left at "none"
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=4).hexdigest()


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # frameworks start processes without torchrun's variables
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[rank]), int(os.environ.get(size, "1"))
    return 0, 1

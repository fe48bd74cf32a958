"""Measures the memory of the first training steps of a script: with fake tensors, which compute nothing, or for real.

In a dry run with fake tensors, data loaders work as usual (they may read files and shuffle), but in this process; all other tensors of the
script are fake from its first line on. A script that needs real values (numpy arrays, sizes that depend on values) fails and must be run
for real.
"""

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sonde.capture import torch_patches
from sonde.capture.monkeypatch import override
from sonde.capture.training_callbacks import TrainingCallbacks
from sonde.capture.user_source_line import is_library
from sonde.errors import Stopped
from sonde.formatting import counted
from sonde.memory_profiler.allocation_tracker import AllocationTracker
from sonde.memory_profiler.memory_profiler import ProcessBaseline, build_report
from sonde.memory_profiler.memory_report import MemoryReport
from sonde.script_runner import Script, die_with_parent, remove_from_path, show
from sonde.statistics.private_torch_api import GRAD_SCALER_STEP, DataLoaderIterator, FakeTensorMode, disable_dispatch_modes

NUM_STEPS = 2  # of each optimizer: the first creates its state, the second has it from its start
MAX_BACKWARDS = 200  # without an optimizer step: then the script trains without torch optimizers


class _DryRunFinished(BaseException):
    """All steps are measured. Not an Exception, so that `except Exception` in the script does not catch it."""


class DryRunError(Exception):
    """The script did not reach the end of its second step."""


class NoTrainingError(DryRunError):
    """The script does not train or cannot start: real steps would fail in the same way."""


def dry_run(
    target: str, args: Sequence[str] = (), *, module: bool = False, fake: bool = True, on_done: Callable[[MemoryReport], None] | None = None
) -> MemoryReport:
    """Runs a script until each of its optimizers has stepped twice, and reports its memory. With `fake` nothing is computed. `on_done` is
    called with the report at that moment, inside the script. Raises DryRunError if the script does not get that far, and NoTrainingError if
    real steps would not either."""
    tracker = AllocationTracker({}, [], fake=fake)
    baseline = ProcessBaseline.of(tracker)
    notes: list[str] = []
    reports: list[MemoryReport] = []

    def report() -> MemoryReport:
        return build_report(tracker, baseline=baseline, notes=tuple(notes))

    def finish() -> None:
        reports.append(report())  # now, while all tensors are alive
        if on_done is not None:
            on_done(reports[0])
        raise _DryRunFinished

    counter = _StepCounter(finish)
    try:
        with ExitStack() as stack:
            script = stack.enter_context(Script(target, args, module=module))
            if fake:
                stack.enter_context(_fake_tensors())
            stack.enter_context(tracker)
            # Subscribed after the tracker: then the state of the optimizer is in its registry when the report is made.
            torch_patches.subscribe(counter)
            stack.callback(torch_patches.unsubscribe, counter)
            script.run()
        notes.append(f"the script ended {_after(tracker.num_steps)}")
    except _DryRunFinished:
        pass
    except SystemExit as exit_:
        notes.append(f"the script exited with {exit_.code!r} {_after(tracker.num_steps)}")
    except Exception as error:
        kind = NoTrainingError if isinstance(error, (ImportError, SyntaxError)) else DryRunError
        raise kind(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200] + _user_line(error)) from error
    if not reports and not tracker.num_steps and not counter.num_backwards:
        raise NoTrainingError(f"{notes[-1]}: it does not train")
    return reports[0] if reports else report()


class _StepCounter(TrainingCallbacks):
    """Calls `finish` when every known optimizer has stepped NUM_STEPS times, or after MAX_BACKWARDS if none has stepped."""

    is_called_in_forks = True  # a child that the script forks must not train to its end either

    def __init__(self, finish: Callable[[], None]) -> None:
        self.num_backwards = 0  # without those that failed
        self._finish = finish
        self._error: BaseException | None = None  # that the script handled when the backward began
        self._num_steps: Counter[int] = Counter()  # by id of an optimizer

    def on_backward_start(self, tensors: Any) -> None:
        self._error = sys.exception()

    def on_backward_end(self) -> None:
        error, self._error = self._error, None
        if sys.exception() is not error:
            return  # it failed, and its exception must reach the script
        self.num_backwards += 1
        if self.num_backwards >= MAX_BACKWARDS and not self._num_steps:
            self._finish()

    def on_optimizer_step_end(self, optimizer: Optimizer) -> None:
        self._num_steps[id(optimizer)] += 1
        if min(self._num_steps.values()) >= NUM_STEPS or max(self._num_steps.values()) > NUM_STEPS:
            self._finish()


@contextmanager
def _fake_tensors() -> Iterator[None]:
    """Makes every new tensor fake, except those of data loaders."""

    def step(self: Any, optimizer: Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)  # a fake gradient cannot be checked for overflow

    with ExitStack() as stack:
        stack.callback(override(DataLoader, "__iter__", _iterate_for_real))
        stack.callback(override(DataLoaderIterator, "__next__", _fetch_for_real))
        stack.callback(override(torch.amp.GradScaler, GRAD_SCALER_STEP, lambda original: step))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _iterate_for_real(original: Any) -> Any:
    def __iter__(self: DataLoader[Any]) -> Any:
        workers, self.num_workers = self.num_workers, 0  # fake tensors cannot be sent between processes
        try:
            with disable_dispatch_modes():
                return original(self)
        finally:
            self.num_workers = workers

    return __iter__


def _fetch_for_real(original: Any) -> Any:
    def __next__(self: Any) -> Any:
        with disable_dispatch_modes():
            return original(self)

    return __next__


def _after(num_steps: int) -> str:
    return f"after {counted(num_steps, 'optimizer step')}" if num_steps else "before any optimizer stepped"


def _user_line(error: BaseException) -> str:
    """` at train.py:41`: the innermost line of the user's code."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    return f" at {Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""


def main() -> None:
    """Entry point of the child process: OUTPUT fake|real file|module TARGET ARGS…  Writes the report, or the error, as JSON."""
    die_with_parent()
    remove_from_path(os.getcwd())
    output, how, kind, target, *args = sys.argv[1:]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # operations inside compiled code are not dispatched

    def write(answer: dict[str, Any]) -> None:
        Path(output).write_text(json.dumps(answer, allow_nan=False), encoding="utf-8")

    def write_and_exit(report: MemoryReport) -> None:
        # Without `finally` and `atexit` of the script: they could overwrite a trained model with one of two steps.
        write(report.to_dict())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    try:
        write_and_exit(dry_run(target, args, module=kind == "module", fake=how == "fake", on_done=write_and_exit))
    except DryRunError as error:
        write({"failed": str(error), "final": isinstance(error, NoTrainingError)})
        if (how == "real" or isinstance(error, NoTrainingError)) and error.__cause__ is not None:
            show(error.__cause__)
    except KeyboardInterrupt:
        os._exit(Stopped.exit_code)  # the parent process got the interrupt as well and reports it


if __name__ == "__main__":
    main()

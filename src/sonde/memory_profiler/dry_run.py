"""The first steps of a script, followed for the memory that they take: with fake tensors, of which nothing is computed, or for real.

Under fake tensors data loaders work as always (they may read files, and shuffle), in this process; everything else that a script makes
of torch is fake from its first line on. A script that asks for what fake tensors have not (numpy arrays, sizes that depend on values)
fails, and must be followed for real.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, dataloader

from sonde.capture.call_site import is_library
from sonde.errors import Stopped
from sonde.launcher import die_with_parent, run_file, script_environment, show
from sonde.memory_profiler.allocation_tracker import Tracker
from sonde.memory_profiler.memory_profiler import Base, report_of
from sonde.memory_profiler.memory_report import MemoryReport

NUM_STEPS = 2  # of each optimizer: the first makes its state, the second has it from the beginning
MAX_BACKWARDS = 200  # without an optimizer's step: then the script trains in a way of its own


class _Enough(BaseException):
    """The steps are over. No Exception: a script that catches everything it can name must not go on."""


class Failed(Exception):
    """The script could not be followed to the end of its second step."""


class Final(Failed):
    """It would end in the same way for real: it does not train, or cannot even begin."""


def follow(
    target: str, args: Sequence[str] = (), *, module: bool = False, fake: bool = True, leave: Callable[[MemoryReport], None] | None = None
) -> MemoryReport:
    """Runs a script until each of its optimizers has stepped twice. `leave` is called at that very moment, in the midst of it."""
    tracker = Tracker({}, [], fake=fake)
    base = Base.of(tracker)
    notes: list[str] = []
    found: list[MemoryReport] = []

    def report() -> MemoryReport:
        return report_of(tracker, base=base, notes=tuple(notes))

    def enough() -> None:
        found.append(report())  # now, while everything is alive
        if leave is not None:
            leave(found[0])
        raise _Enough

    try:
        with ExitStack() as stack:
            stack.enter_context(script_environment(target, args, module=module))
            if fake:
                stack.enter_context(_fake_world())
            # Its hook comes after the tracker's: by then the state of the optimizer is in the book.
            stack.enter_context(tracker)
            num_backwards = stack.enter_context(_counted(enough))
            if module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                run_file(target)
        notes.append(f"the script came to its end {_after(tracker.num_steps)}")
    except _Enough:
        pass
    except SystemExit as leaving:
        notes.append(f"the script left with {leaving.code!r} {_after(tracker.num_steps)}")
    except Exception as error:
        kind = Final if isinstance(error, (ImportError, SyntaxError)) else Failed
        raise kind(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200] + _place(error)) from error
    if not found and not tracker.num_steps and not num_backwards.total():
        raise Final(f"{notes[-1]}, so no training was seen")
    return found[0] if found else report()


@contextmanager
def _counted(enough: Callable[[], None]) -> Iterator[Counter[str]]:
    """Calls `enough` when every optimizer that was seen has stepped often enough. Counts the backward passes."""
    steps: Counter[int] = Counter()
    seen: Counter[str] = Counter()

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps[id(optimizer)] += 1
        if min(steps.values()) >= NUM_STEPS or max(steps.values()) > NUM_STEPS:
            enough()

    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        seen["backward"] += 1
        if seen["backward"] >= MAX_BACKWARDS and not steps:
            enough()

    handle = register_optimizer_step_post_hook(stepped)
    torch.autograd.backward = backward
    try:
        yield seen
    finally:
        handle.remove()
        torch.autograd.backward = original


@contextmanager
def _fake_world() -> Iterator[None]:
    """Every tensor is fake, but for those that data loaders read."""
    make, advance = DataLoader.__iter__, dataloader._BaseDataLoaderIter.__next__
    scaler_step = torch.amp.GradScaler._maybe_opt_step

    def __iter__(self: DataLoader[Any]) -> Any:
        workers, self.num_workers = self.num_workers, 0  # fake tensors do not travel between processes
        try:
            with _disable_current_modes():
                return make(self)
        finally:
            self.num_workers = workers

    def __next__(self: Any) -> Any:
        with _disable_current_modes():
            return advance(self)

    def _maybe_opt_step(self: Any, optimizer: Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)  # whether a gradient has overflowed cannot be asked

    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]
    dataloader._BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign]
    torch.amp.GradScaler._maybe_opt_step = _maybe_opt_step  # type: ignore[assignment, method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        DataLoader.__iter__ = make  # type: ignore[method-assign]
        dataloader._BaseDataLoaderIter.__next__ = advance  # type: ignore[method-assign]
        torch.amp.GradScaler._maybe_opt_step = scaler_step  # type: ignore[method-assign]


def _after(num_steps: int) -> str:
    return f"after {num_steps} optimizer step{'s' if num_steps > 1 else ''}" if num_steps else "before any optimizer stepped"


def _place(error: BaseException) -> str:
    """` at train.py:41`: the innermost line of the user's own code."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    return f" at {Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""


def main() -> None:
    """In a process of its own: OUTPUT fake|real file|module TARGET ARGS…  Writes the report, or why there is none, as JSON."""
    die_with_parent()
    output, how, kind, target, *args = sys.argv[1:]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled code has no operations to look at

    def write(answer: dict[str, Any]) -> None:
        Path(output).write_text(json.dumps(answer, allow_nan=False), encoding="utf-8")

    def leave(report: MemoryReport) -> None:
        # On the spot: `finally` and `atexit` of the script would save a model of two steps over one of twenty epochs.
        write(report.to_dict())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    try:
        leave(follow(target, args, module=kind == "module", fake=how == "fake", leave=leave))
    except Failed as error:
        write({"failed": str(error), "final": isinstance(error, Final)})
        if (how == "real" or isinstance(error, Final)) and error.__cause__ is not None:
            show(error.__cause__)
    except KeyboardInterrupt:
        os._exit(Stopped.exit_code)  # who started this process heard it too, and says it


if __name__ == "__main__":
    main()

"""Marks a function or a block as a training step: `@sonde.step`, `session.training_step`.

A session follows the loop without either. With them the run also records which step failed and why, even if the error
is caught and the training continues, and the numbers that a step returns. `@sonde.step` needs no other set-up.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from sonde.config import DebugConfig, load_config
from sonde.errors import require_function
from sonde.events import StepFailed
from sonde.session import DebugSession

P = ParamSpec("P")
R = TypeVar("R")


class TrainingStep:
    """A training step as a context manager, which may be entered many times, or as a decorator."""

    def __init__(self, session: DebugSession) -> None:
        self._session = session

    def __enter__(self) -> DebugSession:
        if not self._session.is_started:
            self._session.start()
        return self._session

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self._session.emit(StepFailed(error=f"{type(error).__name__}: {error}"[:2000]))
            self._session.record_exception(error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        require_function(function, "a training step", "the function below @sonde.step")

        @functools.wraps(function)
        def training_step(*args: P.args, **kwargs: P.kwargs) -> R:
            with self as session:
                result = function(*args, **kwargs)
            if isinstance(result, Mapping) and all(isinstance(name, str) for name in result):
                session.log_metrics(result)
            return result

        training_step.session = self._session  # type: ignore[attr-defined]
        return training_step


@overload
def step(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def step(
    *, to: str | Path | None = None, name: str | None = None, every: int | None = None, config: DebugConfig | None = None,
    strict: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...  # fmt: skip
def step(
    function: Callable[..., Any] | None = None, /, *, to: str | Path | None = None, name: str | None = None, every: int | None = None,
    config: DebugConfig | None = None, strict: bool = False,
) -> Any:  # fmt: skip
    """Marks the function that runs one training step. All models that train are watched from its first call to the end of the program.
    `train_step.session` is the session: `report()` returns the report, `stop()` ends it before the end of the program."""
    decorator = TrainingStep(DebugSession(load_config(config, every=every), to=to, name=name, strict=strict))
    return decorator if function is None else decorator(function)

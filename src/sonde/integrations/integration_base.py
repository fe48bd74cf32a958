"""Base class of the integrations: one session per training, and callback classes that derive from a framework's class at runtime.

The frameworks are heavy and none of them is a dependency, so nothing is imported until an object is created. By then the user has imported
the framework, and the object's class is built with the base class of that package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from sonde.config import DebugConfig, load_config
from sonde.errors import SondeError

if TYPE_CHECKING:
    from sonde.events import TypedEvent
    from sonde.report import Report
    from sonde.session import DebugSession

Hook = TypeVar("Hook", bound=Callable[..., None])

GRADIENTS = "as the optimizer is given them"  # the one moment that is the same in every framework
PROBE = "integration"  # the name under which errors of integrations are counted
LOST = "the training did not finish; its framework does not report why"


class FrameworkIntegration:
    """Watches the trainings of a framework, one at a time; each is a run of its own."""

    framework = ""

    def __init__(
        self, *, to: str | Path | None = None, name: str | None = None, every: int | None = None, config: DebugConfig | None = None,
        strict: bool = False,
    ) -> None:  # fmt: skip
        self._config = load_config(config, every=every)
        self._to, self._name, self._strict = to, name, strict
        self.session: DebugSession | None = None

    @classmethod
    def bases(cls) -> tuple[type, ...]:
        """The classes of the framework that an object must be an instance of."""
        raise NotImplementedError

    @classmethod
    def class_attributes(cls) -> dict[str, Any]:
        """Attributes of the constructed class that override those of this one."""
        return {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        own: Any = cls
        return cast("Self", object.__new__(_with_bases(own, cls.bases())))

    def __reduce__(self) -> Any:
        # Frameworks copy callbacks and send them to other processes. A session stays in its process.
        plain = getattr(type(self), "plain", type(self))
        return _new_instance, (plain,), {**vars(self), "session": None}

    @property
    def run(self) -> Path | None:
        """Path of the run, from the start of the training on."""
        return self.session.run if self.session is not None else None

    def report(self) -> Report:
        """The report on the training so far."""
        if self.session is None:
            raise SondeError(f"no training has started with this {type(self).__name__}, so there is nothing to report. Train first.")
        return self.session.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(error)

    def _begin(self, model: Any = None, optimizers: Any = None, **package: Any) -> DebugSession:
        """Start a session for a training. Without a model, all models that train are watched."""
        from sonde.session import DebugSession  # needs torch

        self._end(None, how="exception", exit_code=None, exception=LOST)  # of an earlier training that failed
        self.session = session = DebugSession(self._config, to=self._to, name=self._name, strict=self._strict)
        if model is not None:
            session.attach(model, optimizers)
        return session.start(framework=self.framework, **package)

    def _end(self, error: BaseException | None = None, **how: Any) -> None:
        if self.session is not None:
            if how:
                self.session.close(**how)
            self.session.__exit__(None, error, None)  # closing twice is fine

    def _log(self, values: Mapping[str, Any]) -> None:
        if self.session is not None:
            self.session.log_metrics(values)

    def _emit(self, event: TypedEvent) -> None:
        if self.session is not None:
            self.session.emit(event)


def isolated_hook(hook: Hook) -> Hook:
    """Decorator: the hook runs only while a session is open, and its errors are reported instead of raised into the training."""

    @functools.wraps(hook)
    def guarded(self: FrameworkIntegration, *args: Any, **kwargs: Any) -> None:
        session = self.session
        if session is None or not session.is_watching(PROBE, hook.__name__):
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            session.report_error(PROBE, hook.__name__, error)

    return cast("Hook", guarded)


def import_base(module: str, name: str, integration: str) -> type:
    """The class of a framework that an integration derives from."""
    try:
        base: type = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise SondeError(
            f"{integration} needs {package}, and {error.name} is not installed here. Install it with: pip install {package}"
        ) from error
    return base


@functools.cache
def _with_bases(cls: type[FrameworkIntegration], bases: tuple[type, ...]) -> type:
    missing = tuple(base for base in bases if not issubclass(cls, base))
    about = {"__module__": cls.__module__, "__doc__": cls.__doc__, "plain": cls}
    return type(cls.__name__, (cls, *missing), about | cls.class_attributes()) if missing else cls


def _new_instance(cls: type[FrameworkIntegration]) -> FrameworkIntegration:
    return cls.__new__(cls)

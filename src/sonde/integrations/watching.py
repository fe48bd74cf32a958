"""What the integrations share: one session per training, and a class that is what its framework wants it to be.

The frameworks are heavy and none of them is a dependency, so nothing is imported until an object is made. By then the user has imported
theirs: the object's class is put together with the base class of that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from sonde.config import DebugConfig, load_config
from sonde.errors import SondeError
from sonde.events import TypedEvent, encode

if TYPE_CHECKING:
    from sonde.report import Report
    from sonde.session import DebugSession

Hook = TypeVar("Hook", bound=Callable[..., None])

GRADIENTS = "as the optimizer is given them"  # the one moment that is the same in every framework, and the one that decides
LOST = "the training did not come to its end; its framework does not say why"


class Watching:
    """Watches one training at a time: a second one is a second run."""

    framework = ""

    def __init__(
        self,
        *,
        to: str | Path | None = None,
        name: str | None = None,
        every: int | None = None,
        config: DebugConfig | None = None,
        strict: bool = False,
    ) -> None:
        self._config = load_config(config, every=every)
        self._to, self._name, self._strict = to, name, strict
        self.session: DebugSession | None = None

    # -- what it is --------------------------------------------------------------------------------

    @classmethod
    def bases(cls) -> tuple[type, ...]:
        """Classes of the framework that an object of this one has to be."""
        raise NotImplementedError

    @classmethod
    def in_front(cls) -> dict[str, Any]:
        """What stands in front of the attributes of this class in an object of it."""
        return {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        own: Any = cls
        return cast("Self", object.__new__(_joined(own, cls.bases())))

    def __reduce__(self) -> Any:
        # Frameworks copy what they are given, and send it to other processes. A session stays where it is.
        plain = getattr(type(self), "plain", type(self))
        return _blank, (plain,), {**vars(self), "session": None}

    # -- for the user ------------------------------------------------------------------------------

    @property
    def run(self) -> Path | None:
        """Where the run is, from the beginning of the training on."""
        return self.session.run if self.session is not None else None

    def report(self) -> Report:
        """What is wrong with the training, so far or as it ended."""
        if self.session is None:
            raise SondeError(f"no training has begun under this {type(self).__name__}, so there is nothing to report. Train first.")
        return self.session.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(error)

    # -- for the integrations ----------------------------------------------------------------------

    def _begin(self, model: Any = None, optimizers: Any = None, **about: Any) -> DebugSession:
        """A training begins. Without a model, whatever trains is watched."""
        from sonde.session import DebugSession  # needs torch

        self._end(None, how="exception", exit_code=None, exception=LOST)  # where a training before has failed
        self.session = session = DebugSession(self._config, to=self._to, name=self._name, strict=self._strict)
        if model is not None:
            session.attach(model, optimizers)
        return session.start(framework=self.framework, **about)

    def _end(self, error: BaseException | None = None, **how: Any) -> None:
        if self.session is not None:
            if how:
                self.session.close(**how)
            else:
                self.session.__exit__(type(error) if error is not None else None, error, None)

    def _log(self, values: Mapping[str, Any]) -> None:
        if self.session is not None:
            _framework().keep(self.session, values)

    def _emit(self, event: TypedEvent) -> None:
        if self.session is not None:
            kind, data = encode(event)
            _framework().tell(self.session, kind, **data)


def contained(hook: Hook) -> Hook:
    """Called while a session is open, and only then. An error of ours does not reach the training."""

    @functools.wraps(hook)
    def guarded(self: Watching, *args: Any, **kwargs: Any) -> None:
        session = self.session
        if session is None or not _framework().hears(session, hook.__name__):
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            _framework().caught(session, hook.__name__, error)

    return cast("Hook", guarded)


@functools.cache  # some hooks are called in every step: an import statement looks for what is there already
def _framework() -> Any:
    from sonde import framework_hints

    return framework_hints


@functools.cache
def _joined(cls: type[Watching], bases: tuple[type, ...]) -> type:
    missing = tuple(base for base in bases if not issubclass(cls, base))
    about = {"__module__": cls.__module__, "__doc__": cls.__doc__, "plain": cls}
    return type(cls.__name__, (cls, *missing), about | cls.in_front()) if missing else cls


def _blank(cls: type[Watching]) -> Watching:
    return cls.__new__(cls)

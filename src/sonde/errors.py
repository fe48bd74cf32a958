"""Errors that the user sees. A message says what happened with the user's values, why, and what to type next."""

import errno
import operator
from typing import SupportsIndex

NO_ROOM = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))  # the disk is full, or a limit of it for files or users


class SondeError(Exception):
    """A mistake that the user can mend. The command line prints it in plain words, without a traceback."""

    exit_code = 2


def require_function(value: object, name: str, example: str) -> None:
    """Raises a `SondeError` that names the argument, with an example, if `value` cannot be called."""
    if not callable(value):
        raise SondeError(f"{name} must be a function, for instance {example}, not {value!r}.")


def require_count(value: object, name: str, *, minimum: int = 1) -> int:
    """Returns `value` if it is a whole number from `minimum` on; otherwise raises a `SondeError` that names the argument."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < minimum:
        raise SondeError(f"{name} must be a whole number, {minimum} or more, not {value!r}.")
    return operator.index(value)


class Stopped(SondeError):
    """By Ctrl-C, before there was anything to tell."""

    exit_code = 130  # as a shell says it


class OutputExistsError(SondeError):
    """A file that would be written exists already. Each message has the way to replace it: of Python, and of the command line."""

    def __init__(self, path: object) -> None:
        super().__init__(f"{path} exists already. Give another name, or pass replace=True to replace it.")
        self.on_command_line = f"{path} exists already. Give another name, or --force to replace it."


class RunNotWritable(SondeError):
    """The directory of a run cannot be created or written: the disk is full or read-only, or the user may not."""


class NoRunError(SondeError):
    """There is no run where one was expected."""


class ConfigError(SondeError):
    """A setting has a value that cannot be meant."""


class CannotReplay(SondeError):
    """Why a step, or a part of it, cannot run again."""


class NonFiniteError(SondeError):
    """Training was stopped because a number in it is not finite. `origin` says where that was made, as far as it could be found."""

    def __init__(self, message: str, origin: object | None = None) -> None:
        super().__init__(message)
        self.origin = origin

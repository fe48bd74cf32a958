"""Errors that the user sees. A message says what happened with the user's values, why, and what to type next."""

import errno

NO_ROOM = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))  # the disk is full, or a limit of it for files or users


class SondeError(Exception):
    """A mistake that the user can mend. The command line prints it in plain words, without a traceback."""

    exit_code = 2


class Stopped(SondeError):
    """By Ctrl-C, before there was anything to tell."""

    exit_code = 130  # as a shell says it


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

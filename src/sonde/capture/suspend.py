"""A tool that runs a model of its own accord is not training it: sessions that watch that model hear nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sonde.capture import patches
from sonde.capture.step_tracker import Loop


@contextmanager
def suspended() -> Iterator[None]:
    """Nobody listens inside; afterwards all do as before, and the time that passed is nobody's."""
    with ExitStack() as after:
        for listener in patches._listeners:
            after.callback(_resume, listener)
            if isinstance(listener, Loop):
                listener.pause()
            patches.unlisten(listener)
        yield


def _resume(listener: patches.Listener) -> None:
    patches.listen(listener)
    if isinstance(listener, Loop):
        listener.resume()

"""What the loop is told is contained: the time that it takes is counted as Sonde's own, and its errors do not reach the training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Concatenate, ParamSpec, cast

from sonde.capture.dynamo import skip_in_dynamo
from sonde.errors import NonFiniteError

if TYPE_CHECKING:
    from sonde.capture.step_tracker import Loop

P = ParamSpec("P")


def contained(method: Callable[Concatenate[Loop, P], None]) -> Callable[Concatenate[Loop, P], None]:
    """Our time is counted, our errors stay ours. KeyboardInterrupt and the like are the user's and pass."""
    place = method.__name__, ""

    @functools.wraps(method)
    def guarded(self: Loop, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.deaf or place in self.faults.retired:
            return
        phases = self._phases
        phases.entered_ns = perf_counter_ns()
        try:
            method(self, *args, **kwargs)
        except NonFiniteError:
            raise  # the user asked for it
        except Exception as error:
            self.faults.caught(*place, error)
        finally:
            self._desk.own_ns += perf_counter_ns() - phases.entered_ns

    skip_in_dynamo(guarded, with_all_it_calls=True)
    return cast("Callable[Concatenate[Loop, P], None]", guarded)

"""The model in evaluation: does it put out numbers?

A forward without gradients, or of a model in evaluation mode, ends in no loss that the guard would see. So what the model puts out is
looked at, as often as a small share of the evaluation's own time allows. Here NaN is bad, and Inf may be: logits are masked with -Inf, and
the logarithm of a probability of 0 is -Inf. Whether an Inf is meant is asked once per run; what the training puts out too is.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from torch import Tensor, nn

from sonde.capture.recorder import Journal
from sonde.capture.replay_buffer import ForwardCall, called
from sonde.events import STATISTICS
from sonde.statistics import reductions
from sonde.statistics.deferred_reads import on_device
from sonde.statistics.table import StatisticsTable
from sonde.statistics.tensor_utils import find_tensors

SHARE = 0.02  # of the time of forwards in evaluation may go into looking at what they put out
START_NS = 2_000_000  # 2 ms: some hundred small forwards are looked at one by one before the share counts; also the most that is saved up
MAX_TOLD = 16  # events in a run: an evaluation that is bad is bad batch after batch

_NUM, _NAN, _INF = (STATISTICS.index(name) for name in ("num", "nan", "inf"))


class Evaluations:
    __slots__ = ("__dict__", "__weakref__", "_under_way")  # see beat.py

    def __init__(self, journal: Journal, on_bad: Callable[[ForwardCall, int, bool], bool]) -> None:
        self._journal = journal
        self._on_bad = on_bad  # (the call, the step, is it only Inf): answers whether it is bad indeed
        self._under_way: list[tuple[nn.Module, ForwardCall | None, int]] = []  # doors entered, the outermost first, and when
        self._thread = 0
        self._purse_ns: float = START_NS
        self._num_told = 0
        self._inf_is_meant = False
        self._nan_is_usual = False  # forwards of the training put out NaN too, and nothing came of it

    def begins(self, model: str, module: nn.Module, args: Any, kwargs: Any, now_ns: int) -> None:
        if self._under_way and self._thread != get_ident():
            return  # the thread that came first is the one that is looked at
        self._thread = get_ident()
        wanted = not self._under_way and self._purse_ns > 0 and not self._nan_is_usual and self._num_told < MAX_TOLD
        self._under_way.append((module, called(model, module, args, kwargs) if wanted else None, now_ns))

    def ended(self, module: nn.Module, output: Any, step: int, now_ns: int) -> None:
        """The forward is over; without an output where it failed."""
        if not self._under_way or self._thread != get_ident():
            return
        place = len(self._under_way) - 1
        while self._under_way[place][0] is not module:
            place -= 1
            if place < 0:
                return
        _, call, began_ns = self._under_way[place]
        del self._under_way[place:]  # and those inside that were interrupted
        if place > 0:
            return
        self._purse_ns = min(self._purse_ns + SHARE * (now_ns - began_ns), START_NS)
        if call is not None and output is not None:
            bad = _bad_numbers(output)
            self._purse_ns -= perf_counter_ns() - now_ns
            if bad is not None:
                self._tell(call, step, *bad)

    def trained(self, output: Any) -> None:
        """A forward of the training, on an observed step. Rows of padding may be NaN, and nobody uses them: not in evaluation either."""
        if not self._nan_is_usual:
            bad = _bad_numbers(output)
            if bad is not None:
                self._nan_is_usual = bad[1] > 0
                self._inf_is_meant = self._inf_is_meant or bad[2] > 0

    def _tell(self, call: ForwardCall, step: int, num: int, num_nan: int, num_inf: int) -> None:
        only_inf = num_nan == 0
        if only_inf:
            self._inf_is_meant = self._inf_is_meant or not self._on_bad(call, step, only_inf)
            if self._inf_is_meant:
                return
        self._num_told += 1
        self._journal.event("nonfinite", step, what="evaluation", where=call.model, num_elements=num, num_nan=num_nan, num_inf=num_inf)
        if not only_inf:
            self._on_bad(call, step, only_inf)  # may stop the training, so the event comes first

    def clear(self) -> None:
        self._under_way.clear()


def _bad_numbers(output: Any) -> tuple[int, int, int] | None:
    """How many numbers there are, how many of them NaN and Inf; None where all are finite, or on a device where one would have to wait."""
    floating: list[Tensor] = [x for _, x in find_tensors(output) if x.is_floating_point() and not on_device(x)]
    if not floating or reductions.check_finite(floating)[1] < 0:
        return None
    rows = StatisticsTable(len(floating))
    rows.measure(0, floating)
    rows.synchronize()
    num, nan, inf = (int(rows.values[:, field].sum()) for field in (_NUM, _NAN, _INF))
    return (num, nan, inf) if nan or inf else None

"""Outputs of models in evaluation: are they finite?

There is no loss that would be checked, so the model's output is checked, as often as a small share of the evaluation's own time allows. An
Inf may be meant (logits are masked with -Inf): that is decided once per run.
"""

from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.incident_types import EvaluationIncident, Incident
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.step_inputs_for_replay import ForwardCall
from sonde.events import NonFinite
from sonde.statistics import reductions
from sonde.statistics.batched_device_reads import on_device
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.tensor_statistics_table import measure_columns

SHARE = 0.02  # of the time of forwards in evaluation may go into checking their outputs
START_NS = 2_000_000  # 2 ms: some hundred small forwards are checked one by one before the share counts; also the largest balance
MAX_RECORDED = 16  # events in a run: an evaluation that is bad is bad batch after batch


class EvalOutputProbe(Probe):
    """Checks what models put out in evaluation."""

    name = "nonfinite_eval_outputs"
    OBSERVED_CALLBACKS = Probe.OBSERVED_CALLBACKS | {"on_forward_end"}

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._open: list[tuple[nn.Module, ForwardCall | None, int]] = []  # forwards under way, the outermost first, and when each began
        self._thread = 0
        self._balance_ns: float = START_NS
        self._num_recorded = 0
        self._is_inf_meant = False
        self._is_nan_usual = False  # forwards of the training put out NaN too, and nothing came of it

    def on_eval_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._open and self._thread != get_ident():
            return  # the thread that came first is the one that is checked
        self._thread = get_ident()
        is_checked = not self._open and self._balance_ns > 0 and not self._is_nan_usual and self._num_recorded < MAX_RECORDED
        model = self._state.model.name if self._state.model is not None else ""
        call = ForwardCall(model, module, args, kwargs, torch.get_rng_state()) if is_checked else None
        self._open.append((module, call, self._context.timer.entered_ns))

    def on_eval_forward_end(self, module: nn.Module, output: Any) -> Incident | None:
        if not self._open or self._thread != get_ident():
            return None
        place = next((i for i in reversed(range(len(self._open))) if self._open[i][0] is module), None)
        if place is None:
            return None
        _, call, began_ns = self._open[place]
        del self._open[place:]  # and those inside that were interrupted
        if place > 0:
            return None
        now_ns = self._context.timer.entered_ns
        self._balance_ns = min(self._balance_ns + SHARE * (now_ns - began_ns), START_NS)
        if call is None or output is None:
            return None
        counts = _count_nonfinite(output)
        self._balance_ns -= perf_counter_ns() - now_ns
        return self._report(call, *counts) if counts is not None else None

    def on_forward_end(self, module: nn.Module, output: Any) -> None:
        """A training forward, on an observed step. Rows of padding may be NaN, and nobody uses them: not in evaluation either."""
        if module.training and not self._is_nan_usual and output is not None:
            counts = _count_nonfinite(output)
            if counts is not None:
                self._is_nan_usual = counts[1] > 0
                self._is_inf_meant = self._is_inf_meant or counts[2] > 0

    def _report(self, call: ForwardCall, num: int, num_nan: int, num_inf: int) -> EvaluationIncident | None:
        is_only_inf = num_nan == 0
        if is_only_inf and self._is_inf_meant:
            return None
        event = NonFinite(what="evaluation", where=call.model, num_elements=num, num_nan=num_nan, num_inf=num_inf)
        return EvaluationIncident(step=self._state.number, event=event, call=call, is_only_inf=is_only_inf)

    def on_incident(self, incident: Incident, is_confirmed: bool) -> None:
        if isinstance(incident, EvaluationIncident):
            self._num_recorded += is_confirmed
            self._is_inf_meant = self._is_inf_meant or (incident.is_only_inf and not is_confirmed)

    def on_step_end(self) -> None:
        self._open.clear()  # a forward whose end was not seen must not hide those of the next step


def _count_nonfinite(output: Any) -> tuple[int, int, int] | None:
    """Number of elements, of NaN and of Inf; None where all are finite, and on a device, where reading would wait."""
    floating: list[Tensor] = [x for _, x in find_tensors(output) if x.is_floating_point() and not on_device(x)]
    if not floating or reductions.check_finite(floating)[1] < 0:
        return None
    columns = measure_columns(floating)
    num, nan, inf = (int(columns[name].sum()) for name in ("num", "nan", "inf"))
    return (num, nan, inf) if nan or inf else None

"""Early stopping that records each decision and its reason in the run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sonde.errors import SondeError
from sonde.events import EarlyStoppingUpdated

if TYPE_CHECKING:
    from sonde.session import DebugSession

MAX_RECORDED = 1000  # evaluations, one event each; the decision is recorded in any case
MODES = ("min", "max", "auto")
_SMALLER = ("loss", "err", "perplexity", "ppl", "mse", "mae", "rmse", "nll", "wer", "cer", "fid", "bpc", "distance")
_LARGER = ("acc", "f1", "auc", "precision", "recall", "score", "iou", "dice", "bleu", "rouge", "r2", "psnr", "ssim", "reward", "return")


class EarlyStopping:
    """Decides when to stop from the values of one metric: `if stopping.step(val_loss): break`. A value is better if it improves the best so
    far by more than `min_delta`. After `patience` evaluations in a row without a better value `step` returns True, from then on always. NaN
    is never better, and is counted. With a `session`, each evaluation is recorded in its run."""

    def __init__(
        self, monitor: str = "val_loss", *, patience: int = 5, min_delta: float = 0.0, mode: str = "auto",
        session: DebugSession | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(monitor, str) or not monitor.strip() or monitor == "self":
            raise SondeError(f"monitor must be the name of a metric, such as 'val_loss', not {monitor!r}. Pass its values to step().")
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise SondeError(f"patience must be a number of evaluations, 1 or more, not {patience!r}.")
        if not isinstance(min_delta, (int, float)) or isinstance(min_delta, bool) or not 0 <= min_delta < math.inf:
            raise SondeError(f"min_delta must be 0 or more, not {min_delta!r}: the improvement over the best value that counts.")
        self.monitor, self.patience, self.min_delta = monitor, patience, float(min_delta)
        self.mode = _checked_mode(mode, monitor)
        self.best = math.nan
        self.best_step = -1  # of the training; where no session watches, the evaluation, from 0
        self.num_evaluations = 0
        self.num_without = 0  # evaluations in a row that were no better than the best
        self.num_nan = 0
        self.stopped = False
        self.why = f"no value of {monitor} yet"
        self._session = session
        self._record()

    def step(self, value: Any) -> bool:
        """Add the value of one evaluation. Returns True if the training should stop."""
        number = _number(value, self.monitor)
        if self._session is not None:
            self._session.log(**{self.monitor: number})
        if self.stopped:
            return True
        self.num_evaluations += 1
        self.num_nan += math.isnan(number)
        gain = self.best - number if self.mode == "min" else number - self.best  # NaN where there is no best value yet
        better = gain > self.min_delta or (math.isnan(self.best) and not math.isnan(number))
        if better:
            self.best, self.best_step = number, self.num_evaluations - 1 if (step := self._last_step) is None else step
        self.num_without = 0 if better else self.num_without + 1
        self.stopped = self.num_without >= self.patience
        self.why = self._reason()
        if self.stopped or self.num_evaluations <= MAX_RECORDED:
            self._record(number, better)
        return self.stopped

    @property
    def _last_step(self) -> int | None:
        return None if self._session is None else self._session.last_step

    def _record(self, value: float | None = None, is_better: bool | None = None) -> None:
        if self._session is None:
            return
        best, best_step = (None, None) if math.isnan(self.best) else (self.best, self.best_step)
        event = EarlyStoppingUpdated(
            monitor=self.monitor, patience=self.patience, min_delta=self.min_delta, mode=self.mode, num_evaluations=self.num_evaluations,
            num_without_improvement=self.num_without, num_nan=self.num_nan, best=best, best_step=best_step, is_stopped=self.stopped,
            reason=self.why, value=value, is_better=is_better,
        )  # fmt: skip
        self._session.emit(event)

    def _reason(self) -> str:
        stopped = "stopped: " if self.stopped else ""
        nan = f"; {self.num_nan} of {self.num_evaluations} values are NaN" if self.num_nan else ""
        if math.isnan(self.best):
            return f"{stopped}{self.monitor} was never a number in {self.num_evaluations} evaluations"
        best = f"best {self.best:.4g} at {'evaluation' if self._last_step is None else 'step'} {self.best_step}"
        if self.num_without == 0:
            return f"{self.monitor} is the best so far, {best}{nan}"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        times = f"{self.num_without} evaluation{'s' * (self.num_without != 1)}"
        return f"{stopped}no improvement of {self.monitor}{by} in {times}, {best}{nan}"

    def __repr__(self) -> str:
        return f"<EarlyStopping of {self.monitor}: {self.why}>"


def _number(value: Any, monitor: str) -> float:
    try:
        return float(value)  # waits for a tensor on a device: the decision needs the number
    except (TypeError, ValueError, RuntimeError) as error:
        raise SondeError(
            f"early stopping by {monitor} needs one number per evaluation, not {type(value).__name__} ({error}).\n"
            f"Pass the mean over the validation data, as in stopping.step(total / len(loader))."
        ) from error


def _checked_mode(mode: Any, monitor: str) -> str:
    if mode not in MODES:
        raise SondeError(f"mode must be one of {', '.join(MODES)}, not {mode!r}: is a smaller or a larger {monitor} better?")
    if mode != "auto":
        return str(mode)
    name = monitor.lower()
    smaller, larger = (any(word in name for word in words) for words in (_SMALLER, _LARGER))
    if smaller == larger:
        raise SondeError(f"is a smaller or a larger {monitor} better? Its name does not show it: pass mode='min' or mode='max'.")
    return "min" if smaller else "max"

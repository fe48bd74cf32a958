"""The native extension: whether it is there and in use. Where it is not, torch and NumPy give the same numbers, slower."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Parameter

from sonde.runlog.format import FramePlan

try:
    from sonde.capture import _kernel

    extension = _kernel
except ImportError:  # built without a compiler
    extension = None  # type: ignore[assignment]

ENABLED = False
"""Whether the extension is in use."""

_BEST = 2  # instruction set: as far as the processor goes


def use_native(on: bool, *, by_table: bool = True, level: int = _BEST) -> bool:
    """Switch the extension on or off; returns whether it is in use now. `by_table` and `level` let tests reach every path through it."""
    global ENABLED, encode_frame
    ENABLED, encode_frame = False, _leave_to_numpy
    if on and extension is not None:
        table = getattr(Tensor, "__dlpack_c_exchange_api__", None) if by_table else None
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        extension.setup(Tensor, Parameter, dtypes, torch.strided, table, level)
        ENABLED = True
        if sys.byteorder == "little":  # as the run on disk
            encode_frame = extension.frame_record
    return ENABLED


def _leave_to_numpy(plan: FramePlan, step: int, time_ns: int, rows: npt.NDArray[np.float64]) -> bytes | None:
    return None


encode_frame: Callable[[FramePlan, int, int, npt.NDArray[np.float64]], bytes | None] = _leave_to_numpy
"""The bytes of `FramePlan.encode`, or None where only that function can encode it: once per step, NumPy's code is not in the processor's
caches any more, and loading it takes longer than the work."""


use_native(os.environ.get("SONDE_NATIVE", "1") != "0")

"""Loads the optional C extension and says whether it is in use. Without it, torch and NumPy give the same numbers, slower."""

import os
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Parameter

from sonde.runlog.record_format import FramePlan

try:
    from sonde.statistics import _native

    extension = _native
except ImportError:  # built without a compiler
    extension = None  # type: ignore[assignment]

ENABLED = False
"""Whether the extension is in use."""

_HIGHEST_LEVEL = 2  # of the instruction set: 0 is SSE2, 1 is AVX2, 2 is AVX-512


def use_native(on: bool, *, use_dlpack: bool = True, level: int = _HIGHEST_LEVEL) -> bool:
    """Switch the extension on or off.

    Args:
        on: whether to use it, where it was built.
        use_dlpack: read tensors through torch's DLPack exchange API, where torch has it, instead of through their methods.
        level: the highest instruction set to use; the processor may have less.

    Returns whether the extension is in use now. `use_dlpack` and `level` exist for tests, which run every path.
    """
    global ENABLED, encode_frame
    ENABLED, encode_frame = False, _not_encoded
    if on and extension is not None:
        dlpack = getattr(Tensor, "__dlpack_c_exchange_api__", None) if use_dlpack else None
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        extension.setup(Tensor, Parameter, dtypes, torch.strided, dlpack, level)
        ENABLED = True
        if sys.byteorder == "little":  # as in the log
            encode_frame = extension.encode_frame
    return ENABLED


def _not_encoded(plan: FramePlan, step: int, time_ns: int, rows: npt.NDArray[np.float64]) -> bytes | None:
    return None


encode_frame: Callable[[FramePlan, int, int, npt.NDArray[np.float64]], bytes | None] = _not_encoded
"""Returns the same bytes as `FramePlan.encode`, or None where only that method can encode the frame.

NumPy needs longer: it is called once per step, when its code is no longer in the processor's caches.
"""


use_native(os.environ.get("SONDE_NATIVE", "1") != "0")

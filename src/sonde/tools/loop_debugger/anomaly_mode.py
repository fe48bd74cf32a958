"""torch's anomaly mode for a block of code, restored on exit to what the user had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def anomaly_mode(*, check_nan: bool) -> Iterator[None]:
    """Switch torch's anomaly mode on. On exit, also by an exception, it is as before, unless the block itself has changed it."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    inside = True, check_nan or (before[0] and before[1])
    torch.autograd.set_detect_anomaly(*inside)
    try:
        yield
    finally:
        if (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == inside:
            torch.autograd.set_detect_anomaly(*before)

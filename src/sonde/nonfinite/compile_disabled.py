"""Compiled code has no operations or layers to look at: while it is looked at, it runs without compiling."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def compile_disabled() -> Iterator[None]:
    """Everything inside runs operation by operation, and is compiled again afterwards."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")  # ours, and harmless
        yield

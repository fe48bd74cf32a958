"""Which bfloat16 layers run on this machine: asked once per test session, in a child process, before torch is imported.

On a processor that claims AMX and traps on it, torch itself dies of SIGILL in bfloat16 layers and takes the test worker along. The process
that pytest is started in asks; what it sets in the environment reaches xdist's workers and the programs that tests start. Asking takes
three seconds, so it is done only where the processor claims an instruction that could trap, or where ASK is set.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from functools import cache
from pathlib import Path

import pytest

from sonde.cpu_bfloat16_support import LIMIT, OPERATIONS, check_bfloat16

ASK = "SONDE_TEST_ASK_PROCESSOR"  # "1": ask, whatever the processor claims
RESULT = "SONDE_TEST_BFLOAT16"  # JSON, for the workers: what was found and what still dies
FLAGS = ("amx_tile", "amx_bf16", "avx512_bf16")  # without one of them oneDNN has no bfloat16 instruction that could trap


def claimed_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Those of `FLAGS` that the processor claims to have; empty where there is no such file (no Linux)."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    claimed = {flag for row in re.findall(r"^flags\s*:(.*)$", text, re.MULTILINE) for flag in row.split()}
    return tuple(flag for flag in FLAGS if flag in claimed)


def ask() -> None:
    """Sets the limit of oneDNN's instructions where bfloat16 dies without it."""
    if RESULT in os.environ or importlib.util.find_spec("torch") is None or not (claimed_flags() or os.environ.get(ASK)):
        return
    check = check_bfloat16()
    os.environ.update(LIMIT if check.failed else {})
    found = check.describe() if check.failed else ""
    os.environ[RESULT] = json.dumps({"found": found, "dies": dict(check.failed_with_limit)})


def found() -> str:
    """One sentence for the report of the tests; "" where bfloat16 does not die."""
    return str(_result().get("found", ""))


def require(*operations: str) -> None:
    """Skips the test where one of these operations (all of them where none is named) cannot run in bfloat16, watched or not."""
    dies = _result().get("dies", {})
    for name in operations or OPERATIONS:
        if name in dies:
            pytest.skip(f"bare bfloat16 {name} dies of {dies[name]} on this processor")
    if "LSTM" in operations and (reason := _refused_lstm()):
        pytest.skip(f"bare bfloat16 LSTM is refused on this processor: {reason}")


def _result() -> dict[str, object]:
    return json.loads(os.environ.get(RESULT, "{}"))


@cache
def _refused_lstm() -> str:
    """torch's message; "" where it works. oneDNN has an LSTM for autocast to bfloat16 only where there is AVX-512.

    An exception kills nobody, so this is tried in the process of the test."""
    import torch

    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(8, 8)(torch.randn(2, 2, 8))
    except RuntimeError as error:
        return str(error).partition(". ")[0]
    return ""

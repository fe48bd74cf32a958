"""Whether bfloat16 layers run on this processor, asked of a child process that may die.

Some virtual machines claim AMX (the flags `amx_tile` and `amx_bf16`) and trap on its instructions. oneDNN, which torch uses for bfloat16
on the CPU, trusts the claim, and the process dies of SIGILL in a linear, convolution or LSTM layer. `ONEDNN_MAX_CPU_ISA` limits the
instructions that oneDNN uses; oneDNN reads it once per process, so it has to be set before the first layer runs.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

OPERATIONS = ("linear", "convolution", "LSTM")
LIMIT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}  # the newest instruction set below AMX: bfloat16 stays as fast as it can be without it
LIMIT_TEXT = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
TIMEOUT_S = 120  # importing torch from a slow network disk takes a minute; longer means that it hangs
MAX_REASON = 200  # characters of an error that are shown

# Each operation runs forward and backward, in bfloat16 parameters and under autocast, in sizes for which oneDNN has kernels of its own.
# A line before and after each operation says how far the child came: what it was doing when it died is the line that has no answer.
CHILD = """
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, OSError, ValueError):
    pass
import torch
from torch import nn

def run(build, *shape):
    for size in (1, 4):
        x = torch.randn(size * shape[0], *shape[1:])
        for autocast in (False, True):
            model = build() if autocast else build().bfloat16()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(x if autocast else x.bfloat16())
            (out[0] if isinstance(out, tuple) else out).float().sum().backward()

operations = {
    "linear": lambda: run(lambda: nn.Linear(64, 64), 16, 64),
    "convolution": lambda: run(lambda: nn.Conv2d(16, 32, 3), 4, 16, 12, 12),
    "LSTM": lambda: run(lambda: nn.LSTM(64, 64), 8, 16, 64),
}
for name in sys.argv[1:]:
    print("begin", name, flush=True)
    try:
        operations[name]()
    except Exception as error:
        print("error", name, *(str(error).split() or [type(error).__name__]), flush=True)
    else:
        print("works", name, flush=True)
"""
COMMAND = (sys.executable, "-c", CHILD)

_Reasons = dict[str, str]  # by operation


@dataclass(frozen=True, slots=True)
class Bfloat16Check:
    """Result of running bfloat16 layers in a child process."""

    failed: Mapping[str, str] = field(default_factory=dict)  # operation -> name of the signal that killed the child
    failed_with_limit: Mapping[str, str] = field(default_factory=dict)  # of these, what dies although oneDNN is limited
    unsupported: Mapping[str, str] = field(default_factory=dict)  # operation -> message: torch refuses it on this processor and lives
    error: str = ""  # why nothing could be asked: the child ended before the first operation

    @property
    def works(self) -> bool:
        """No operation kills the process."""
        return not self.failed and not self.error

    @property
    def works_with_limit(self) -> bool:
        """No operation kills the process once `LIMIT` is set."""
        return not self.failed_with_limit and not self.error

    def describe(self) -> str:
        """What dies, of which signal, and what helps, as one sentence."""
        if not self.failed:
            return "bfloat16 does not trap on this processor"
        dies = f"bfloat16 kills the process on this processor: {_listing(self.failed)}"
        if self.works_with_limit:
            return f"{dies}; {LIMIT_TEXT} prevents it"
        return f"{dies}; with {LIMIT_TEXT} still {_listing(self.failed_with_limit)}"


def check_bfloat16(env: Mapping[str, str] = os.environ, *, command: Sequence[str] = COMMAND, timeout_s: float = TIMEOUT_S) -> Bfloat16Check:
    """Runs every operation in a child process and, where one dies, again with `LIMIT`.

    Args:
        env: environment of the child; this process's own by default.
        command: program to start; it gets the names of the operations as arguments.
        timeout_s: seconds after which a child is killed.

    Takes two to three seconds (the child imports torch), and as long again for each operation that dies.
    """
    try:
        failed, unsupported = _survey(command, OPERATIONS, env, timeout_s)
        limited, _ = _survey(command, failed, {**env, **LIMIT}, timeout_s)
    except _NoAnswer as none:
        return Bfloat16Check(error=str(none))
    return Bfloat16Check(failed, limited, unsupported)


class _NoAnswer(Exception):
    """The child ended before it began an operation."""


def _survey(command: Sequence[str], operations: Iterable[str], env: Mapping[str, str], timeout_s: float) -> tuple[_Reasons, _Reasons]:
    """Which operations die (of which signal), and which raise (with which message). A child that dies is started again for the rest."""
    failed, unsupported, left = _Reasons(), _Reasons(), list(operations)
    while left:
        code, rows, stderr = _run([*command, *left], env, timeout_s)
        ended = {words[1]: words for words in rows if words[0] in ("works", "error")}
        unsupported |= {name: " ".join(words[2:])[:MAX_REASON] for name, words in ended.items() if words[0] == "error"}
        begun = next((words[1] for words in reversed(rows) if words[0] == "begin"), None)
        left = [name for name in left if name not in ended]
        if not left:
            break
        if begun not in left:
            raise _NoAnswer(_ending(code) if code is None or code < 0 else stderr or _ending(code))
        failed[begun] = _ending(code)
        left.remove(begun)
    return failed, unsupported


def _run(command: list[str], env: Mapping[str, str], timeout_s: float) -> tuple[int | None, list[list[str]], str]:
    """Exit code (None: killed after the timeout), the lines of the answer as words, the last line of stderr."""
    try:
        child = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
        code, stdout, stderr = child.returncode, child.stdout, child.stderr
    except subprocess.TimeoutExpired as late:
        code, stderr = None, ""
        stdout = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
    except OSError as error:
        raise _NoAnswer(f"{command[0]} cannot be started: {error.strerror}") from None
    rows = [words for row in stdout.splitlines() if len(words := row.split()) >= 2 and words[1] in OPERATIONS]
    return code, rows, (stderr.strip().splitlines() or [""])[-1][:MAX_REASON]


def _ending(code: int | None) -> str:
    if code is None:
        return "no answer in time"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _listing(failed: Mapping[str, str]) -> str:
    """`{"linear": "SIGILL", "LSTM": "SIGILL"}` as "linear and LSTM die of SIGILL"."""
    parts = []
    for how in dict.fromkeys(failed.values()):
        *others, last = (name for name in failed if failed[name] == how)
        parts.append(f"{', '.join(others)} and {last} die of {how}" if others else f"{last} dies of {how}")
    return ", ".join(parts)

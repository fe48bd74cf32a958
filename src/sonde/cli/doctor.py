"""`sonde doctor`: checks whether Sonde works in this environment."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from sonde.cli._terminal import open_terminal
from sonde.formatting import counted

NEWEST_TRIED = (2, 13)  # torch releases that Sonde's own tests run on
OLDEST = (2, 6)
TORCH_TIMEOUT_S = 120  # importing torch from a slow network disk takes a minute; longer means that it hangs

NO_KERNEL = """the native kernel is not in use: the numbers are the same, but observing a step takes longer.
With a C compiler: pip install --force-reinstall --no-deps sonde. Is SONDE_NATIVE=0 set?"""

# In a process of its own: a broken torch may abort, and this command must report it.
ASK_TORCH = """
import json, torch
try:
    from sonde.statistics.native_extension import ENABLED as native
except ImportError:
    native = None
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), "native": native,
                  "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0}))
"""


class Check(NamedTuple):
    """The result of one check."""

    name: str
    state: str  # "good" | "note": works with a limitation | "bad": must be fixed
    text: str


@click.command()
def doctor() -> None:
    """Check whether Sonde works in this environment, and what to fix.

    \b
    Example:  sonde doctor

    Exit code 0: Sonde can watch trainings here. 1: something must be fixed first.
    """
    from sonde.render.terminal.doctor_checklist import Checklist

    checks = list(examine())
    open_terminal().print(Checklist(checks))
    raise SystemExit(int(any(check.state == "bad" for check in checks)))


def examine() -> Iterator[Check]:
    """All checks, the most basic first."""
    from sonde import __version__

    yield Check("sonde", "good", f"{__version__} in {Path(__file__).parent.parent}")
    yield Check("python", "good", f"{platform.python_version()} ({sys.executable})")
    yield from _torch()
    yield _runs()
    yield _cores()
    for module, extra, use in (("pyarrow", "parquet", "sonde compact"), ("safetensors", "capsule", "sonde replay")):
        if importlib.util.find_spec(module) is None:
            yield Check(module, "note", f"not installed; only {use} needs it: pip install 'sonde[{extra}]'")
        else:
            yield Check(module, "good", f"{importlib.metadata.version(module)}, for {use}")


def _torch() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        yield Check("torch", "bad", "not installed here: runs can be read, but not recorded. pip install torch")
        return
    try:
        command = [sys.executable, "-c", ASK_TORCH]
        child = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TORCH_TIMEOUT_S, check=False)
        answer = json.loads(child.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield Check("torch", "bad", f"is installed, but importing it takes longer than {TORCH_TIMEOUT_S} s")
        return
    except (IndexError, ValueError):
        reason = (child.stderr.strip().splitlines() or [f"it ended with code {child.returncode}"])[-1]
        yield Check("torch", "bad", f"is installed, but cannot be imported: {reason}")
        return
    yield _torch_version(answer)
    yield Check("kernel", "good", "the native statistics kernel is in use") if answer["native"] else Check("kernel", "note", NO_KERNEL)
    yield _bfloat16()


def _bfloat16() -> Check:
    """Some virtual machines claim instructions that they trap on; torch then dies in bfloat16 layers, with Sonde and without it."""
    from sonde.cpu_bfloat16_support import LIMIT_TEXT, OPERATIONS, check_bfloat16

    check = check_bfloat16()
    if check.error:
        return Check("bfloat16", "note", f"could not be tried: {check.error}")
    if not check.works:
        advice = f"Set it before torch is imported: {LIMIT_TEXT} sonde run train.py" if check.works_with_limit else "Train in float32 here"
        return Check("bfloat16", "note", f"{check.describe()}.\n{advice}")
    runs = ", ".join(name for name in OPERATIONS if name not in check.unsupported)
    if check.unsupported:
        refused = "; ".join(f"{name} is refused: {message.partition('. ')[0]}" for name, message in check.unsupported.items())
        return Check("bfloat16", "note", f"works on this processor in {runs}; {refused}")
    limit = f", with ONEDNN_MAX_CPU_ISA={wanted}" if (wanted := os.environ.get("ONEDNN_MAX_CPU_ISA")) else ""
    return Check("bfloat16", "good", f"works on this processor: {runs}{limit}")


def _torch_version(answer: dict[str, object]) -> Check:
    version = str(answer["version"])
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    devices = f"{answer['cuda']} CUDA devices" if answer["cuda"] else "CPU"
    text = f"{version}, {devices}, {counted(int(str(answer['threads'])), 'thread')}"
    if release < OLDEST:
        return Check("torch", "bad", f"{text}. Sonde needs {OLDEST[0]}.{OLDEST[1]} or newer: pip install -U torch")
    if release > NEWEST_TRIED:
        return Check("torch", "note", f"{text}. Newer than the versions that Sonde is tested with; it should work")
    return Check("torch", "good", text)


def _runs() -> Check:
    from sonde.config import load_config

    parent = Path(load_config().output_dir)
    there = parent
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".sonde-doctor-"):
            free_gb = os.statvfs(there).f_bavail * os.statvfs(there).f_frsize / 1e9
    except OSError as error:
        elsewhere = "Elsewhere: sonde run --to DIR, or SONDE_OUTPUT_DIR=DIR"
        return Check("runs", "bad", f"{parent} cannot be written to: {error.strerror}. {elsewhere}")
    state = "note" if free_gb < 1 else "good"
    return Check("runs", state, f"are written to {parent}{os.sep}, {free_gb:.3g} GB free")


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > cores:
        return Check("cores", "note", f"{cores}, but OMP_NUM_THREADS={wanted}: more threads than cores are slow")
    return Check("cores", "good", f"{cores}" + (f", OMP_NUM_THREADS={wanted}" if wanted else ""))

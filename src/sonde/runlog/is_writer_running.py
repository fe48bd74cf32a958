"""Decides whether the process that wrote a log still runs, by host, process id and start time together: ids are reused."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

State = Literal["running", "gone", "unknown"]


def process_identity() -> dict[str, Any]:
    """The identity of this process for its manifest: without /proc, only host and pid."""
    pid = os.getpid()
    fields: dict[str, Any] = {"host": socket.gethostname(), "pid": pid}
    if (boot := _boot()) and (ticks := _start_ticks(pid)):
        fields |= {"boot": boot, "pid_namespace": _pid_namespace(), "start_ticks": ticks}
    return fields


def process_state(manifest: Mapping[str, Any]) -> State:
    """Whether the process of a manifest runs; "unknown" for another host or container."""
    pid = manifest.get("pid")
    if manifest.get("host") != socket.gethostname() or not isinstance(pid, int) or isinstance(pid, bool) or pid < 1:
        return "unknown"
    boot = manifest.get("boot")
    if boot is not None and boot != _boot():
        return "gone"  # the machine has been rebooted since
    if boot is None:
        return _state_by_signal(pid)
    if manifest.get("pid_namespace") != _pid_namespace():
        return "unknown"
    return "running" if _start_ticks(pid) == manifest.get("start_ticks") else "gone"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since the boot; 0 if it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # the name before it may contain spaces
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


def _state_by_signal(pid: int) -> State:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except (OSError, OverflowError):
        return "unknown"
    return "running"

"""Creates run directories, finds runs, and reads and writes their small JSON files."""

import contextlib
import difflib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sonde.errors import NoRunError, RunNotWritable, SondeError
from sonde.runlog.record_format import FORMAT, plain

RUNS = Path("runs")
RUN_JSON = "run.json"
LOG_SUFFIX = ".sonde"
MAX_RUN_JSON = 16 << 20  # bytes; a longer one was not written by Sonde


def new_run_directory(parent: Path, name: str | None = None) -> Path:
    """Create a directory `<time>_<name>_<random hex>` in `parent`; any number can be created in the same second."""
    if name is not None and not isinstance(name, str):
        raise SondeError(f"the name of a run is a string, for instance name='base', not {name!r}.")
    safe = re.sub(r"[^A-Za-z0-9.-]+", "-", name or "run").strip("-.")[:60] or "run"
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        os.makedirs(parent, exist_ok=True)
        for attempt in range(1, 60):
            path = Path(parent) / f"{now}_{safe}_{secrets.token_hex(1 + attempt)}"
            try:
                os.mkdir(path)  # fails if it exists: two processes never share a directory
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise not_writable(Path(parent), error) from error
    raise SondeError(f"No free name for a run in {parent}: every one tried was taken.")


def open_run_directory(path: str | Path) -> Path:
    """Create the directory that the user named, or add to it if it is a run. Other directories that are not empty are refused."""
    if not isinstance(path, (str, os.PathLike)) or path == "":
        raise SondeError(f"a run is written to a directory, for instance to='runs/base'; this is {path!r}.")
    try:
        os.makedirs(path, exist_ok=True)
        names = os.listdir(path)
    except FileExistsError as error:
        raise SondeError(f"The run cannot be written to {path}: it is a file. Name a directory.") from error
    except OSError as error:
        raise not_writable(Path(path), error) from error
    if names and not any(_is_run_file(name) for name in names):
        raise SondeError(
            f"{path} contains other files ({_some(names)}) and is not a run, so nothing is written there. "
            f"Name a new directory, for instance {Path(path) / 'run'}."
        )
    return Path(path)


def write_run_json(directory: Path, info: Mapping[str, Any]) -> None:
    """Write run.json atomically, unless another process of the run has written it."""
    target = Path(directory) / RUN_JSON
    try:
        if not target.exists():
            replace_json(target, {"format": FORMAT, "started": time.time(), **plain(info)})
    except OSError as error:
        raise not_writable(Path(directory), error) from error


def replace_json(target: Path, content: Mapping[str, Any]) -> None:
    """Replace a file atomically: a reader gets the old content or the new one."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(temporary, target)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_run_json(directory: Path) -> dict[str, Any]:
    """The content of run.json; empty without the file. A ValueError describes why it is invalid."""
    return read_json(Path(directory) / RUN_JSON, MAX_RUN_JSON)


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a small file, which is not trusted; empty without the file. A ValueError describes why it is invalid."""
    try:
        text = read_regular_file(path, max_bytes + 1)
        content = json.loads(text) if len(text) <= max_bytes else None
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(content, dict):
        raise ValueError("not an object, or too long")  # noqa: TRY004  (one error type for callers)
    return content


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """The first bytes of a regular file; an OSError for others. Links are not followed, and pipes do not block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "not a regular file")
        return file.read(max_bytes)


def is_run(path: Path) -> bool:
    try:
        return any(name == RUN_JSON or name.endswith(LOG_SUFFIX) for name in os.listdir(path))
    except OSError:
        return False


def log_sizes(path: Path) -> dict[str, int]:
    """The bytes of each log of a run directory, or of a single log file, by file name; without those that are gone meanwhile."""
    sizes = {}
    for file in [path] if path.is_file() else path.glob(f"*{LOG_SUFFIX}"):
        with contextlib.suppress(OSError):
            sizes[file.name] = file.lstat().st_size
    return sizes


def runs_in(parent: Path = RUNS) -> list[Path]:
    """The runs in a directory, newest first."""
    return [path for _, _, path in sorted(_dated_runs(Path(parent)), reverse=True)]


def newest_run(parent: Path = RUNS) -> Path:
    if is_run(parent):
        return Path(parent)
    found = runs_in(parent)
    if not found:
        where = f"in {parent}" if Path(parent).is_dir() else f"here: there is no directory {parent}"
        raise NoRunError(f'No run {where}. Record one: "sonde run train.py", or sonde.watch(model) in the script.')
    return found[0]


def find_run(text: str | None = None, parent: Path = RUNS) -> Path:
    """The run for a text of the user: a directory, a log file, the name of a run in `parent` or an unambiguous part of it."""
    if not text:
        return newest_run(parent)
    path = Path(text)
    if is_run(path) or path.name.endswith(LOG_SUFFIX):
        return path
    if path.is_dir() and (inside := runs_in(path)):
        return inside[0]
    names = [run.name for run in runs_in(parent)]
    matches = [name for name in names if text == name] or [name for name in names if text in name]
    if not matches:  # my_script.py makes runs named my-script
        matches = [name for name in names if text.replace("_", "-") in name.replace("_", "-")]
    if len(matches) == 1:
        return Path(parent) / matches[0]
    if matches:
        raise NoRunError(f"{text!r} matches {len(matches)} runs in {parent}: {_some(matches)}. Type more of the name.")
    raise no_run(path, near=difflib.get_close_matches(text, names, n=3, cutoff=0.4))


def no_run(path: Path, near: list[str] | None = None) -> NoRunError:
    if path.is_dir():
        return NoRunError(
            f'No run in {path}: expected {RUN_JSON}. Did the script run under "sonde run", or call sonde.watch(model, to="{path}")?'
        )
    hint = f"Nearest: {', '.join(near)}." if near else '"sonde runs" lists all runs.'
    if path.exists():
        return NoRunError(f"{path} is a file, but not the log of a run: a run is a directory with {RUN_JSON} in it. {hint}")
    return NoRunError(f"No run {path}: the path does not exist. {hint}")


def _dated_runs(parent: Path) -> Iterator[tuple[float, str, Path]]:
    try:
        paths = [Path(entry.path) for entry in os.scandir(parent) if entry.is_dir()]
    except OSError:
        return
    for path in paths:
        if is_run(path):
            yield started_at(path), path.name, path


def started_at(path: Path) -> float:
    """When a run was started, in seconds since the epoch; 0 if unknown."""
    try:
        started = read_run_json(path).get("started")
        if isinstance(started, (int, float)):
            return float(started)
        return path.stat().st_mtime
    except (OSError, ValueError, OverflowError):
        return 0.0


def _is_run_file(name: str) -> bool:
    return name.lstrip(".").startswith(RUN_JSON) or name.endswith(LOG_SUFFIX)


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")


def not_writable(path: Path, error: OSError) -> RunNotWritable:
    return RunNotWritable(
        f"The run cannot be written to {path}: {error.strerror or error}. "
        "Name another directory with to=… or output_dir=…, or make this one writable."
    )

"""The two files of a capsule on disk: written whole or not at all, and read with nothing taken on trust.

`tensors.safetensors` holds numbers, `capsule.json` everything else. The directory gets its name when both are complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sonde.errors import SondeError
from sonde.replay.capsule.serialization import DamagedError

TENSORS, FACTS = "tensors.safetensors", "capsule.json"
MAX_JSON = 64 << 20  # bytes of capsule.json
MAX_HEADER = 32 << 20  # bytes that tell of the tensors: some hundred thousand of them
MAX_SAME_STEP = 1000  # capsules of one step; further ones are a program gone wild
_WIDTHS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


def safetensors() -> Any:
    """The package that writes and reads tensors, or a letter that says how to get it."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise SondeError("Capsules need safetensors, which is not installed.\nInstall it with: pip install 'sonde[capsule]'") from None
    return safetensors


# ---- writing


def seal(parent: Path, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Writes `parent/name`, or `parent/name-2` … where that is taken, and returns it. A failure leaves nothing behind."""
    text = json.dumps(facts, indent=1, allow_nan=False).encode("ascii")
    if len(text) > MAX_JSON:
        raise SondeError(f"The capsule's description would take {len(text) >> 20} MB, and at most {MAX_JSON >> 20} can be read back.")
    package = safetensors()
    temporary = Path(parent) / f".{name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        os.makedirs(parent, exist_ok=True)
        os.mkdir(temporary)
        try:
            package.torch.save_file(_apart(tensors), temporary / TENSORS)
            (temporary / FACTS).write_bytes(text)
            for path in (temporary / TENSORS, temporary / FACTS, temporary):
                _sync(path)
            return _named(temporary, Path(parent) / name)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise _not_written(parent, error.strerror or str(error)) from error
    except package.SafetensorError as error:  # its own kind, also for a full disk
        raise _not_written(parent, str(error)) from error


def _not_written(parent: Path, reason: str) -> SondeError:
    return SondeError(
        f"No capsule could be written to {parent}: {reason}.\n"
        "The training is not affected. Free some space, or set a smaller max_capsule_mb or another output_dir."
    )


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor on the host, dense, and with memory of its own: the format knows no views."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        tensor = tensor.as_subclass(Tensor).resolve_neg().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return apart


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _named(temporary: Path, target: Path) -> Path:
    for number in range(1, MAX_SAME_STEP):
        path = target if number == 1 else target.with_name(f"{target.name}-{number}")
        try:
            if not os.path.lexists(path):
                os.rename(temporary, path)  # fails where another process was quicker: a directory with files is never replaced
                return path
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
    raise SondeError(f"There are {MAX_SAME_STEP} capsules like {target} already; another one would say nothing new.")


# ---- reading


def unseal(path: Path, max_bytes: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts and the tensors of a capsule. A DamagedError says what is wrong with it; what it holds is never executed."""
    facts = _json(_content(path / FACTS, MAX_JSON), FACTS)
    content = _content(path / TENSORS, max_bytes)
    _check_header(content)
    package = safetensors()
    try:
        return facts, package.torch.load(content)
    except Exception as error:  # whatever torch or the package say of bytes that came from anywhere
        raise DamagedError(f"{TENSORS} cannot be read: {(str(error) or type(error).__name__).splitlines()[0][:200]}") from None


def _content(path: Path, max_bytes: int) -> bytes:
    try:
        # No links: a capsule from elsewhere may only speak of its own files. O_NONBLOCK: a pipe must not keep us waiting.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise DamagedError(f"it has no {path.name}") from None
    except OSError as error:
        reason = "a link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise DamagedError(f"{path.name} cannot be opened: {reason}") from None
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        os.close(fd)
        raise DamagedError(f"{path.name} is not a file")
    with os.fdopen(fd, "rb") as file:
        if facts.st_size > max_bytes:
            raise DamagedError(f"{path.name} has {facts.st_size / 2**20:,.0f} MB, and at most {max_bytes / 2**20:,.0f} are read")
        try:
            return file.read(max_bytes)
        except OSError as error:
            raise DamagedError(f"{path.name} cannot be read: {error.strerror}") from None


def _json(content: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise DamagedError(f"{name} is not strict JSON: {why}") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{name} is not an object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key twice")
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"the word {word}")


def _check_header(content: bytes) -> None:
    """Before anything is allocated: every tensor lies in the file, none over another, and their sizes are what their shapes say."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(MAX_HEADER, len(content) - 8):
        raise DamagedError(f"{TENSORS} has no sound header")
    end = 0
    header = _json(content[8 : 8 + length], f"the header of {TENSORS}")
    header.pop("__metadata__", None)
    for name, begins, ends in sorted((_extent(name, entry) for name, entry in header.items()), key=lambda each: each[1:]):
        if begins != end:
            raise DamagedError(f"{TENSORS} has a gap or an overlap at {name[:80]!r}")
        end = ends
    if end != len(content) - 8 - length:
        raise DamagedError(f"{TENSORS} has {len(content) - 8 - length:,} bytes of numbers, and its header speaks of {end:,}")


def _extent(name: str, entry: Any) -> tuple[str, int, int]:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        shape, (begins, ends) = entry["shape"], entry["data_offsets"]
        sound = all(type(number) is int and 0 <= number < 2**48 for number in (*shape, begins, ends))
        volume = math.prod(size for size in shape if size) if sound else 0
        if sound and len(shape) <= 64 and volume < 2**60 and math.prod(shape) * _WIDTHS[entry["dtype"]] == ends - begins:
            return name, begins, ends
    raise DamagedError(f"{TENSORS} describes {name[:80]!r} in a way that cannot be meant")

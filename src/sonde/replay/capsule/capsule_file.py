"""The two files of a capsule: written atomically, and validated completely when they are read.

`tensors.safetensors` holds the tensors, `capsule.json` everything else. The directory is renamed to its final name when both are complete.
"""

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
from sonde.replay.capsule.value_serialization import DamagedError
from sonde.runlog.own_descriptor import move_apart

TENSORS, DESCRIPTION = "tensors.safetensors", "capsule.json"
MAX_JSON = 64 << 20  # bytes of capsule.json
MAX_HEADER = 32 << 20  # bytes of the header of tensors.safetensors: enough for some hundred thousand tensors
MAX_SAME_STEP = 1000  # capsules of one step: more than that are an error of the program
_WIDTHS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


def safetensors() -> Any:
    """The package safetensors; raises `SondeError` with the command that installs it."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise SondeError("Capsules need safetensors, which is not installed.\nInstall it with: pip install 'sonde[capsule]'") from None
    return safetensors


# ---- writing


class CapsuleFiles:
    """The two files of a new capsule: created by this process, written by it or by a forked child, renamed when they are complete."""

    def __init__(self, parent: Path, name: str) -> None:
        """Create them in a temporary directory of `parent`."""
        self._package = safetensors()
        self._target = Path(parent) / name
        self._temporary = Path(parent) / f".{name}.{os.getpid()}-{secrets.token_hex(4)}"
        self.descriptors: tuple[int, ...] = ()
        try:
            os.makedirs(parent, exist_ok=True)
            os.mkdir(self._temporary)
            for file in (TENSORS, DESCRIPTION):
                fd = os.open(self._temporary / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                self.descriptors += (move_apart(fd),)
        except OSError as error:
            self.discard()
            raise self._write_error(error) from error

    def write(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        text = json.dumps(description, indent=1, allow_nan=False).encode("ascii")
        if len(text) > MAX_JSON:
            raise SondeError(f"{DESCRIPTION} of the capsule would have {len(text) >> 20} MB; the limit is {MAX_JSON >> 20} MB.")
        try:
            for descriptor, content in zip(self.descriptors, (self._package.torch.save(_as_storable(tensors)), text)):
                rest = memoryview(content)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            raise self._write_error(error) from error

    def commit(self) -> Path:
        """Give the directory its name, or that with a number if it is taken, and return its path."""
        try:
            for descriptor in self.descriptors:
                os.fsync(descriptor)
            self._close()
            _sync(self._temporary)
            return _rename(self._temporary, self._target)
        except OSError as error:
            self.discard()
            raise self._write_error(error) from error

    def discard(self) -> None:
        self._close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _close(self) -> None:
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)

    def _write_error(self, error: OSError) -> SondeError:
        return SondeError(
            f"No capsule could be written to {self._target.parent}: {error.strerror or error}.\n"
            "The training is not affected. Free some space, or set a smaller max_capsule_mb or another output_dir."
        )


def _as_storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, each with its own storage: safetensors has no views."""
    storages: set[int] = set()
    storable = {}
    for name, tensor in tensors.items():
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        tensor = tensor.as_subclass(Tensor).resolve_neg().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        storable[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return storable


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename(temporary: Path, target: Path) -> Path:
    for number in range(1, MAX_SAME_STEP):
        path = target if number == 1 else target.with_name(f"{target.name}-{number}")
        try:
            if not os.path.lexists(path):
                os.rename(temporary, path)  # fails if another process was faster: rename never replaces a directory that has files
                return path
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
    raise SondeError(f"There are {MAX_SAME_STEP} capsules {target} already. Delete some of them.")


# ---- reading


def read_files(path: Path, max_bytes: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a capsule. Raises `DamagedError` if anything is invalid; nothing is executed."""
    description = _json(_content(path / DESCRIPTION, MAX_JSON), DESCRIPTION)
    content = _content(path / TENSORS, max_bytes)
    _check_header(content)
    package = safetensors()
    try:
        return description, package.torch.load(content)
    except Exception as error:  # torch and safetensors raise many types for invalid bytes
        raise DamagedError(f"{TENSORS} cannot be read: {(str(error) or type(error).__name__).splitlines()[0][:200]}") from None


def _content(path: Path, max_bytes: int) -> bytes:
    try:
        # O_NOFOLLOW: a capsule from elsewhere must not link to other files. O_NONBLOCK: opening a pipe must not block.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise DamagedError(f"it has no {path.name}") from None
    except OSError as error:
        reason = "a link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise DamagedError(f"{path.name} cannot be opened: {reason}") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise DamagedError(f"{path.name} is not a file")
    with os.fdopen(fd, "rb") as file:
        if status.st_size > max_bytes:
            raise DamagedError(f"{path.name} has {status.st_size / 2**20:,.0f} MB, and at most {max_bytes / 2**20:,.0f} are read")
        try:
            return file.read(max_bytes)
        except OSError as error:
            raise DamagedError(f"{path.name} cannot be read: {error.strerror}") from None


def _json(content: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise DamagedError(f"{name} is not strict JSON: {why}") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{name} is not an object")
    return found


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("the same key twice")
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the constant {name}")


def _check_header(content: bytes) -> None:
    """Validates the header before memory is allocated: tensors lie inside the file, do not overlap, and have the size of their shape."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(MAX_HEADER, len(content) - 8):
        raise DamagedError(f"{TENSORS} has no valid header")
    end = 0
    header = _json(content[8 : 8 + length], f"the header of {TENSORS}")
    header.pop("__metadata__", None)
    for name, begins, ends in sorted((_extent(name, entry) for name, entry in header.items()), key=lambda each: each[1:]):
        if begins != end:
            raise DamagedError(f"{TENSORS} has a gap or an overlap at {name[:80]!r}")
        end = ends
    if end != len(content) - 8 - length:
        raise DamagedError(f"{TENSORS} has {len(content) - 8 - length:,} bytes of data, and its header describes {end:,}")


def _extent(name: str, entry: Any) -> tuple[str, int, int]:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        shape, (begins, ends) = entry["shape"], entry["data_offsets"]
        is_valid = all(type(number) is int and 0 <= number < 2**48 for number in (*shape, begins, ends))
        volume = math.prod(size for size in shape if size) if is_valid else 0
        if is_valid and len(shape) <= 64 and volume < 2**60 and math.prod(shape) * _WIDTHS[entry["dtype"]] == ends - begins:
            return name, begins, ends
    raise DamagedError(f"{TENSORS} has an invalid entry {name[:80]!r}")

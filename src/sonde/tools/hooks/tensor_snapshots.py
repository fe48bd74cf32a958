"""Writes a tensor to an .npz file with `values` and, as JSON, `about`. It contains no pickle and respects a size limit."""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path

import numpy as np
import torch

from sonde.errors import SondeError
from sonde.report import strict
from sonde.statistics.torch_fallback import Unsupported, readable
from sonde.tools.hooks.hook_events import HookEvent
from sonde.views.file import write_new

_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 80  # characters of a layer's name in a file's name
_IN_NUMPY = frozenset(
    {
        torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    }
)  # fmt: skip


def make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SondeError(f"snapshots cannot be written to {directory}: {error.strerror or error}.\nName a writable directory.") from None


def save_snapshot(event: HookEvent, directory: Path, hook: str, max_bytes: int) -> Path | str:
    """Writes the event's tensor. Returns the path, or the reason why nothing was written."""
    if event.tensor is None:
        return "there is no tensor to save"
    try:
        tensor = readable(event.tensor)
    except Unsupported as error:
        return str(error)
    width = tensor.element_size() if tensor.dtype in _IN_NUMPY else 4
    if tensor.numel() * width > max_bytes:
        return f"it has {tensor.numel() * width / 1e6:.3g} MB, more than the limit of {max_bytes / 1e6:.3g} MB: see max_mb of snapshot_to"
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    # numpy has no bfloat16 and no eight-bit floats; float32 represents them exactly.
    plain = tensor.to("cpu", tensor.dtype if tensor.dtype in _IN_NUMPY else torch.float32).resolve_conj().resolve_neg()
    about = {
        "hook": hook,
        "layer": event.layer,
        "item": event.item,
        "step": event.step,
        "pass": "forward" if event.is_forward else "backward",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(event.shape),
        "metadata": event.metadata,
    }
    file = io.BytesIO()
    np.savez(file, values=plain.numpy().reshape(event.shape), about=np.array(json.dumps(strict(about), allow_nan=False)))
    path = _unused_path(directory, f"{_file_name_part(hook)}_{_file_name_part(event.layer)}_step{event.step:06d}_{about['pass']}")
    write_new(path, file.getvalue())
    return path


def _file_name_part(name: str) -> str:
    return _UNSAFE_CHARACTERS.sub("-", name)[-_MAX_NAME:].lstrip(".") or "model"


def _unused_path(directory: Path, stem: str) -> Path:
    """The first unused file name, so that earlier snapshots stay."""
    names = itertools.chain([stem], (f"{stem}-{again}" for again in itertools.count(2)))
    return next(path for name in names if not (path := directory / f"{name}.npz").exists())

"""Writes the trace of torch.profiler to a compressed file. torch compresses line by line at the highest level, which takes several times as
long as recording the steps; here it is in blocks, at a low level."""

import gzip
import shutil
import tempfile
from pathlib import Path

import torch

LEVEL = 3  # of 9: files are a tenth larger than at the highest one
BLOCK = 2**20  # bytes


def write_trace(profiler: torch.profiler.profile, target: Path) -> None:
    """Write the trace of a profiler that has stopped to `target`, a `.gz` file."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".", suffix=".json") as plain:
        profiler.export_chrome_trace(plain.name)
        with Path(plain.name).open("rb") as source, gzip.open(target, "wb", LEVEL) as file:
            shutil.copyfileobj(source, file, BLOCK)

"""Which programs CI runs: a part of each kind, chosen by the hash of the tree, so that all of them have their turn as the code changes.

`make programs` runs the others. The process that pytest is started in sets the seed, and xdist's workers inherit it: all choose the same.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

SEED = "PROGRAMS_SEED"  # set it to repeat a choice; without the prefix SONDE_, since the programs inherit it
WITHOUT_GIT = "0"


def seed() -> str:
    """The seed of the environment, or else the hash of the committed tree, which then is in the environment."""
    if SEED not in os.environ:
        os.environ[SEED] = _hash_of_tree()
    return os.environ[SEED]


def _hash_of_tree() -> str:
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD^{tree}"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return WITHOUT_GIT
    return done.stdout.strip()[:12] or WITHOUT_GIT


def one_in(number: int, programs: Sequence[str], *, always: Collection[str] = ()) -> list[Any]:
    """The programs as parameters of a test, all but one in `number` marked as slow. Those in `always` are among the ones that are not."""
    if not set(always) <= set(programs):
        raise ValueError(f"there is no program {sorted(set(always) - set(programs))}")
    chosen = sorted(programs, key=lambda name: (name not in always, hashlib.sha256(f"{seed()} {name}".encode()).digest()))
    in_ci = set(chosen[: -(-len(programs) // number)])
    return [name if name in in_ci else pytest.param(name, marks=pytest.mark.slow) for name in programs]

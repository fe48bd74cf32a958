"""The tuple of probes is the folder of probes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch")

from sonde.capture import probes
from sonde.capture.probes.probe import Probe

pytestmark = pytest.mark.torch

FILES = sorted(path.stem for path in Path(probes.__file__).parent.glob("*.py") if path.stem not in ("__init__", "probe"))


def probes_in(file: str) -> list[type[Probe]]:
    module = importlib.import_module(f"{probes.__name__}.{file}")
    own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    return [each for each in own if issubclass(each, Probe)]


@pytest.mark.parametrize("file", FILES)
def test_each_file_defines_one_probe(file: str) -> None:
    assert len(probes_in(file)) == 1


def test_the_tuple_lists_the_probes_of_the_folder_each_once() -> None:
    assert len(set(probes.PROBES)) == len(probes.PROBES)
    assert set(probes.PROBES) == {probe for file in FILES for probe in probes_in(file)}


def test_each_probe_has_the_name_of_its_file() -> None:
    """Names are written into runs, in the events of disabled probes."""
    assert {probe.name for probe in probes.PROBES} == set(FILES)

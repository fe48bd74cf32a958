"""Tensors that travel without need: programs that move them, the same with the change that is suggested, and programs that look alike and
have to move what they move.

They know nothing of Sonde, and train on a device that is written in Python (simulated_device.py), all in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import fork_server
from fixed_programs import fix_of, write_fixed
from sonde.events import Finding, Severity
from sonde.report import Report, diagnose

HERE = Path(__file__).parent / "device_transfers"
DEVICE = Path(fork_server.__file__).with_name("simulated_device.py")
BROKEN, HEALTHY = (sorted(path.relative_to(HERE).as_posix() for path in HERE.glob(f"{folder}/*.py")) for folder in ("broken", "healthy"))
FIXED = [f"fixed/{Path(program).name}" for program in BROKEN if fix_of(HERE / program).exists()]


class Expected(NamedTuple):
    kind: str
    text: str  # of the line that is named
    cause: str  # what is said of it
    rule: str = "silent-transfer"


EXPECTED = {
    "again_transformer": Expected("again", "mask = mask.to(x.device)", "that is there already, unchanged, once in every step"),
    "back_cnn": Expected("back", "images = torch.from_numpy(pixels).to(device)", "what back_cnn.py:13 moves from there to the CPU"),
    "back_mlp": Expected("back", "return values.to(x.device)", "what back_mlp.py:11 moves from there to the CPU"),
    "left_behind_cnn": Expected("attribute", "self.mask[None].to(images.device)", "at left_behind_cnn.py:16", "tensor-left-behind"),
    "pageable_cnn": Expected("pageable", "x, y = x.to(device, non_blocking=True)", "(float32 [32, 3, 16, 16], 96 KiB)"),
    "same_mlp": Expected(
        "same", "weights = class_weights.to(device)", "moves the same tensor (float32 [4], 16 bytes) from the CPU to simulated:0"
    ),
    "same_rnn": Expected("same", "batch = {name: part.to(device)", "moves the same tensor (float32 [16, 24], 1.5 KiB)"),
}

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("transfers")
    fixed = [write_fixed(HERE / "broken" / Path(program).name, directory / "programs") for program in FIXED]
    done = fork_server.python(DEVICE, directory, *BROKEN, *fixed, *HEALTHY, cwd=HERE)
    assert done.returncode == 0, done.stderr
    (directory / "output").write_text(done.stdout)
    return directory


def placement(report: Report) -> list[Finding]:
    """What is said of where tensors are. Other rules have their own programs."""
    return [finding for finding in report.findings if finding.rule in {"silent-transfer", "tensor-left-behind"}]


@pytest.mark.parametrize("program", BROKEN)
def test_a_tensor_that_travels_without_need_is_found_with_its_line(program, runs):
    expected = EXPECTED[Path(program).stem]
    (finding,) = placement(diagnose(runs / program.removesuffix(".py")))
    assert (finding.rule, finding.evidence["kind"]) == (expected.rule, expected.kind)
    assert expected.text in str(finding.evidence["source_text"])
    assert expected.cause in finding.cause


@pytest.mark.parametrize("program", [*FIXED, *HEALTHY])
def test_what_has_to_be_moved_is_not_spoken_of(program, runs):
    report = diagnose(runs / program.removesuffix(".py"))
    assert [finding for finding in placement(report) if finding.rule == "silent-transfer" or finding.severity is not Severity.INFO] == []
    assert "silent-transfer" not in [unevaluated.rule for unevaluated in report.not_evaluated]


def test_r01_what_a_program_learns_on_a_device_is_the_same_without_sonde(runs):
    bare = fork_server.python(DEVICE, "-", *BROKEN, cwd=HERE)
    assert bare.stdout.splitlines() == (runs / "output").read_text().splitlines()[: len(BROKEN)]
    assert len(BROKEN) == bare.stdout.count("loss ")


def test_every_program_that_moves_too_much_has_its_change_and_an_expectation():
    assert {Path(program).stem for program in BROKEN} == {Path(program).stem for program in FIXED} == set(EXPECTED)

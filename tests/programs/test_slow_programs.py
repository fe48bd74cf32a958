"""Every rule about speed is proved three times: the slow program is caught by name and line, the program with the suggested change passes
in silence, and the change gives at least half of what was promised.

The programs know nothing of Sonde. Both of a pair take turns in one process, so that whatever else the machine does falls on both. These
tests run by themselves, after all others (`make timing`): a machine that is busy with something else has bottlenecks of its own. Where it
is, they look again before they fail.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import NamedTuple, TypeVar

import pytest

pytest.importorskip("torch")

import torch

from fixed_programs import fix_of, write_fixed
from program_choice import one_in
from program_runner import run_under_sonde
from sonde.events import Finding, Severity
from sonde.report import diagnose
from sonde.rules.registry import RULES

HERE = Path(__file__).parent / "slow"
FEWEST_ROUNDS, MOST_ROUNDS = 2, 6  # a busy machine is given more of them
LOOKS = 3

Answer = TypeVar("Answer")


class Expected(NamedTuple):
    rule: str
    text: str = ""  # of the line that is to blame
    where: str = ""  # or the layer


EXPECTED = {
    "checkpoint_stall_embedding": Expected("checkpoint-stall", 'torch.save({"model"'),
    "cpu_oversubscribed_mlp": Expected("cpu-oversubscribed"),
    "host_sync_confusion": Expected("host-sync", "table[truth[i].item(), guess[i].item()] += 1"),
    "host_sync_prints": Expected("host-sync", "print(step, [p.grad for p in net.parameters()]"),
    "input_bound_remote_images": Expected("input-bound", "for x, y in loader:"),
    "python_bound_augmentation": Expected("python-bound", ""),
    "python_bound_letters": Expected("python-bound", ""),
    "slow_layer_half": Expected("slow-layer", where="4.conv"),
    "slow_layer_subnormal": Expected("slow-layer", where="1"),
    "slow_step_outliers_statistics": Expected("slow-step-outliers", "return [torch.quantile("),
    "unfused_optimizer_mlp": Expected("unfused-optimizer", "opt = torch.optim.Adam("),
    "validation_dominates_mlp": Expected("validation-dominates", "errors = [nn.functional.mse_loss(net(a), b)"),
}
LOOPS = {"python_bound_augmentation": "shifted", "python_bound_letters": "encode"}  # the function whose loop it is

pytestmark = [pytest.mark.torch, pytest.mark.timing]


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("program", one_in(12, sorted(EXPECTED)))
def test_a_planted_bottleneck_is_named_and_its_change_gives_half_of_what_was_promised(program, tmp_path):
    if program == "slow_layer_subnormal" and (times := cost_of_subnormals()) < 3:
        pytest.skip(f"this processor multiplies subnormal numbers in {times:.1f} times the usual time: nothing is slow")
    finding = patiently(caught, program, tmp_path)
    promised = finding.evidence["gain"]
    assert promised >= 0.2
    slow, fixed = load(HERE / f"{program}.py", "slow"), load(write_fixed(HERE / f"{program}.py", tmp_path / "program"), "fixed")
    took: list[tuple[float, float]] = []
    gain = 0.0
    while len(took) < FEWEST_ROUNDS or (gain < promised / 2 and len(took) < MOST_ROUNDS):
        took.append((turn(slow), turn(fixed)))
        gain = 1 - median(after for _, after in took) / median(before for before, _ in took)
    assert gain >= promised / 2, f"{finding.rule} promised {promised:.2f}, the change gave {gain:.2f}: {took}"


@pytest.mark.parametrize("program", one_in(12, sorted(EXPECTED)))
def test_with_the_change_applied_nobody_complains(program, tmp_path):
    patiently(passes, program, tmp_path)


def test_every_program_has_its_change_and_an_expectation_and_every_rule_about_speed_a_program():
    programs = list(HERE.glob("*.py"))
    assert {path.stem for path in programs} == set(EXPECTED)
    assert all(fix_of(path).exists() for path in programs)
    assert {expected.rule for expected in EXPECTED.values()} < {rule.name for rule in RULES}


def patiently(look: Callable[[str, Path], Answer], program: str, folder: Path) -> Answer:
    for attempt in range(1, LOOKS):
        with contextlib.suppress(AssertionError):
            return look(program, folder / f"look{attempt}")
    return look(program, folder / "last")


def passes(program: str, folder: Path) -> None:
    folder.mkdir()
    run, exit_code, output = run_under_sonde(write_fixed(HERE / f"{program}.py", folder / "program"), folder)
    assert exit_code == 0, output
    report = diagnose(run)
    assert [finding for finding in report.findings if finding.severity.rank >= Severity.WARNING.rank] == [], report.summary()
    assert report.verdict == "healthy"


def caught(program: str, folder: Path) -> Finding:
    folder.mkdir()
    expected = EXPECTED[program]
    run, exit_code, output = run_under_sonde(HERE / f"{program}.py", folder)
    assert exit_code == 0, output
    report = diagnose(run)
    assert report.findings, report.summary()
    finding = report.findings[0]
    assert report.verdict == ("problems" if finding.severity.rank >= Severity.WARNING.rank else "healthy"), report.summary()
    assert finding.rule == expected.rule, report.summary()
    assert expected.text in str(finding.evidence.get("source_text", "")), report.summary()
    assert finding.where == expected.where, report.summary()
    assert finding.evidence.get("function") == LOOPS.get(program), report.summary()
    return finding


def cost_of_subnormals() -> float:
    """How many times as long a product of subnormal numbers takes. Some processors have no penalty for them."""
    usual, subnormal = (torch.full((400, 400), value) for value in (1e-3, 1e-39))
    other = torch.full((400, 400), 0.5)

    def shortest_s(matrix: torch.Tensor) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            matrix @ other
            times.append(time.perf_counter() - began)
        return min(times)

    return shortest_s(subnormal) / shortest_s(usual)


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def turn(program: ModuleType) -> float:
    """Seconds that some settled steps of it take."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    steps = program.training()
    for _ in range(program.WARM):
        next(steps)
    began = time.perf_counter()
    for _ in range(program.CHUNK):
        next(steps)
    took = time.perf_counter() - began
    steps.close()
    return took

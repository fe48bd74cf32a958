"""Every rule is proved twice: the broken programs must be caught by name, the healthy ones must pass in silence.

The programs know nothing of Sonde and run unchanged under `sonde run` with its default settings.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from fixed_programs import PROGRAMS, fix_of, write_fixed
from program_choice import one_in
from program_runner import run_under_sonde
from sonde.events import Severity
from sonde.report import diagnose
from sonde.rules._shared.origin_search_results import OPERATION_DEFECTS as KEYS
from sonde.rules.registry import RULES

BROKEN_PROGRAMS = PROGRAMS / "broken"
# Their loss does not fall, which a verdict says: one is too short, the others learn from noise.
NOT_FALLING = {f"healthy/{name}.py" for name in ("k82_deep_tanh_adam", "k84_noise_floor_by_hand", "k85_noise_floor_in_place")}
HEALTHY = sorted(path.relative_to(PROGRAMS).as_posix() for path in PROGRAMS.glob("healthy/*.py"))
BROKEN = sorted(path.relative_to(BROKEN_PROGRAMS).as_posix() for path in BROKEN_PROGRAMS.glob("*/*.py"))
FIXED = [f"fixed/{name}" for name in BROKEN if fix_of(BROKEN_PROGRAMS / name).exists()]
PASSING = [*one_in(7, HEALTHY, always={"healthy/k01_mlp_adam.py"}), *one_in(16, FIXED, always={"fixed/missing_zero_grad/mlp.py"})]
EXPECTED = json.loads((BROKEN_PROGRAMS / "expected.json").read_text(encoding="utf-8"))

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("program", PASSING)
def test_a_healthy_program_gets_no_finding(program, tmp_path):
    broken = program.removeprefix("fixed/")
    path = PROGRAMS / program if broken == program else write_fixed(BROKEN_PROGRAMS / broken, tmp_path / "program")
    run, exit_code, output = run_under_sonde(path, tmp_path)
    assert exit_code == 0, output
    report = diagnose(run)
    alarms = [finding for finding in report.findings if finding.severity.rank >= Severity.WARNING.rank]
    assert not alarms, report.summary()
    # A program that trains bare tensors shows Sonde nothing to watch: then the honest answer is that it cannot tell.
    expected = "nothing_found" if program in NOT_FALLING else "healthy" if report.run.models else "unknown"
    assert report.verdict == expected, report.summary()


@pytest.mark.parametrize("program", one_in(14, BROKEN, always={"missing_zero_grad/mlp.py"}))
def test_a_broken_program_is_caught_with_its_root_cause_first(program, tmp_path):
    expected = EXPECTED[program]
    run, _, output = run_under_sonde(BROKEN_PROGRAMS / program, tmp_path)
    assert run.is_dir(), output
    report = diagnose(run)
    assert report.verdict == "problems", f"{expected['rule']} was expected\n{report.summary()}"
    assert report.findings[0].rule in {expected["rule"], *expected["also_accept"]}, report.summary()


def test_every_rule_has_broken_programs_and_every_broken_program_an_expectation():
    elsewhere = {"nonfinite-origin", *KEYS}  # those of a bad number have theirs in nonfinite/
    elsewhere |= {rule.name for rule in RULES for path in PROGRAMS.glob("slow/*.py") if path.stem.startswith(rule.name.replace("-", "_"))}
    elsewhere |= {"tensor-left-behind", "silent-transfer"}  # they take a device: test_device_transfer_programs.py has one
    assert {EXPECTED[program]["rule"] for program in BROKEN} == {rule.name for rule in RULES} - elsewhere
    assert set(EXPECTED) == set(BROKEN)

"""Every rule is proved twice: the sick programs must be caught by name, the healthy ones must pass in silence.

The programs know nothing of Sonde and run unchanged under `sonde run` with its default settings.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launcher import one_in, run_under_sonde

from sonde.events import Severity
from sonde.report import judge
from sonde.rules import RULES
from sonde.rules.origins import KEYS

HERE = Path(__file__).parent
HEALTHY, FIXED = (sorted(path.relative_to(HERE).as_posix() for path in HERE.glob(form)) for form in ("healthy/*.py", "fixed/*/*.py"))
SICK = sorted(path.relative_to(HERE / "sick").as_posix() for path in HERE.glob("sick/*/*.py"))
EXPECTED = json.loads((HERE / "sick" / "expected.json").read_text(encoding="utf-8"))

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("program", [*one_in(7, HEALTHY), *one_in(16, FIXED)])
def test_a_healthy_program_gets_no_finding(program, tmp_path):
    run, exit_code, output = run_under_sonde(HERE / program, tmp_path)
    assert exit_code == 0, output
    report = judge(run)
    alarms = [finding for finding in report.findings if finding.severity.rank >= Severity.WARNING.rank]
    assert not alarms, report.summary()
    # A program that trains bare tensors shows Sonde nothing to watch: then the honest answer is that it cannot tell.
    assert report.verdict == ("healthy" if report.run.models else "unknown"), report.summary()


@pytest.mark.parametrize("program", one_in(14, SICK))
def test_a_sick_program_is_caught_with_its_root_cause_first(program, tmp_path):
    expected = EXPECTED[program]
    run, _, output = run_under_sonde(HERE / "sick" / program, tmp_path)
    assert run.is_dir(), output
    report = judge(run)
    assert report.verdict == "problems", f"{expected['rule']} was expected\n{report.summary()}"
    assert report.findings[0].rule in {expected["rule"], *expected["also_accept"]}, report.summary()


def test_every_rule_has_sick_programs_and_every_sick_program_an_expectation():
    elsewhere = {"nonfinite-origin", *KEYS}  # those of a bad number have theirs in bad_numbers/
    elsewhere |= {rule.name for rule in RULES for path in HERE.glob("slow/*.py") if path.stem.startswith(rule.name.replace("-", "_"))}
    elsewhere |= {"tensor-left-behind", "silent-transfer"}  # they take a device: test_transfers.py has one
    assert {EXPECTED[program]["rule"] for program in SICK} == {rule.name for rule in RULES} - elsewhere
    assert set(EXPECTED) == set(SICK)

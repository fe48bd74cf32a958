"""The rules give the verdicts that they gave before they became functions of columns.

`golden/verdicts.tar.xz` holds 380 logs, `golden/verdicts.json` what the former rules said about them: see `golden/README.md`.
"""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sonde.report import Report, diagnose
from sonde.rules.contradictions import CLAIMS
from sonde.rules.registry import RULES

GOLDEN = Path(__file__).parent / "golden"
EXPECTED: dict[str, dict[str, Any]] = json.loads((GOLDEN / "verdicts.json").read_text(encoding="utf-8"))
FORMER = {rule for expected in EXPECTED.values() for rule, *_ in expected["findings"]}  # each of them found something
COMPARED = tuple(rule for rule in RULES if rule.name in FORMER)  # a rule that was added since has no former verdict


class Different(NamedTuple):
    reason: str
    findings: list[list[object]]  # those of today: rule, severity, place, step
    damage: str = ""


EARLIER_ATTEMPT = "the former code gave the newest attempt those events of an earlier one that have step numbers above its last step"
AFTER_LAST_STEP = "the former code ignored events after the last complete step that belong to an earlier step"
REPEATED = "repeated step numbers are damage and the first record counts; the former code took them for the start of another attempt"
REPLACED_LATER = "parameters were replaced in the run: the step is the one after the last in which the old ones got gradients, not step 0"
FEW_ANSWERS = "most of the spikes that were analyzed in time are made by samples: how many were depends on the load of the machine"
BEFORE_UPDATE = "of a bad number and a large update in one step, the bad number is the cause: forward and backward come before the update"


def _repeated(*findings: list[object]) -> Different:
    return Different(REPEATED, list(findings), damage="repeat the number of an earlier step")


GAMMA = [[rule, "critical", "", 0] for rule in ("nonfinite-origin", "lr-divergence", "nonfinite-loss")]
DIFFERENT = {
    "attempts__healthy_then_dead_relu": Different(EARLIER_ATTEMPT, [["lr-divergence", "critical", "", 0]]),
    "attempts__healthy_then_label_constant": Different(EARLIER_ATTEMPT, [["label-constant", "critical", "", 0]]),
    "attempts__healthy_then_memory_growth": Different(EARLIER_ATTEMPT, [["memory-growth", "warning", "", 128]]),
    "attempts__healthy_then_nonfinite_loss": Different(
        EARLIER_ATTEMPT, [["all-targets-ignored", "critical", "", 16], ["nonfinite-loss", "warning", "", 16]]
    ),
    "end_exit__eval_in_train_mode": Different(AFTER_LAST_STEP, [["eval-in-train-mode", "warning", "", 16]]),
    "end_interrupt__eval_in_train_mode": Different(AFTER_LAST_STEP, [["eval-in-train-mode", "warning", "", 16]]),
    "end_raise__eval_in_train_mode": Different(AFTER_LAST_STEP, [["eval-in-train-mode", "warning", "", 16]]),
    "broken__stale_optimizer_params__cnn": Different(REPLACED_LATER, [["stale-optimizer-params", "error", "fc", 25]]),
    "end_kill2__stale_optimizer_params": Different(REPLACED_LATER, [["stale-optimizer-params", "error", "fc", 25]]),
    "broken__gradient_spike__bandit": Different(FEW_ANSWERS, [["gradient-spike", "warning", "2", 34]]),
    "every40__gradient_spike": Different(FEW_ANSWERS, [["gradient-spike", "warning", "book", 60]]),
    "ranks__three": Different(
        FEW_ANSWERS,
        [["missing-backward", "critical", "", 0], ["loss-spike", "warning", "", 35], ["exploding-gradient", "critical", "", 35]],
    ),
    "nonfinite__broken__b49_lbfgs_gamma": Different(BEFORE_UPDATE, GAMMA),
    "damaged__repeat_records__nonfinite__broken__b49_lbfgs_gamma": Different(BEFORE_UPDATE, GAMMA),
    "damaged__repeat_records__broken__scheduler_before_optimizer__cnn": _repeated(["scheduler-before-optimizer", "warning", "", 0]),
    "damaged__repeat_records__healthy__k52_lbfgs": _repeated(),
    "damaged__repeat_records__healthy__k70_scaler_skips_scheduled": _repeated(),
    "damaged__repeat_records__healthy__k76_steps_in_first_epoch": _repeated(),
    "damaged__shuffle_some__broken__eval_in_train_mode__mlp": _repeated(["eval-in-train-mode", "warning", "", 28]),
    "damaged__shuffle_some__broken__grads_cleared_before_step__cnn": _repeated(
        ["grads-cleared-before-step", "critical", "", 0], ["loss-plateau", "critical", "stem", 0]
    ),
    "damaged__shuffle_some__healthy__dying_helper_processes": _repeated(),
}


LOST = ("damaged__cut_middle__", "damaged__flip__", "damaged__gap__")  # records of these logs are lost …
LOSS_UNREAD = ("transfers__",)  # … and the losses of these were on a device that could not be read: "nothing found" says nothing there
FOREIGN_FILE = "damaged__foreign_file__nonfinite__healthy_unseen__g03_scaler_warm_up"  # beside the log of another rank
NOTHING_FOUND = {  # no finding, but these crashed or were killed (one: the loss did not fall), which the former code called healthy
    "damaged__keep_first__broken__memory_growth__hooked_autoencoder", "damaged__keep_first__broken__scheduler_too_rarely__cnn",
    "damaged__truncate__broken__graph_leak__gru", "damaged__truncate__healthy__k50_torch_compile", "end_exit__dead_relu",
    "end_exit__memory_growth", "end_exit__scheduler_too_often", "end_interrupt__scheduler_too_often", "end_kill2__gradient_spike",
    "end_kill__dead_relu", "end_kill__loss_spike", "end_raise__loss_spike", "end_raise__memory_growth", "end_term__dead_relu",
    "end_term__memory_growth", "end_term__scheduler_too_often", "killed_at_once", "killed_second",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(GOLDEN / "verdicts.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "verdicts"


def findings(report: Report) -> list[list[object]]:
    return [[finding.rule, str(finding.severity), finding.where, finding.step] for finding in report.findings]


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in DIFFERENT])
def test_a_log_gets_the_findings_of_the_former_rules_in_the_same_order(name: str, runs: Path) -> None:
    report, expected = diagnose(runs / name, rules=COMPARED), EXPECTED[name]
    assert findings(report) == expected["findings"]
    not_evaluated = {rule.rule for rule in report.not_evaluated}
    if name.startswith(LOST + LOSS_UNREAD):
        assert not_evaluated > set(expected["not_evaluated"])
    else:
        assert sorted(not_evaluated) == expected["not_evaluated"]
    is_unseen = name.startswith(LOST + LOSS_UNREAD) or name == FOREIGN_FILE
    quiet = "unknown" if is_unseen else "nothing_found" if name in NOTHING_FOUND else "healthy"
    assert report.verdict == (quiet if expected["verdict"] == "healthy" else expected["verdict"])


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_verdict_that_differs_is_the_one_that_was_explained(name: str, runs: Path) -> None:
    report, different = diagnose(runs / name, rules=COMPARED), DIFFERENT[name]
    assert findings(report) == different.findings
    assert different.damage in " ".join(report.damage)
    before = EXPECTED[name]
    assert (findings(report), sorted(rule.rule for rule in report.not_evaluated)) != (before["findings"], before["not_evaluated"])


def test_every_former_rule_and_every_log_is_part_of_the_comparison(runs: Path) -> None:
    assert {rule.name for rule in COMPARED} == FORMER
    assert len(FORMER) >= 54
    assert {path.name for path in runs.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("rule", sorted({claim.rule for claim in CLAIMS}))
def test_the_words_of_a_claim_are_those_that_its_rule_uses(rule: str, runs: Path) -> None:
    """The check of causes against their evidence goes by words: a rule that states the same in other words must change them there too."""
    missing = {claim.words for claim in CLAIMS if claim.rule == rule}
    for name, expected in EXPECTED.items():
        if missing and any(each[0] == rule for each in expected["findings"]):
            causes = [finding.cause for finding in diagnose(runs / name, rules=COMPARED).findings if finding.rule == rule]
            missing = {words for words in missing if not any(re.search(words, cause) for cause in causes)}
    assert not missing

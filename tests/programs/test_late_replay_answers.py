"""Verdicts do not depend on when the answer of a search comes: at once, or 50 steps later."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

import fork_server
from sonde.report import diagnose
from sonde.runlog.run_reader import Run

pytestmark = pytest.mark.torch
HERE = Path(__file__).parent
PROGRAMS = [
    "nonfinite/broken/b08_triplet_distance.py",
    "broken/loss_spike/mlp.py",
    "broken/gradient_spike/critic.py",
    "broken/loss_scale_collapse/mlp.py",
    "nonfinite/broken/b21_scaler_log_area.py",
    "broken/nonfinite_loss/regression.py",
]
MORE = [
    "broken/loss_spike/gru.py",
    "broken/gradient_spike/bandit.py",
    "broken/loss_scale_collapse/cnn.py",
    "nonfinite/broken/b52_accumulated_poisson.py",
    "nonfinite/broken/b29_masked_mean.py",
    "healthy/k57_scaler_grows_often.py",
    "healthy/k59_heavy_tails.py",
    "nonfinite/healthy/g06_scaler_warm_up.py",
]

# `sonde run` in a process where the answer of every search comes 50 steps after its incident, or at the end of the training.
LATE = """
    import sys
    from sonde.incidents import search_cause_in_child

    class Late(search_cause_in_child.ReplayChild):
        num_polls, answer = 0, None

        def poll(self, timeout_s=0.0):
            if self.answer is None:
                self.answer = super().poll(search_cause_in_child.LIMIT_S)
            self.num_polls += 1
            return self.answer if self.num_polls > 50 or timeout_s > search_cause_in_child.LIMIT_S else None

    if sys.argv[3] == "later":
        search_cause_in_child.ReplayChild, search_cause_in_child.WAIT_S = Late, 0.0
    else:  # every answer is waited for, also on a busy machine
        search_cause_in_child.WAIT_S = search_cause_in_child.LIMIT_S
    from sonde.cli import main
    sys.argv = ["sonde", "run", "--every", "1", "--to", sys.argv[1], sys.argv[2]]  # which steps are observed must not depend on the load
    main()
"""
ANSWERS = ("origin", "origin_unknown", "spike", "overflow")


def findings(run):
    """Without those that judge times, which differ from run to run."""
    found = [each for each in diagnose(run).findings if not any(name.endswith("_ms") for name in each.evidence)]
    return [(each.rule, each.severity, each.where, each.step, each.cause) for each in found]


def searched(run):
    return sorted((event.kind, event.step) for kind in ANSWERS for event in Run(run).events(kind))


@pytest.mark.parametrize("program", [*PROGRAMS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
def test_verdicts_are_the_same_if_every_answer_comes_50_steps_later(program, tmp_path):
    run, late = tmp_path / "now" / "run", tmp_path / "later" / "run"
    for folder in (run, late):
        folder.parent.mkdir()
        when = folder.parent.name
        done = fork_server.python("-c", textwrap.dedent(LATE), folder, (HERE / program).resolve(), when, cwd=folder.parent)
        assert folder.is_dir(), done.stderr
    assert searched(run)
    if searched(late) != searched(run) or "was still searched" in str([event.data for kind in ANSWERS for event in Run(late).events(kind)]):
        # One search at a time: others of the incidents are searched, so the numbers in the sentence may be those of another step.
        assert [each[:-1] for each in findings(late)] == [each[:-1] for each in findings(run)]
    else:
        assert findings(late) == findings(run)
    assert diagnose(late).verdict == diagnose(run).verdict

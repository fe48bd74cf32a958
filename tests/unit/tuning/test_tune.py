"""`tune` on a script with a slow loader and an optimizer that loops: it finds both, and what it promises comes true."""

import json
import time
from dataclasses import asdict
from statistics import median

import pytest

from sonde.errors import SondeError
from sonde.tuning.proposals import Patch
from sonde.tuning.repeat_trials import WARMUP
from sonde.tuning.trial_messages import TrialRequest
from sonde.tuning.tune import tune
from tuning_scripts import SLOW, SMALL

pytestmark = [pytest.mark.torch, pytest.mark.timing]
pytest.importorskip("torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tune")


@pytest.fixture(scope="module")
def tuning(folder, processes):
    script = folder / "slow.py"
    script.write_text(SLOW.format(loader="", optimizer="foreach=False"))
    reports = []
    only = ["workers", "optimizer"]
    result = tune(str(script), only=only, steps=8, repeats=2, progress=lambda *report: reports.append(report), processes=processes)
    return result, reports


def standing(tuning, family):
    return [each.standing for each in tuning.results if each.proposals[0].family == family]


def test_the_slow_loader_and_the_looping_optimizer_are_both_found(tuning):
    result, _ = tuning
    assert "recommended" in standing(result, "workers"), result.to_dict()
    assert "recommended" in standing(result, "optimizer"), result.to_dict()


def test_where_to_change_what_is_said(tuning):
    result, _ = tuning
    changes = {each.proposals[0].family: each.proposals[0] for each in result.results if each.standing == "recommended"}
    assert changes["workers"].site.text == "loader = DataLoader(Slow(), batch_size=16, shuffle=True)"
    assert changes["optimizer"].site.text.startswith("optimizer = Remote(")
    assert changes["workers"].change.startswith("DataLoader(…, num_workers=")


def test_the_training_stays_the_same(tuning):
    result, _ = tuning
    assert result.baseline.loss_noise_share == 0
    for each in result.results:
        assert each.loss.kind == "same" if each.proposals[0].family == "workers" else each.loss.kind in ("same", "close")


def test_what_helped_is_measured_together(tuning):
    result, _ = tuning
    (together,) = result.together
    assert {each.family for each in together.proposals} == {"workers", "optimizer"}
    assert together.gain.num_runs == 2
    assert together.loss.kind in ("same", "close")
    assert result.recommended.gain.low == max(each.gain.low for each in (*result.results, together) if each.standing == "recommended")


def test_the_speed_up_is_real_when_the_changes_are_made_by_hand(tuning, folder, processes):
    result, _ = tuning
    best = result.recommended
    names = {each.family: each.name for each in best.proposals}
    by_hand = folder / "by_hand.py"
    loader = f", num_{names['workers']}" if "workers" in names else ""
    by_hand.write_text(SLOW.format(loader=loader, optimizer=f"{names.get('optimizer', 'differentiable')}={'optimizer' in names}"))
    speeds = {"slow.py": [], "by_hand.py": []}
    for name in ("slow.py", "by_hand.py") * 2:
        request = TrialRequest(str(folder / name), [], False, asdict(Patch()), 0, WARMUP, 8, 1.0, "", "", "")
        speeds[name].append(processes.run(request, name="hand", limit_s=100, tick=lambda step: None).steps_per_s)
    gained = median(speeds["by_hand.py"]) / median(speeds["slow.py"]) - 1
    assert gained > (best.gain.factor - 1) / 2


def test_the_script_is_left_as_it_was(tuning, folder):
    assert (folder / "slow.py").read_text() == SLOW.format(loader="", optimizer="foreach=False")


def test_progress_reports_the_change_and_the_step(tuning):
    _, reports = tuning
    assert {what for what, *_ in reports} > {"the unchanged script", "workers=1", "fused"}
    assert max(step for *_, step, _ in reports) > 0
    assert all(trial <= num_trials for _, trial, num_trials, _, _ in reports)


def test_after_an_interrupt_what_was_not_tried_is_listed(folder, processes):
    script = folder / "small.py"
    script.write_text(SMALL)

    def interrupt(what, *_):
        if what != "the unchanged script":
            raise KeyboardInterrupt  # as Ctrl-C does

    result = tune(str(script), only=["workers", "threads"], steps=5, progress=interrupt, processes=processes)
    assert (result.stopped, result.results) == ("interrupted", ())
    assert "DataLoader(…, num_workers=1)" in result.untried
    assert json.dumps(result.to_dict())


@pytest.mark.timing
def test_time_that_nothing_had_to_be_repeated_in_goes_to_what_was_not_tried_yet(folder, processes):
    script = folder / "slowly.py"
    script.write_text(SMALL)
    waited = []

    def wait(what, *_):
        if what != "the unchanged script" and not waited:
            waited.append(what)
            time.sleep(7)  # more than the half of the time that is for trying each once

    result = tune(str(script), only=["workers", "threads"], steps=5, time_limit_s=14, progress=wait, processes=processes)
    assert len(result.results) > 1


def test_an_interrupt_before_anything_was_measured_is_reported_as_an_error(folder, processes):
    script = folder / "stopped.py"
    script.write_text(SMALL)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(SondeError, match="stopped before the unchanged") as error:
        tune(str(script), steps=5, progress=interrupt, processes=processes)
    assert error.value.exit_code == 130


def test_a_limit_that_is_shorter_than_the_script_is_reported_as_an_error(folder, processes):
    script = folder / "endless.py"
    script.write_text("import time\nwhile True: time.sleep(0.01)\n")
    with pytest.raises(SondeError, match=r"before its first step.*\n.*Give it more time, as in --time-limit 600"):
        tune(str(script), time_limit_s=0.3, processes=processes)

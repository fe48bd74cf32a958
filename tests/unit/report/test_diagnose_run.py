"""diagnose(run) -> Report, over real runs on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, isnan, nan

import numpy as np
import pytest

from sonde.events import STATISTICS, STEP_SCALARS, Event, Finding, Kind, Severity, Site
from sonde.report import diagnose
from sonde.report.own_cost import CALLED
from sonde.report.report_types import MAX_POINTS
from sonde.rules.registry import RULES
from sonde.rules.rule import Clear, Rule
from sonde.runlog.record_format import Gap, event_record, gap_record, header
from sonde.runlog.run_directory import write_run_json
from sonde.runlog.run_reader import Run
from sonde.runlog.writer import Writer
from synthetic_steps import PARAMETER_IDS, falling, healthy, noise, stuck, training


def write(path, steps, *, end="finished", late=(), rank=0, world_size=1):
    """A run on disk with these steps, as capture would have written them."""
    path.mkdir(exist_ok=True)
    write_run_json(path, {"script": "train.py"})
    writer = Writer(path, rank=rank, world_size=world_size, manifest={})
    names = [*STEP_SCALARS, "lr:2", "rss_mb", "kept_graphs"]
    scalars = {name: 1000 + index for index, name in enumerate(names)}
    writer.sites([Site(number, "scalar", name) for name, number in scalars.items()])
    if steps:
        writer.sites(list(steps[0].sites.values()))
    plan = writer.plan(Kind.STEP, ("value",), list(scalars.values()))
    for step in steps:
        for event in step.events:
            writer.event(event.kind, event.step, event.data)
        for kind, frame in step.frames.items():
            writer.frame(writer.plan(kind, frame.fields, frame.sites.tolist()), step.number, np.ascontiguousarray(frame.values.T))
        writer.frame(plan, step.number, np.array([[step.scalars.get(name, nan)] for name in names]))
        writer.flush()
    for event in late:
        writer.event(event.kind, event.step, event.data)
    if end:
        writer.event("end", len(steps), {"how": end, "exit_code": 0, "exception": None})
    writer.close()
    return path


def test_a_healthy_run_is_healthy_with_exit_code_0(tmp_path):
    report = diagnose(write(tmp_path / "base", healthy(100)))
    assert report.verdict == "healthy"
    assert report.exit_code == 0
    assert report.findings == ()
    assert report.not_evaluated == ()
    assert report.run.num_steps == 100
    assert report.run.ended == "finished"
    assert report.overhead.ratio == pytest.approx(1000 / (1000 - 0.1 * 100 * CALLED))
    assert report.overhead.num_observed == 18
    assert report.run.models[0]["class"] == "Net"
    assert report.run.optimizers[0]["class"] == "Adam"


def test_a_broken_run_has_its_root_cause_first_and_consequences_after_it(tmp_path):
    steps = training(loss=stuck, scalars=lambda s: {"lr": 0.0})
    report = diagnose(str(write(tmp_path / "run", steps)))
    assert report.verdict == "problems"
    assert report.exit_code == 1
    assert [finding.rule for finding in report.findings] == ["lr-zero", "loss-plateau"]
    assert report.findings[1].evidence["consequence_of"] == "lr-zero"
    assert "lr-zero" in report.summary()
    assert "  follows:" in report.summary()


def test_a_run_that_trained_nothing_is_unknown_and_says_why(tmp_path):
    report = diagnose(Run(write(tmp_path / "run", [])))
    assert report.verdict == "unknown"
    assert report.exit_code == 3
    assert "no training" in report.why_unknown
    assert isnan(report.overhead.ratio)
    assert len(report.not_evaluated) == len(RULES)


def test_backward_without_updates_is_unknown(tmp_path):
    steps = training(8, scalars=lambda s: {"optimizer_steps": 0})
    assert "no optimizer stepped" in diagnose(write(tmp_path / "run", steps)).why_unknown


def test_training_with_bare_tensors_is_unknown_and_not_called_healthy(tmp_path):
    steps = training(start=[], scalars=lambda s: {"optimizer_steps": 0, "forwards": 0}, observed=lambda s: False)
    report = diagnose(write(tmp_path / "run", steps))
    assert report.verdict == "unknown"
    assert "neither" in report.why_unknown


MENTION = Finding("mention", Severity.INFO, "", 0, "so it is", "nothing", {"ratio": inf, "low": -inf, "none": nan})
MENTIONING = Rule("mention", lambda view: [MENTION], page="")
SILENT = Rule("silent", lambda view: Clear(), page="")


def test_info_never_makes_a_verdict(tmp_path):
    report = diagnose(write(tmp_path / "run", training()), rules=(MENTIONING, SILENT))
    assert report.verdict == "healthy"
    assert len(report.findings) == 1
    assert report.clear == ("silent",)


def test_the_json_is_strict_and_keeps_what_is_not_finite(tmp_path):
    def refuse(word):
        raise AssertionError(word)

    report = diagnose(write(tmp_path / "run", training()), rules=(MENTIONING,))
    document = json.loads(report.to_json(), parse_constant=refuse)
    assert document["schema"] == 1
    assert document["run"] == "run"
    assert document["verdict"] == "healthy"
    assert document["findings"][0]["evidence"] == {"ratio": "Infinity", "low": "-Infinity", "none": "NaN"}
    assert set(document["findings"][0]) == {"rule", "severity", "where", "step", "cause", "fix", "evidence"}
    assert document["findings"][0]["severity"] == "info"
    assert {"not_evaluated", "overhead", "unobserved"} <= set(document)


def test_what_could_not_be_observed_is_listed_once(tmp_path):
    events = {
        step: [
            Event("unobserved", step, {"where": "net.3", "reason": "it is compiled"}),
            Event("retired", step, {"probe": "gradients", "where": "net.0", "error": "RuntimeError: no"}),
        ]
        for step in range(5)
    }
    report = diagnose(write(tmp_path / "run", training(events=events)))
    assert [(one.where, one.reason) for one in report.unobserved] == [("net.3", "it is compiled")]
    assert [(one.where, one.reason) for one in report.retired] == [("gradients net.0", "RuntimeError: no")]


def test_a_run_that_dies_in_the_step_of_its_first_bad_number_is_still_explained(tmp_path):
    late = [
        Event("nonfinite", 40, {"what": "input", "where": "x", "num_nan": 1, "num_inf": 0, "num_elements": 8}),
        Event("nonfinite", 40, {"what": "loss", "where": "", "num_nan": 1, "num_inf": 0, "num_elements": 1}),
    ]
    report = diagnose(write(tmp_path / "run", training(40), end="exception", late=late))
    assert report.findings[0].rule == "nan-input"
    assert report.run.ended == "exception"


@pytest.mark.parametrize("num", [1, 199, 200, 201, 5000])
def test_the_loss_is_thinned_and_every_bad_stretch_stays_visible(tmp_path, num):
    bad = {num // 2, num - 1}
    steps = training(num, loss=lambda s: nan if s in bad else falling(s), observed=lambda s: False)
    series = diagnose(write(tmp_path / "run", steps)).run.loss
    assert 1 <= len(series) <= MAX_POINTS
    assert sum(isnan(value) for _, value in series) == len(bad)
    assert [step for step, _ in series] == sorted({step for step, _ in series})
    assert series[-1][0] == num - 1


def test_damage_is_said_and_what_is_found_in_the_rest_is_reported(tmp_path):
    path = write(tmp_path / "run", training(loss=stuck, scalars=lambda s: {"lr": 0.0}))
    flip(path)
    report = diagnose(path)
    assert report.damage
    assert report.findings[0].rule == "lr-zero"
    assert report.run.num_steps >= 99
    assert any("could not be read" in sentence for sentence in report.unseen)
    assert "not seen: " in report.summary()


def flip(path):
    (log,) = path.glob("*.sonde")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 0xFF
    log.write_bytes(bytes(content))


def zero_most(path):
    (log,) = path.glob("*.sonde")
    content = log.read_bytes()
    log.write_bytes(content[: len(content) // 5] + bytes(len(content) - len(content) // 5))


def drop_records(path):
    (log,) = path.glob("*.sonde")
    with log.open("ab") as file:
        file.write(gap_record(Gap(7, 30, 31, "No space left")))


def add_garbage(path):
    (path / "rank9-host-1-0-000.sonde").write_bytes(b"no log" * 100)


@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        (flip, "of the log of rank 0 could not be read"),
        (zero_most, "of the log of rank 0 could not be read"),
        (drop_records, "7 records of this run, the first at step 30, could not be written (No space left)"),
        (add_garbage, "rank9-host-1-0-000.sonde could not be read at all"),
    ],
    ids=["a flipped byte", "zeros", "a gap", "an unreadable log beside it"],
)
def test_a_run_with_lost_records_is_unknown_and_says_what_is_lost(damage, missing, tmp_path):
    path = write(tmp_path / "run", healthy(100))
    damage(path)
    report = diagnose(path)
    assert (report.verdict, report.exit_code, report.findings) == ("unknown", 3, ())
    assert missing in report.why_unknown
    if damage is not add_garbage:  # the log of rank 0 is whole
        assert report.clear == ()


def test_an_incomplete_last_record_which_every_kill_may_leave_is_no_lost_record(tmp_path):
    path = write(tmp_path / "run", healthy(100))
    (log,) = path.glob("*.sonde")
    log.write_bytes(log.read_bytes()[:-20])
    assert diagnose(path).unseen == ()


def test_lost_records_that_only_the_caller_knows_of_make_the_verdict_unknown(tmp_path):
    report = diagnose(write(tmp_path / "run", healthy(100)), lost="5 records of this run could not be written (No space left)")
    assert (report.verdict, report.why_unknown) == ("unknown", "5 records of this run could not be written (No space left).")


def test_without_a_loss_the_verdict_is_unknown_and_the_rules_that_rest_on_it_are_not_evaluated(tmp_path):
    reason = "the loss could not be read: backward started from a tensor of shape [32]"
    events = {0: [Event("unobserved", 0, {"probe": "loss", "where": "", "reason": reason})]}
    report = diagnose(write(tmp_path / "run", unread(training(loss=lambda step: nan, events=events))))
    assert (report.verdict, report.exit_code) == ("unknown", 3)
    assert report.why_unknown.startswith("The loss was read in no step: backward started from a tensor of shape [32].")
    assert {"nonfinite-loss", "nonfinite-origin", "loss-plateau", "lr-divergence", "loss-spike"}.isdisjoint(report.clear)
    assert {"missing-zero-grad", "lr-zero", "params-not-in-optimizer"} <= set(report.clear)  # these need no loss


def unread(steps):
    """Losses that are NaN in the columns because they were not read: no event says that they are not finite."""
    return [replace(step, events=tuple(each for each in step.events if each.kind != "nonfinite")) for step in steps]


def test_a_loss_that_is_read_in_some_steps_only_is_not_enough(tmp_path):
    steps = unread(training(loss=lambda step: falling(step) if step % 4 == 0 else nan))
    assert "in 25 of 100 steps only" in diagnose(write(tmp_path / "run", steps)).why_unknown


@pytest.mark.parametrize(
    ("kind", "name", "rule"),
    [(Kind.PARAMETER, "parameters", "unchanged-parameter"), (Kind.GRADIENT, "gradients", "vanishing-gradient")],
    ids=["parameters", "gradients"],
)
def test_without_statistics_of_parameters_the_verdict_is_unknown(kind, name, rule, tmp_path):
    empty = {path: dict.fromkeys(STATISTICS, 0.0) for path in PARAMETER_IDS}
    reason = "some tensors could not be measured: Wrapped lacks aten.sum"
    events = {0: [Event("unobserved", 0, {"probe": "parameters_and_gradients", "where": "", "reason": reason})]}
    report = diagnose(write(tmp_path / "run", training(frames=lambda step: {kind: empty}, events=events)))
    assert report.verdict == "unknown"
    assert report.why_unknown == f"No {name} could be measured: Wrapped lacks aten.sum."
    assert rule not in report.clear
    assert "dead-relu" in report.clear


def test_a_disabled_probe_makes_the_verdict_unknown(tmp_path):
    events = {30: [Event("retired", 30, {"probe": "loss", "where": "", "error": "RuntimeError: no"})]}
    report = diagnose(write(tmp_path / "run", training(events=events)))
    assert report.why_unknown == "The probe 'loss' failed and was disabled at step 30: RuntimeError: no."
    assert "disabled probe: loss: RuntimeError: no" in report.summary()


def test_steps_of_forked_children_make_the_verdict_unknown(tmp_path):
    report = diagnose(write(tmp_path / "run", training(), late=[Event("children", 100, {"num_steps": 60})]))
    assert report.why_unknown.startswith("60 training steps ran in forked child processes. Child processes are not watched: call sonde.")


def test_no_training_beside_child_processes_says_how_to_watch_them(tmp_path):
    report = diagnose(write(tmp_path / "run", [], late=[Event("children", 0, {"num_steps": 0})]))
    assert "Child processes are not watched: call sonde.watch(model, optimizer) in the function that they run." in report.why_unknown


def test_a_session_that_measures_nothing_says_so(tmp_path):
    start = {
        "name": "run", "argv": [], "sonde": "", "python": "", "torch": "", "every": None, "mode": "none", "level": "basic",
        "overhead_budget": 0.02, "native_kernel": True, "threads": 1,
    }  # fmt: skip
    report = diagnose(write(tmp_path / "run", [], late=[Event("start", 0, start)]))
    assert report.why_unknown.startswith("Nothing was measured: the mode is 'none'.")
    assert {answer.reason for answer in report.not_evaluated} == {"nothing was measured: the mode is 'none'"}
    assert str(report) == report.summary()


@pytest.mark.parametrize("end", ["exception", ""], ids=["raised", "killed"])
def test_nothing_is_found_in_a_run_that_crashed_but_it_is_not_called_healthy(end, tmp_path, monkeypatch):
    monkeypatch.setattr("sonde.runlog.run_reader.process_state", lambda manifest: "gone")
    report = diagnose(write(tmp_path / "run", healthy(100), end=end))
    assert (report.verdict, report.exit_code, report.why_nothing_found) == ("nothing_found", 0, "The training did not run to its end.")
    assert report.summary().startswith("nothing found: run, 100 steps, ")
    assert json.loads(report.to_json())["verdict"] == "nothing_found"


def test_a_loss_that_did_not_move_is_not_called_healthy(tmp_path):
    report = diagnose(write(tmp_path / "run", training(loss=lambda step: 5.0 + 0.02 * noise(step))))
    assert (report.verdict, report.exit_code) == ("nothing_found", 0)
    assert report.why_nothing_found == "The loss did not fall (5 at first, 5 at the end)."


def test_a_loss_that_falls_again_in_a_second_phase_has_moved(tmp_path):
    steps = training(200, loss=lambda step: falling(step) if step < 100 else falling(step - 100) + 2.2)
    assert diagnose(write(tmp_path / "run", steps), rules=(SILENT,)).verdict == "healthy"


def test_a_loss_that_leaps_far_above_its_start_and_stays_there_is_not_called_healthy(tmp_path):
    steps = training(200, loss=lambda step: falling(step) if step < 100 else 60 * falling(step - 100))
    report = diagnose(write(tmp_path / "run", steps), rules=(SILENT,))
    assert report.verdict == "nothing_found"
    assert report.why_nothing_found.startswith("The loss rose from ")


def test_a_mode_without_statistics_is_not_called_healthy(tmp_path):
    report = diagnose(write(tmp_path / "run", training(observed=lambda step: False)))
    assert (report.verdict, report.why_nothing_found) == (
        "nothing_found", "Neither parameters nor gradients were measured.",
    )  # fmt: skip


def test_the_summary_is_short(tmp_path):
    events = {0: [Event("unobserved", 0, {"where": "net.3", "reason": "it is compiled"})]}
    report = diagnose(write(tmp_path / "run", training(60, events=events, frames=lambda step: {Kind.ACTIVATION: {}})))
    assert report.summary().splitlines() == [
        "healthy: run, 60 steps, finished",
        "not observed: net.3: it is compiled",
        f"{len(report.not_evaluated)} rules had nothing to look at: `sonde diagnose -v`",
    ]


@pytest.mark.parametrize(
    ("gap", "said"),
    [
        (Gap(1, -1, -1, "No space left"), "1 record could not be written: No space left"),
        (Gap(1200, 3, 3, "No space left"), "1,200 records of step 3 could not be written: No space left"),
        (Gap(2, 0, 9, "No space left"), "2 records of steps 0 to 9 could not be written: No space left"),
    ],
    ids=["of no step", "of one step", "of several"],
)
def test_a_run_of_which_nothing_could_be_written_is_not_called_a_script_that_trained_nothing(gap, said, tmp_path):
    path = write(tmp_path / "full", [], end="")
    with next(path.glob("*.sonde")).open("ab") as log:
        log.write(gap_record(gap))
    report = diagnose(path)
    assert (report.verdict, report.damage) == ("unknown", (said,))
    assert report.why_unknown == "The log could not be written (No space left), so there is nothing to judge."


def test_ranks_are_judged_each_by_itself(tmp_path):
    write(tmp_path / "run", training(rank=0), world_size=2)
    write(tmp_path / "run", training(rank=1, loss=stuck, scalars=lambda s: {"lr": 0.0}), rank=1, world_size=2)
    report = diagnose(tmp_path / "run")
    assert report.findings[0].rule == "lr-zero"
    assert report.findings[0].evidence["rank"] == 1
    assert report.run.num_ranks == 2


def test_steps_are_those_of_the_lowest_rank_that_completed_one(tmp_path):
    write(tmp_path, [], rank=0, world_size=2, end="")
    write(tmp_path, healthy(60), rank=1, world_size=2)
    report = diagnose(tmp_path)
    assert (report.run.num_steps, len(report.run.models)) == (60, 1)
    assert report.run.loss


def test_a_process_whose_manifest_is_damaged_adds_no_steps_of_another_one(tmp_path):
    write(tmp_path, healthy(60))
    text = event_record("text", 0, 0, {"text": "hello"})
    (tmp_path / "rank0-hand-001.sonde").write_bytes(header() + text)  # without a manifest it has rank 0 and attempt 0, too
    assert diagnose(tmp_path).run.num_steps == 60

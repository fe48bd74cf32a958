"""The whole comparison: its verdict, its first sentence, and what becomes of runs that are broken, short, old, or many."""

import json
import math
from pathlib import Path

import pytest

from comparison_runs import falling, write_pair_run
from sonde.comparison.compare import compare
from sonde.events import Kind
from sonde.runlog.run_reader import Run

LOSSES = falling(200, 0.02)
GOLDEN = Path(__file__).parents[1] / "runlog" / "golden" / "format-1"


@pytest.fixture
def pair(tmp_path):
    """`pair(a=…, b=…)` writes two runs and compares them."""

    def write(a=None, b=None, losses_a=LOSSES, losses_b=LOSSES):
        return compare(
            write_pair_run(tmp_path / "runs" / "a", losses_a, **(a or {})), write_pair_run(tmp_path / "runs" / "b", losses_b, **(b or {}))
        )

    return write


def test_equal_runs_are_identical(pair):
    found = pair()
    assert (found.verdict, found.exit_code) == ("identical", 0)
    assert found.headline == "No measured number differs in 200 steps, 20 of them observed in both."


def test_another_seed_is_alike_and_says_why_the_numbers_differ(pair):
    other = {"changes": {(0, Kind.PARAMETER, "encoder"): {"std": 1.5}}}
    found = pair(None, other, losses_b=falling(200, 0.02, seed=1))
    assert (found.verdict, found.exit_code) == ("alike", 0)
    assert found.headline.startswith("The losses agree within their noise")
    assert "another seed" in found.details[0]


def test_numbers_that_part_by_rounding_alone_are_alike(pair):
    found = pair(None, {"changes": {(50, Kind.ACTIVATION, "head"): {"max": 2.0 + 4e-7}}})
    assert found.verdict == "alike"
    assert "by rounding alone" in found.details[0]


def test_numbers_that_were_the_same_and_part_are_different_even_where_the_losses_agree(pair):
    found = pair(None, {"changes": {(50, Kind.ACTIVATION, "head"): {"mean": 0.7}}})
    assert (found.verdict, found.exit_code) == ("different", 1)
    assert found.headline.startswith("The same numbers up to step 49; in step 50 the output of head differs first (mean 0.15 against 0.7)")
    assert found.details[0] == "Nothing that was recorded of their configuration differs."


def test_a_loss_that_ends_higher_comes_before_where_it_parted_and_what_was_given(pair):
    argv = {"about": {"argv": ["train.py", "--lr", "0.5"]}, "scalars": {"lr": 0.5}}
    found = pair(None, argv, losses_b=[2 * loss for loss in LOSSES])
    assert found.verdict == "different"
    assert found.headline.startswith("B's loss ends higher: ")
    assert "the loss differs first" in found.details[0]
    assert found.details[1] == "Their settings differ: argument --lr 0.1 against 0.5, lr 0.1 against 0.5."


def test_a_mistake_that_only_one_run_has_comes_first(pair):
    forgotten = {"scalars": {"zero_grads": 0.0, "stale_updates": 1.0}}
    rising = [2.0 * 1.02**step for step in range(200)]
    found = pair(None, forgotten, losses_b=rising)
    assert found.headline.startswith("Found in B and not in A: missing-zero-grad")
    assert next(one.finding.rule for one in found.findings.new) == "missing-zero-grad"
    assert found.details[0].startswith("B's loss ends higher")


def test_the_other_way_round_the_mistake_is_gone(pair):
    forgotten = {"scalars": {"zero_grads": 0.0, "stale_updates": 1.0}}
    found = pair(forgotten, None, losses_a=[2.0 * 1.02**step for step in range(200)])
    assert found.headline.startswith("Found in A and not in B: missing-zero-grad")
    assert not found.findings.new


def test_a_rule_that_could_not_be_evaluated_is_not_one_that_found_nothing(pair):
    forgotten = {"scalars": {"zero_grads": 0.0, "stale_updates": 1.0}}
    rising = [2.0 * 1.02**step for step in range(200)]
    found = pair(forgotten, {}, losses_a=rising, losses_b=rising[:1])
    gone = {one.finding.rule: one.evaluated_in_other for one in found.findings.gone}
    assert gone["missing-zero-grad"] is False
    assert "could not be evaluated in B" in " ".join((found.headline, *found.details))


def test_a_slower_run_with_the_same_numbers_says_both(pair):
    found = pair(None, {"scalars": {"step_ms": 20.0, "backward_ms": 15.0}})
    assert found.verdict == "different"
    assert found.headline == "A step of B is 2.01 times slower (19.9 ms against 9.9 ms), in backward; no measured number differs."


def test_a_slowdown_of_everything_may_be_the_machine(pair):
    slow = {"scalars": {"step_ms": 20.0, "forward_ms": 6.0, "backward_ms": 10.0, "optimizer_ms": 2.0}}
    assert "another machine" in pair(None, slow).headline


@pytest.mark.parametrize(
    "ending, words",
    [
        ({"killed": True}, "B was killed after step 99; A did not."),
        ({"ending": {"how": "exception", "exception": "ValueError: bad"}}, "B ended by ValueError: bad after step 99; A did not."),
        ({"ending": {"how": "exit", "exit_code": 3}}, "B left with exit code 3 after step 99; A did not."),
    ],
    ids=["killed", "exception", "exit"],
)
def test_a_run_that_broke_is_different_from_one_that_did_not(pair, monkeypatch, ending, words):
    monkeypatch.setattr("sonde.runlog.run_reader.process_state", lambda manifest: "gone")
    found = pair(None, ending, losses_b=LOSSES[:100])
    assert (found.verdict, found.headline) == ("different", words)


def test_a_run_that_is_merely_shorter_is_not_different(pair):
    assert pair(losses_b=LOSSES[:100]).verdict == "identical"


def test_a_run_without_steps_cannot_be_compared_and_its_settings_can(pair):
    found = pair(None, {"about": {"torch": "2.6.0"}}, losses_b=())
    assert (found.verdict, found.exit_code) == ("unknown", 0)
    assert found.headline == "Nothing can be compared: B has no complete step."
    assert [one.name for one in found.settings] == ["torch"]


def test_steps_that_have_no_number_in_common_cannot_be_compared(tmp_path):
    a = write_pair_run(tmp_path / "a", LOSSES[:20])
    (log,) = write_pair_run(tmp_path / "b", ()).glob("*.sonde")
    found = compare(a, log)
    assert found.verdict == "unknown"


def test_other_layers_are_listed_and_the_shared_ones_compared(pair):
    found = pair({"layers": ("encoder", "extra")}, {"layers": ("encoder", "more")})
    assert (found.sites.only_a, found.sites.only_b) == (("extra.weight", "extra"), ("more.weight", "more"))
    assert found.parting.first is None


def test_where_different_code_measured_last_digits_are_not_told(pair):
    changes = {(0, Kind.ACTIVATION, "head"): {"max": 2.0 + 4e-7}}
    found = pair(None, {"about": {"native_kernel": False}, "changes": changes})
    assert found.parting.first is None
    assert any("native kernel" in note for note in found.notes)


def test_of_several_ranks_the_lowest_that_both_have_is_compared(tmp_path):
    a = write_pair_run(tmp_path / "a", LOSSES)
    write_pair_run(tmp_path / "b", falling(200, seed=9), rank=1)
    b = write_pair_run(tmp_path / "b", LOSSES, rank=0)
    found = compare(a, b)
    assert found.verdict == "identical"
    assert found.notes == ("B has 2 ranks; rank 0 is compared, the findings are those of all",)


def test_of_several_attempts_the_newest_that_trained_is_compared(tmp_path):
    a = write_pair_run(tmp_path / "a", LOSSES)
    for losses in (falling(200, seed=9), LOSSES, ()):
        b = write_pair_run(tmp_path / "b", losses)
    found = compare(a, b)
    assert found.verdict == "identical"
    assert "B was started 3 times" in found.notes[0]


def test_damage_is_said_and_the_rest_is_compared(tmp_path):
    a, b = (write_pair_run(tmp_path / name, LOSSES) for name in "ab")
    (log,) = b.glob("*.sonde")
    content = bytearray(log.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 50] = b"\xa5" * 50
    log.write_bytes(content)
    found = compare(a, b)
    assert found.verdict == "identical"
    assert 190 <= found.parting.num_common < 200
    assert any("could not be read" in note for note in found.notes)


def test_a_run_and_itself_are_identical_and_it_is_said(tmp_path):
    path = write_pair_run(tmp_path / "a", LOSSES)
    found = compare(path, Run(path))
    assert found.verdict == "identical"
    assert found.notes == ("A and B are the same run",)


def test_a_run_of_the_first_format_can_be_compared(pair, tmp_path):
    (old,) = [path for path in [GOLDEN, *GOLDEN.iterdir()] if path.is_dir() and any(path.glob("*.sonde"))][:1]
    assert compare(old, old).verdict in ("identical", "unknown")
    assert compare(old, write_pair_run(tmp_path / "new", LOSSES)).headline


def test_what_users_logged_under_the_same_name_is_set_side_by_side(pair):
    found = pair({"logged": {"accuracy": [0.5] * 200, "mine": [1.0] * 200}}, {"logged": {"accuracy": [0.75] * 200}})
    assert [(one.name, one.a.value, one.b.value) for one in found.logged] == [("accuracy", 0.5, 0.75)]


def test_the_document_is_strict_json_whatever_is_in_the_numbers(pair):
    nan = {"changes": {(20, Kind.ACTIVATION, "head"): {"mean": math.nan, "max": math.inf}}}
    found = pair(None, nan, losses_b=[*LOSSES[:150], *[math.nan] * 50])
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (document["schema"], document["verdict"]) == (1, "different")
    assert document["losses"][0]["final_b"]["value"] == "NaN"
    assert document["pace"]["times"][0]["ratio"] == pytest.approx(1.0)
    assert {"a", "b", "headline", "details", "notes", "parting", "logged", "findings", "sites", "settings"} < set(document)


def test_the_summary_is_the_verdict_in_a_few_lines(pair):
    assert pair().summary() == "identical: No measured number differs in 200 steps, 20 of them observed in both."

"""A trial runs the script as it would run, under one change, and leaves nothing behind."""

import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from sonde.errors import SondeError
from sonde.tuning.proposals import Patch
from sonde.tuning.repeat_trials import WARMUP, OutOfTime, TrialRunner
from sonde.tuning.start_trial_processes import TrialProcesses
from sonde.tuning.trial_messages import TrialRequest
from tuning_scripts import SMALL

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

LOADER, OPTIMIZER = 32, 35  # lines of the script
NUM_STEPS = 6
NOTING = """
import torch
import torch._dynamo.utils as counted
compile = torch.compile
def noting(function):
    print("compiles, module calls are torch's own:", torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl)
    return compile(function, backend="eager")
torch.compile = noting
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    loss = model(torch.ones(2, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("operations compiled:", counted.counters["stats"]["calls_captured"])
"""


@pytest.fixture
def trial(processes, tmp_path):
    """`trial(text, patch)` runs a script; what it printed is the second answer."""

    def run(text=SMALL, patch=None, *args, num_steps=NUM_STEPS, num_models=0, limit_s=60.0, tick=lambda step: None, runner=processes):
        script = tmp_path / "train.py"
        script.write_text(text)
        change = asdict(patch(f"{script}:{{}}".format) if patch else Patch())
        request = TrialRequest(str(script), list(args), False, change, num_models, WARMUP, num_steps, 0.5, "", "", "")
        done = runner.run(request, name="it", limit_s=limit_s, tick=tick)
        return done, Path(done.log).read_text()

    return run


def change(**more):
    return lambda at: Patch(**{name: {at(line): what for line, what in each.items()} for name, each in more.items()})


@pytest.fixture(scope="module")
def plain(processes, tmp_path_factory):
    script = tmp_path_factory.mktemp("plain") / "train.py"
    script.write_text(SMALL)
    request = TrialRequest(str(script), [], False, asdict(Patch()), 0, WARMUP, NUM_STEPS, 0.5, "", "", "")
    return processes.run(request, name="plain", limit_s=60.0, tick=lambda step: None)


def test_a_trial_measures_the_steps_that_were_asked_for(plain):
    assert (plain.outcome, plain.num_steps, plain.total_steps, len(plain.losses)) == ("measured", 6, 11, 11)
    assert plain.seconds > 0


def test_samples_are_counted_where_the_training_is_fed_from(plain):
    assert plain.num_samples == NUM_STEPS * 8  # and not the hundreds that validation read in between
    assert 0 < plain.waited_s < plain.seconds


def test_a_line_that_makes_the_loaders_of_training_and_validation_is_two_loaders(trial):
    one_by_one = "    loader = DataLoader(Numbers(), 8)\n    check = DataLoader(Numbers(), batch_size=100)\n"
    in_one_line = (
        "    rest = torch.utils.data.Subset(Numbers(), range(300))\n"
        "    loader, check = (DataLoader(each, n) for each, n in ((Numbers(), 8), (rest, 100)))\n"
    )
    done, _ = trial(SMALL.replace(one_by_one, in_one_line))
    assert done.num_samples == NUM_STEPS * 8
    assert [loader.batch_size for loader in done.survey.loaders] == [8, 100]
    assert [loader.batch_size for loader in done.survey.feeding] == [8]


def test_a_trial_finds_out_what_the_script_is_made_of(plain):
    survey = plain.survey
    (loader,) = survey.feeding
    assert (loader.site.line, loader.batch_size, loader.num_workers) == (f"train.py:{LOADER}", 8, 0)
    (optimizer,) = survey.optimizers
    assert (optimizer.name, optimizer.site.line) == ("AdamW", f"train.py:{OPTIMIZER}")
    assert optimizer.implementation == "loop"
    (model,) = survey.models
    assert (model.name, model.takes_images, model.num_conv2d, model.is_compiled) == ("model", True, 1, False)
    assert model.site.text == "out = model(x)"


def test_two_trials_train_alike_although_the_script_sets_no_seed(trial, plain):
    again, _ = trial()
    assert again.losses == plain.losses


def test_workers_make_the_batches_and_the_losses_stay_the_same(trial, plain):
    done, output = trial(SMALL, change(loaders={LOADER: {"num_workers": 2}}))
    assert "made by worker 0 of 2" in output
    assert done.losses == plain.losses


def test_a_batch_size_that_was_given_by_position_is_changed(trial):
    done, _ = trial(SMALL, change(loaders={LOADER: {"batch_size": 32}}))
    assert done.num_samples == NUM_STEPS * 32


def test_a_loader_that_another_line_makes_is_left_alone(trial):
    done, _ = trial(SMALL, change(loaders={LOADER + 1: {"batch_size": 5}}))
    assert done.num_samples == NUM_STEPS * 8


def test_an_optimizer_is_made_with_another_switch(trial):
    done, _ = trial(SMALL, change(optimizers={OPTIMIZER: {"fused": True, "foreach": None}}))
    assert [each.implementation for each in done.survey.optimizers] == ["fused"]


@pytest.mark.needs_bfloat16("linear")
def test_autocast_reaches_into_the_model_and_what_comes_out_is_float32(trial):
    _, output = trial(SMALL, lambda at: Patch(models=("autocast",)), num_models=1)
    assert output.count("inside torch.bfloat16") >= WARMUP + NUM_STEPS  # from the first call on
    assert "inside torch.float32" not in output
    assert {row for row in output.splitlines() if row.startswith("out")} == {"out torch.float32"}


def test_images_reach_the_model_in_channels_last_from_the_first_call_on(trial):
    _, output = trial(SMALL, lambda at: Patch(models=("channels_last",)), num_models=1)
    inside = [row.split()[2] for row in output.splitlines() if row.startswith("inside")]
    assert set(inside) == {"True"}


def test_the_model_is_compiled_once_the_search_for_models_is_over(trial):
    done, output = trial(NOTING, lambda at: Patch(models=("compile",)), num_models=1)
    assert done.outcome == "measured", output
    assert output.count("compiles, module calls are torch's own: True") == 1
    assert output.rstrip().endswith("operations compiled: 2")


def test_threads_are_those_of_the_trial_whatever_the_script_says(trial):
    text = SMALL.replace("def main():", "def main():\n    torch.set_num_threads(1)")
    done, output = trial(text, lambda at: Patch(threads=2))
    assert {row.split()[-1] for row in output.splitlines() if row.startswith("inside")} == {"2"}
    assert done.survey.threads_set_at.text == "torch.set_num_threads(1)"


def test_nothing_that_comes_after_the_measured_steps_is_done(trial, tmp_path):
    trial(SMALL, None, "--save", str(tmp_path / "model.pt"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_no_worker_outlives_its_trial(trial):
    text = SMALL.replace("def main():", "def main():\n    print('I am', os.getpid())")
    _, output = trial(text, change(loaders={LOADER: {"num_workers": 2}}))
    group = int(next(row.split()[2] for row in output.splitlines() if row.startswith("I am")))
    for _ in range(100):  # the kernel takes a moment
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_a_script_that_raises_says_what_and_its_traceback_is_in_the_log(trial):
    done, output = trial(SMALL, None, "--fail-at", "4")
    assert (done.outcome, done.error, done.total_steps) == ("failed", "ValueError: row 7 is bad", 4)
    assert 'raise ValueError("row 7 is bad")' in output


def test_a_script_with_arguments_of_its_own_complains_by_itself(trial):
    done, output = trial(SMALL, None, "--nonsense")
    assert (done.outcome, done.error) == ("failed", "it exited with 2")
    assert "unrecognized arguments: --nonsense" in output


def test_a_script_that_ends_early_is_measured_as_far_as_it_went(trial):
    done, _ = trial(SMALL, None, "--steps", "12", num_steps=50)
    assert (done.outcome, done.num_steps, done.total_steps) == ("ended", 7, 12)


def test_a_process_that_dies_is_an_answer_too(trial):
    done, _ = trial("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert (done.outcome, done.error) == ("failed", "the process was killed by signal 9 before anything was measured")


def test_a_script_that_hangs_is_stopped_at_its_limit(trial):
    done, output = trial("print('waiting', flush=True)\nwhile True: pass\n", limit_s=0.5)
    assert (done.outcome, output) == ("stuck", "waiting\n")


def test_an_interrupt_ends_the_trial_that_is_under_way(trial, tmp_path):
    there = tmp_path / "pid"

    def interrupt(step):
        if there.exists() and there.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trial(f"import os\nopen({str(there)!r}, 'w').write(str(os.getpid()))\nwhile True: pass\n", tick=interrupt)
    done, _ = trial()  # and the fork server is ready for the next one
    assert done.outcome == "measured"
    with pytest.raises(ProcessLookupError):
        os.kill(int(there.read_text()), 0)


def test_two_optimizers_in_turn_make_one_step(trial):
    text = """
import torch
one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
for number in range(40):
    for model, optimizer in ((one, first), (two, second)):
        loss = (model(torch.ones(4, 2)) - number).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(number)
"""
    done, output = trial(text)
    assert done.total_steps == WARMUP + NUM_STEPS
    assert output.splitlines()[-1] in ("9", "10")
    assert len(done.survey.models) == 2


def test_where_nothing_can_be_forked_an_interpreter_is_started_for_each(trial, plain, tmp_path_factory):
    with TrialProcesses(tmp_path_factory.mktemp("alone"), fork=False) as alone:
        done, _ = trial(SMALL, runner=alone)
    assert (done.outcome, done.losses) == ("measured", plain.losses)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print('hello')", "ended without training"),
        ("raise RuntimeError('no data')", "failed before its first step, as it is: RuntimeError: no data"),
        (SMALL.replace("default=60", "default=7"), "ended after 7 steps"),
    ],
    ids=["no training", "it fails", "too short"],
)
def test_a_script_that_cannot_be_tuned_is_refused_with_an_explanation(processes, tmp_path, text, words):
    script = tmp_path / "train.py"
    script.write_text(text)
    request = TrialRequest(str(script), [], False, {}, 0, WARMUP, NUM_STEPS, 0.5, "", "", "")
    with pytest.raises(SondeError, match=words):
        TrialRunner(processes, request, time.monotonic() + 60, lambda *_: None).run_first()


def test_no_trial_is_begun_for_which_there_is_no_time(processes, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SMALL)
    request = TrialRequest(str(script), [], False, {}, 0, WARMUP, NUM_STEPS, 0.5, "", "", "")
    runner = TrialRunner(processes, request, time.monotonic() + 60, lambda *_: None)
    runner.run_first()
    runner.deadline = time.monotonic()
    with pytest.raises(OutOfTime):
        runner.run_baseline()
    assert runner.num_trials == runner.summary().num_runs == 1


def test_a_script_that_can_run_only_once_is_refused_with_an_explanation(processes, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SMALL.replace("options = parser", f"open({str(tmp_path / 'model.pt')!r}, 'x')\n    options = parser"))
    request = TrialRequest(str(script), [], False, {}, 0, WARMUP, NUM_STEPS, 0.5, "", "", "")
    runner = TrialRunner(processes, request, time.monotonic() + 60, lambda *_: None)
    runner.run_first()
    with pytest.raises(SondeError, match=r"ran once, but failed the second time: FileExistsError"):
        runner.run_baseline()

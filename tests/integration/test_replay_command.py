"""`sonde replay`: a capsule made in one place names the same origin in another process, with a copy of the script in another directory."""

import json
import os
import shutil
from pathlib import Path

import pytest

import fork_server

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
pytest.importorskip("safetensors")

HEAD = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        {forward}

def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches:
        out = model(x)
        {loss}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("trained")
"""
MAIN = """
if __name__ == "__main__":
    torch.manual_seed(7)
    train(Net(), [(torch.rand(6, 4) + 1, torch.rand(6, 3) + 1) for _ in range(3)])
"""
PLAIN_FORWARD, PLAIN_LOSS = "return self.head(self.body(x))", "loss = (out - y).square().mean()"

LOG_IN_FORWARD = HEAD.format(forward="return self.head(self.body(x)) + x.log().mean()", loss=PLAIN_LOSS)
DIVISION_IN_LOSS = HEAD.format(forward=PLAIN_FORWARD, loss="loss = ((out - 1) / y).square().mean()")
SQRT_IN_BACKWARD = HEAD.format(
    forward="return self.head(self.body(x)) * (x * self.head.bias.sum()).square().sum(1, keepdim=True).sqrt()", loss=PLAIN_LOSS
)
BY_CHANCE = HEAD.format(forward="return self.head(self.body(x)) / (torch.rand(1) > 0.5)", loss=PLAIN_LOSS)

# Lives through one bad step under the tracer, as a session does, and keeps it.
MAKER = """
import sys, torch, train
from sonde.replay.capsule.create_capsule import save_capsule
from sonde.nonfinite.operation_tracer import NonFiniteTracer

torch.manual_seed(1)
model = train.Net()
x, y = {batch}
weights = {{name: value.clone() for name, value in model.state_dict().items()}}
state = torch.get_rng_state()
class Enough(Exception): pass
def stop(*_): raise Enough
torch.optim.SGD.step = stop
with NonFiniteTracer({{"": model}}) as tracer:
    try:
        train.train(model, [(x, y)])
    except Enough:
        pass
assert tracer.origin is not None
model.load_state_dict(weights)
print(save_capsule("capsules", step=41, model=model, args=(x,), kwargs={{}}, rng=state, loss_inputs={{"y": y}}, origin=tracer.origin))
"""
ZERO_IN_BATCH = "torch.tensor([[1., 2, 3, 4], [1, 0, 3, 4], [5, 6, 7, 8]]), torch.ones(3, 3)"
ZERO_IN_TARGET = "torch.rand(3, 4), torch.tensor([[1., 1, 0], [1, 1, 1], [2, 2, 2]])"
ZERO_ROW = "torch.tensor([[1., 2, 3, 4], [0, 0, 0, 0], [5, 6, 7, 8]]), torch.ones(3, 3)"


@pytest.fixture
def sonde(forked_sonde):
    return forked_sonde


@pytest.fixture(scope="module")
def capsules(tmp_path_factory):
    """Capsules by the script and the batch that they were made with, each in a directory and a process of their own."""
    known = {}

    def make(script, batch):
        if (script, batch) not in known:
            there = tmp_path_factory.mktemp("there")
            (there / "train.py").write_text(script)
            (there / "make.py").write_text(MAKER.format(batch=batch))
            child = fork_server.python("make.py", cwd=there)
            assert child.returncode == 0, child.stderr
            (there / "train.py").unlink()
            known[script, batch] = there / child.stdout.split()[-1]
        return known[script, batch]

    return make


@pytest.fixture
def made(tmp_path, capsules):
    """`made(script)`: a copy of the capsule of that script's bad step, here."""

    def copy(script, batch=ZERO_IN_BATCH):
        return Path(shutil.copytree(capsules(script, batch), tmp_path / "capsule")).name

    return copy


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.py"):
        (tmp_path / name).write_text(text)
        return name

    return write


def assert_same(child, *said):
    assert child.returncode == 0, child.stdout + child.stderr
    assert "It is the origin that is recorded in the capsule." in child.stdout
    assert "trained" not in child.stdout
    assert "note" not in child.stdout
    for text in said:
        assert text in child.stdout


@pytest.mark.parametrize(
    ("program", "batch", "said"),
    [
        (LOG_IN_FORWARD, ZERO_IN_BATCH, ("made by log", "train.py:13", "x.log().mean()")),
        (DIVISION_IN_LOSS, ZERO_IN_TARGET, ("made by div", "train.py:19", "((out - 1) / y)")),
        (SQRT_IN_BACKWARD, ZERO_ROW, ("the backward of sqrt", "train.py:13")),
    ],
    ids=["forward", "loss", "backward"],
)
def test_a_capsule_names_the_same_origin_elsewhere(sonde, script, made, program, batch, said):
    assert_same(sonde("replay", made(program, batch), "--script", script(program + MAIN)), *said)


def test_a_training_at_the_level_of_the_module_is_replayed(sonde, script, made):
    capsule = made(DIVISION_IN_LOSS, ZERO_IN_TARGET)
    loop = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in [(torch.rand(6, 4), torch.ones(6, 3))] * 3:
    out = model(x)
    loss = ((out - 1) / y).square().mean()
    loss.backward()
    optimizer.step()
    print("trained")
"""
    assert_same(sonde("replay", capsule, "--script", script(HEAD.format(forward=PLAIN_FORWARD, loss="pass") + loop)), "made by div")


UNLUCKY = """torch.ones(3, 4), torch.ones(3, 3)
while True:
    state = torch.get_rng_state()
    if torch.rand(1) <= 0.5:
        torch.set_rng_state(state)
        break
"""


def test_chance_is_replayed_as_it_was(sonde, script, made):
    capsule = made(BY_CHANCE, UNLUCKY)
    for seed in (7, 8):
        assert_same(sonde("replay", capsule, "--script", script(BY_CHANCE + MAIN.replace("seed(7)", f"seed({seed})"))), "made by div")


def test_a_weight_that_is_bad_already_is_the_origin(sonde, script, made):
    broken = "torch.ones(3, 4), torch.ones(3, 3)\nwith torch.no_grad(): model.head.weight[1, 2] = float('nan')"
    program = HEAD.format(forward=PLAIN_FORWARD, loss=PLAIN_LOSS)
    child = sonde("replay", made(program, broken), "--script", script(program + MAIN))
    assert_same(child, "head.weight")


def test_a_script_in_which_the_defect_is_mended_stays_sound(sonde, script, made):
    capsule = made(LOG_IN_FORWARD)
    child = sonde("replay", capsule, "--script", script(LOG_IN_FORWARD.replace("x.log()", "x.clamp_min(1e-6).log()") + MAIN))
    assert child.returncode == 1, child.stderr
    assert "No NaN or Inf appeared in the replay." in child.stdout
    assert "The capsule has another origin: log" in child.stdout


def test_lines_may_have_moved_meanwhile(sonde, script, made):
    capsule = made(LOG_IN_FORWARD)
    assert_same(sonde("replay", capsule, "--script", script("# a new comment\n\n" + LOG_IN_FORWARD + MAIN)), "train.py:15")


def test_evaluation_before_the_training_is_left_alone(sonde, script, made):
    program = LOG_IN_FORWARD + MAIN.replace(
        "train(Net()", "model = Net()\n    with torch.no_grad():\n        model.eval()(torch.ones(2, 4))\n    train(model.train()"
    )
    assert_same(sonde("replay", made(LOG_IN_FORWARD), "--script", script(program)))


def test_a_target_that_is_assigned_after_the_call_is_told(sonde, script, made):
    program = HEAD.format(forward=PLAIN_FORWARD, loss="y = y * 1; loss = ((out - 1) / y).square().mean()")
    child = sonde("replay", made(DIVISION_IN_LOSS, ZERO_IN_TARGET), "--script", script(program + MAIN))
    assert "made by div" in child.stdout  # computed from the capsule's target
    late = HEAD.format(forward=PLAIN_FORWARD, loss="y = torch.ones(3, 3); loss = ((out - 1) / y).square().mean()")
    child = sonde("replay", "capsule", "--script", script(late + MAIN))
    assert child.returncode == 1
    assert "y was assigned again after the model's call" in child.stdout


def test_a_script_that_catches_everything_does_not_train_on(sonde, script, made):
    careless = "        try:\n            loss.backward()\n        except:\n            pass\n"
    program = LOG_IN_FORWARD.replace("        loss.backward()\n", careless)
    assert_same(sonde("replay", made(LOG_IN_FORWARD), "--script", script(program + MAIN)))


def test_what_a_script_closes_it_closes(sonde, script, made, tmp_path):
    main = MAIN.replace("    train(", "    try:\n        train(") + "    finally:\n        open('closed', 'w').write('yes')\n"
    program = LOG_IN_FORWARD + main
    assert_same(sonde("replay", made(LOG_IN_FORWARD), "--script", script(program)))
    assert (tmp_path / "closed").read_text() == "yes"


def test_a_compiled_model_is_replayed_operation_by_operation(sonde, script, made):
    program = LOG_IN_FORWARD + MAIN.replace("train(Net()", "train(torch.compile(Net())")
    child = sonde("replay", made(LOG_IN_FORWARD), "--script", script(program))
    assert child.returncode == 0, child.stdout + child.stderr


def test_arguments_of_the_script_are_its_own(sonde, script, made):
    program = LOG_IN_FORWARD + MAIN.replace("torch.manual_seed(7)", "print(sys.argv[1:])")
    child = sonde("replay", made(LOG_IN_FORWARD), "--script", script(program), "--", "--lr", "0.1", "x")
    assert "['--lr', '0.1', 'x']" in child.stdout
    assert child.returncode == 0


def test_a_model_from_a_function_is_replayed_with_its_loss(sonde, script, made):
    capsule = made(DIVISION_IN_LOSS, ZERO_IN_TARGET)
    both = "def loss_of(out, y):\n    return ((out - 1) / y).square().mean()\n\ndef both():\n    return Net(), loss_of\n"
    script(DIVISION_IN_LOSS + both, "models.py")
    child = sonde("replay", capsule, "--model-from", "models:both")
    assert child.returncode in (0, 1)
    assert "made by div" in child.stdout
    assert "((out - 1) / y)" in child.stdout


# ---- what cannot work


def letter(child, *said):
    assert child.returncode == 2, child.stdout + child.stderr
    assert "Traceback" not in child.stderr
    for text in said:
        assert text in child.stderr


def test_a_script_with_another_model_is_told_how_it_differs(sonde, script, made):
    capsule = made(LOG_IN_FORWARD)
    for program, said in (
        (LOG_IN_FORWARD.replace("width=8", "width=9") + MAIN, "its parameter body.0.weight is [9, 4], the capsule's [8, 4]"),
        ((LOG_IN_FORWARD + MAIN).replace("Net", "Mesh"), "its class is Mesh, the capsule's Net"),
        ("print('hello')", "It called no model at all"),
    ):
        letter(sonde("replay", capsule, "--script", script(program)), said)


def test_a_script_that_fails_before_is_told_with_its_traceback(sonde, script, made):
    child = sonde("replay", made(LOG_IN_FORWARD), "--script", script("import torch\nraise KeyError('data')"))
    assert child.returncode == 2
    assert "failed with KeyError" in child.stderr
    assert 'train.py", line 2' in child.stderr


def test_without_a_script_a_letter_says_what_to_type(sonde, made):
    letter(sonde("replay", made(LOG_IN_FORWARD)), "sonde replay capsule --script train.py")


def test_a_script_that_is_not_there_is_told(sonde, made):
    letter(sonde("replay", made(LOG_IN_FORWARD), "--script", "tarin.py"), "no file tarin.py here")


def test_a_function_that_is_not_there_is_told(sonde, made):
    capsule = made(LOG_IN_FORWARD)
    letter(sonde("replay", capsule, "--model-from", "nowhere:make"), "nowhere:make cannot be loaded")
    letter(sonde("replay", capsule, "--model-from", "json"), "names no function")


def test_no_capsule_there_is_told(sonde, script):
    letter(sonde("replay", "nowhere", "--script", script(LOG_IN_FORWARD + MAIN)), "No capsule in nowhere")
    letter(sonde("replay", "nowhere"), "No capsule in nowhere")  # before a script is asked for


def test_a_hostile_capsule_runs_nothing_not_even_the_script(sonde, script, made, tmp_path):
    capsule = tmp_path / made(LOG_IN_FORWARD)
    facts = json.loads((capsule / "capsule.json").read_text())
    (capsule / "capsule.json").write_text(json.dumps(facts | {"args": {"tuple": [{"tensor": "\x1b[31m/etc/passwd"}]}}))
    child = sonde("replay", "capsule", "--script", script("open('ran', 'w')"))
    letter(child, "not a valid capsule")
    assert "\x1b" not in child.stderr
    assert not (tmp_path / "ran").exists()


# ---- from end to end


def test_a_capsule_that_a_run_kept_replays_elsewhere(sonde, script, tmp_path):
    program = DIVISION_IN_LOSS + MAIN
    bad = "[(torch.rand(6, 4), torch.ones(6, 3)), (torch.rand(6, 4), torch.zeros(6, 3))]"
    broken = program.replace("train(Net(), [", f"train(Net(), {bad} + [")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "train.py").write_text(broken)
    environment = os.environ | {"SONDE_SAVE_DEBUG_INFO": "1"}
    child = fork_server.python("-m", "sonde", "run", "--to", tmp_path / "run", "train.py", cwd=tmp_path / "there", env=environment)
    assert child.returncode == 0, child.stderr
    (capsule,) = (tmp_path / "run" / "capsules").iterdir()
    assert capsule.name == "step-000001"
    child = sonde("replay", f"run/capsules/{capsule.name}", "--script", script(program))
    assert_same(child, "Step 1 of Net", "made by div", "train.py:19")

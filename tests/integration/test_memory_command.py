"""`sonde memory`: the memory of a script, measured with fake tensors, or with its first real steps if these cannot be used."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader

import fork_server
from fixed_programs import PROGRAMS
from sonde.memory_profiler.dry_run import DryRunError, dry_run

pytestmark = pytest.mark.torch

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

size, numpy = int(sys.argv[1]), "numpy" in sys.argv
data = TensorDataset(torch.randn(256, 64), torch.randint(0, 4, (256,)))
loader = DataLoader(data, batch_size=size, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
optimizer = torch.optim.Adam(model.parameters())
best = float("inf")
for epoch in range(1000):
    for x, y in loader:
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if numpy:
            output.detach().numpy()
        best = min(best, loss.item())
        print(f"epoch {epoch}: {loss.item():.3f}, {output.argmax(1).tolist()[:2]}")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_runs_with_fake_tensors_to_its_second_step(script, capsys):
    before, argv = DataLoader.__iter__, list(sys.argv)
    report = dry_run(str(script), ["32"])
    assert (report.is_fake, report.num_steps, report.batch_size) == (True, 2, 32)
    parameters = 4 * (64 * 512 + 512 + 512 * 512 + 512 + 512 * 4 + 4)
    assert report.by_category()["parameters"] == parameters
    assert report.by_category()["optimizer state"] >= 2 * parameters
    assert "epoch 0: 1.000" in capsys.readouterr().out  # a placeholder
    assert (DataLoader.__iter__, sys.argv) == (before, argv)
    assert type(torch.zeros(1)) is torch.Tensor


def test_fake_tensors_give_the_memory_of_real_ones(script):
    fake, real = dry_run(str(script), ["64"]), dry_run(str(script), ["64"], fake=False)
    assert real.num_steps == 2
    assert fake.on("cpu").peak.batch_bytes == pytest.approx(real.on("cpu").peak.batch_bytes, rel=0.05, abs=1 << 16)
    for category in ("parameters", "gradients", "optimizer state"):
        # not exactly: other tests may have left a small model alive in this process
        assert fake.on("cpu").now.by_category()[category] == pytest.approx(real.on("cpu").now.by_category()[category], rel=0.01)


def test_both_optimizers_of_a_gan_step_twice(tmp_path):
    path = tmp_path / "gan.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "g, d = nn.Linear(8, 16), nn.Linear(16, 1)\n"
        "og, od = torch.optim.Adam(g.parameters()), torch.optim.SGD(d.parameters(), lr=0.1, momentum=0.9)\n"
        "while True:\n"
        "    od.zero_grad(); d(g(torch.randn(4, 8)).detach()).mean().backward(); od.step()\n"
        "    og.zero_grad(); d(g(torch.randn(4, 8))).mean().backward(); og.step()\n"
    )
    report = dry_run(str(path))
    assert report.num_steps == 4
    assert report.on().now.by_category()["optimizer state"] == 2 * 4 * (8 * 16 + 16) + 2 * 4 + 4 * 17


def test_a_script_that_fake_tensors_do_not_support_fails_with_its_line(script):
    with pytest.raises(DryRunError, match=r"numpy.* at train\.py:23"):
        dry_run(str(script), ["8", "numpy"])


def test_a_script_without_an_optimizer_is_measured_for_some_backward_passes(tmp_path):
    path = tmp_path / "by_hand.py"
    path.write_text("import torch\nw = torch.zeros(4, requires_grad=True)\nwhile True:\n    w.grad = None\n    (w * w).sum().backward()\n")
    assert dry_run(str(path)).num_steps == 0


def test_a_backward_that_fails_does_not_count(tmp_path):
    path = tmp_path / "caught.py"
    path.write_text(
        "import torch\nw = torch.zeros(4, requires_grad=True)\n"
        "for _ in range(3):\n    try:\n        (w * w).backward()\n    except RuntimeError:\n        pass\n"
    )
    with pytest.raises(DryRunError, match="it does not train"):
        dry_run(str(path))


def test_a_backward_inside_of_an_except_block_counts(tmp_path):
    path = tmp_path / "retried.py"
    path.write_text(
        "import torch\nw = torch.zeros(4, requires_grad=True)\n"
        "try:\n    (w * w).backward()\nexcept RuntimeError:\n    (w * w).sum().backward()\n"
    )
    assert "ended before any optimizer stepped" in dry_run(str(path)).notes[0]


FORKING = """
import os, torch
w = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([w])
child = os.fork()
for step in range(4 if child == 0 else 0):
    (w * w).sum().backward()
    optimizer.step()
    open("steps.txt", "a").write("x")
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_the_script_forks_does_not_train_to_its_end(tmp_path, sonde):
    (tmp_path / "forking.py").write_text(FORKING)
    sonde("memory", "--real", "forking.py")
    assert (tmp_path / "steps.txt").read_text() == "x"  # the second step is not returned from


def test_the_command_falls_back_to_real_steps_with_a_note_in_one_document(script, sonde):
    done = sonde("memory", "--json", "--batch-size", "64", "train.py", "16", "numpy")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # what the script prints is not in it
    assert "epoch 0" in done.stderr
    assert "fake tensors could not be used (RuntimeError: .numpy()" in document["notes"][0]
    assert (document["is_fake"], document["batch_size"], document["forecast"]["batch_size"]) == (False, 16, 64)
    assert document["forecast"]["peak_bytes"] > document["devices"]["cpu"]["peak"]["usage"]["total"]


def test_a_script_that_exits_early_gets_a_note(tmp_path):
    train = "import sys, torch\nw = torch.ones(2, requires_grad=True)\nw.sum().backward()\ntorch.optim.SGD([w]).step()\nsys.exit(3)\n"
    (tmp_path / "tiny.py").write_text(train)
    assert "exited with 3" in dry_run(str(tmp_path / "tiny.py")).notes[0]


@pytest.mark.parametrize(("text", "why"), [("import sys\nsys.exit(3)\n", "exited with 3"), ("print(1)\n", "ended")])
def test_a_script_that_never_trains_gets_an_error_instead_of_a_report(tmp_path, text, why):
    (tmp_path / "tiny.py").write_text(text)
    with pytest.raises(DryRunError, match=f"the script {why} before any optimizer stepped: it does not train"):
        dry_run(str(tmp_path / "tiny.py"))


def test_a_script_that_never_trains_is_run_once(tmp_path, sonde):
    (tmp_path / "tiny.py").write_text("open('runs.txt', 'a').write('x')\nimport nothing_of_that_name\n")
    done = sonde("memory", "tiny.py")
    assert (done.returncode, (tmp_path / "runs.txt").read_text()) == (2, "x")
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name'\nsonde: tiny.py did not reach its second" in done.stderr


def test_the_traceback_of_a_script_has_no_lines_of_sonde(tmp_path, sonde):
    (tmp_path / "broken.py").write_text("raise RuntimeError('at import')\n")
    done = sonde("memory", "--real", "broken.py")
    assert done.returncode == 2
    assert "RuntimeError: at import\nsonde: broken.py did not reach its second optimizer step" in done.stderr
    assert done.stderr.count('File "') == 1


def test_a_missing_script_is_an_error(sonde):
    done = sonde("memory", "tran.py")
    assert done.returncode == 2
    assert done.stderr.startswith("sonde: no file tran.py here.")


def test_a_run_that_runs_out_of_memory_in_its_first_step_gets_a_verdict(tmp_path):
    program = PROGRAMS / "broken" / "out_of_memory" / "broadcast.py"
    done = fork_server.python("-m", "sonde", "run", program, cwd=tmp_path)
    assert done.returncode == 1
    assert "DefaultCPUAllocator" in done.stderr
    stderr = " ".join(done.stderr.split())
    assert "out-of-memory from step 0" in stderr
    assert "predicted [40000, 1] float32, price [40000] float32" in stderr

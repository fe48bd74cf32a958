"""`sonde run` of a script that dies of a signal: it dies as it would alone, and `sonde diagnose` says of what and where."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

TRAINING = """
import ctypes, mmap, os, resource, signal
import torch
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
{setup}
for step in range(40):
    x = torch.randn(16, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if step == 25:
        {death}
    optimizer.step()
"""
NATIVE = """
page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes([0x0F, 0x0B]))  # ud2
illegal = ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
"""


def line_of(text: str, program: str) -> int:
    return next(number for number, row in enumerate(program.splitlines(), 1) if text in row)


def test_a_training_that_died_of_sigill_gets_a_verdict_that_names_it(sonde, tmp_path):
    program = TRAINING.format(setup="", death="os.kill(os.getpid(), signal.SIGILL)")
    (tmp_path / "train.py").write_text(program)
    child = sonde("run", "--to", "run", "train.py")
    assert child.returncode == -signal.SIGILL
    assert child.stdout == ""
    assert "Fatal Python error" not in child.stderr  # the script alone would not have printed it
    verdict = sonde("diagnose", "run")
    assert verdict.returncode == 1
    printed = " ".join(verdict.stdout.split())
    place = f"train.py:{line_of('os.kill', program)}"
    assert "25 steps of Linear (5 parameters) with SGD, killed by SIGILL (illegal instruction)" in printed
    assert f"fatal-signal from step 25 cause the process was killed by SIGILL (illegal instruction) at {place}, in step 25" in printed
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in printed
    document = json.loads(sonde("diagnose", "run", "--json").stdout)
    assert (document["ended"], document["signal"]) == ("killed", "SIGILL (illegal instruction)")
    assert document["findings"][0]["rule"] == "fatal-signal"
    assert document["findings"][0]["evidence"]["source"] == place
    assert "killed by SIGILL (illegal instruction)" in sonde("runs", ".").stdout


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="ud2 is an instruction of x86")
def test_a_real_illegal_instruction_is_named_with_its_line(sonde, tmp_path):
    program = TRAINING.format(setup=NATIVE, death="illegal()")
    (tmp_path / "train.py").write_text(program)
    assert sonde("run", "--to", "run", "train.py").returncode == -signal.SIGILL
    (finding,) = json.loads(sonde("diagnose", "run", "--json").stdout)["findings"]
    assert (finding["rule"], finding["evidence"]["source"]) == ("fatal-signal", f"train.py:{line_of('    illegal()', program)}")


def test_a_training_that_ends_leaves_no_file_and_faulthandler_off(sonde, tmp_path):
    # A destructor, which runs after the functions of atexit: those still belong to the training.
    after = (
        "import faulthandler\n"
        "def report(self, is_enabled=faulthandler.is_enabled, print=print): print('enabled', is_enabled())\n"
        "late = type('Late', (), {'__del__': report})()"
    )
    (tmp_path / "train.py").write_text(TRAINING.format(setup=after, death="pass"))
    child = sonde("run", "--to", "run", "train.py")
    assert child.returncode == 0, child.stderr
    assert child.stdout == "enabled False\n"
    assert not list((tmp_path / "run").glob("fatal-signal*"))


def test_watch_leaves_signal_handlers_alone(sonde, tmp_path):
    watched = "import faulthandler, sonde; session = sonde.watch(model, optimizer, to='run'); print('enabled', faulthandler.is_enabled())"
    (tmp_path / "train.py").write_text(TRAINING.format(setup=watched, death="os.kill(os.getpid(), signal.SIGILL)"))
    child = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (child.returncode, child.stdout) == (-signal.SIGILL, "enabled False\n")
    verdict = sonde("diagnose", "run")
    assert "killed: it has no end in the log" in " ".join(verdict.stdout.split())
    assert "fatal-signal" not in verdict.stdout

"""Whether bfloat16 kills the process: the check, `sonde doctor` and the tests' own guard, on a child that really dies of SIGILL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bfloat16
from bfloat16 import claimed_flags
from sonde.cpu_bfloat16_support import CHILD, LIMIT, OPERATIONS, Bfloat16Check, check_bfloat16

ROOT = Path(__file__).parents[2]

# A child with the protocol of the real one. What is in TRAPS dies, what is in ALWAYS_TRAPS dies with the limit, too.
TRAPPING = """
import os, signal, sys
open(os.environ["CALLS"], "a").write(" ".join(sys.argv[1:]) + "\\n")
for name in sys.argv[1:]:
    print("begin", name, flush=True)
    limited = "ONEDNN_MAX_CPU_ISA" in os.environ
    if name in os.environ.get("ALWAYS_TRAPS" if limited else "TRAPS", "").split():
        os.kill(os.getpid(), signal.SIGILL)
    if name in os.environ.get("REFUSED", "").split():
        print("error", name, "could not create a primitive", flush=True)
    else:
        print("works", name, flush=True)
"""
# A torch whose linear and LSTM layers are fatal unless oneDNN is limited; the LSTM always is where LSTM_TRAPS is set.
TORCH = """
import contextlib, os, signal, types
__version__ = "2.13.0"
class Anything:
    def __getattr__(self, name): return lambda *args, **kwargs: self
    __call__ = lambda self, *args: self
def layer(name):
    def build(*args):
        limited = "ONEDNN_MAX_CPU_ISA" in os.environ
        if not limited and name != "Conv2d" or name == "LSTM" and "LSTM_TRAPS" in os.environ:
            os.kill(os.getpid(), signal.SIGILL)
        return Anything()
    return build
nn = types.SimpleNamespace(**{name: layer(name) for name in ("Linear", "Conv2d", "LSTM")})
cuda = types.SimpleNamespace(is_available=lambda: False)
bfloat16 = None
get_num_threads = lambda: 1
randn = lambda *shape: Anything()
autocast = lambda *args, **kwargs: contextlib.nullcontext()
if "TORCH_IMPORTED" in os.environ:
    open(os.environ["TORCH_IMPORTED"], "a").write("x")
"""


@pytest.fixture
def check(tmp_path):
    """`check(TRAPS="LSTM")` asks the trapping child."""

    def ask(**variables: str) -> Bfloat16Check:
        env = {key: value for key, value in os.environ.items() if key not in LIMIT}
        return check_bfloat16(env | {"CALLS": str(tmp_path / "calls")} | variables, command=[sys.executable, "-c", TRAPPING])

    return ask


@pytest.fixture
def trapping_torch(tmp_path):
    """An environment in which `import torch` gives one that dies."""
    (tmp_path / "fake" / "torch").mkdir(parents=True)
    (tmp_path / "fake" / "torch" / "__init__.py").write_text(TORCH)
    path = os.pathsep.join([str(tmp_path / "fake"), str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")])
    env = {key: value for key, value in os.environ.items() if key not in (*LIMIT, bfloat16.RESULT)}
    return env | {"PYTHONPATH": path, "PYTHONUTF8": "1", "COLUMNS": "200"}


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_a_processor_that_does_not_trap_needs_one_child_and_no_limit(check, tmp_path):
    found = check()
    assert found == Bfloat16Check()
    assert (found.works, found.works_with_limit) == (True, True)
    assert calls(tmp_path) == ["linear convolution LSTM"]


def test_every_operation_that_dies_is_named_with_its_signal_and_the_rest_is_asked_again(check, tmp_path):
    found = check(TRAPS="linear LSTM")
    assert found.failed == {"linear": "SIGILL", "LSTM": "SIGILL"}
    assert not found.works
    assert found.works_with_limit
    assert calls(tmp_path) == ["linear convolution LSTM", "convolution LSTM", "linear LSTM"]  # the last one with the limit
    assert found.describe() == (
        "bfloat16 kills the process on this processor: linear and LSTM die of SIGILL; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 prevents it"
    )


def test_what_dies_in_spite_of_the_limit_is_named(check):
    found = check(TRAPS="linear convolution LSTM", ALWAYS_TRAPS="LSTM")
    assert found.failed_with_limit == {"LSTM": "SIGILL"}
    assert not found.works_with_limit
    assert found.describe().endswith("with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 still LSTM dies of SIGILL")


def test_an_operation_that_raises_is_not_supported_and_kills_nothing(check):
    found = check(REFUSED="LSTM")
    assert found.works
    assert found.unsupported == {"LSTM": "could not create a primitive"}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise ImportError('libgomp is missing')", "ImportError: libgomp is missing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("print('works')", "exit code 0"),
        ("import time; time.sleep(60)", "no answer in time"),
    ],
    ids=["raises", "dies", "says nothing", "hangs"],
)
def test_a_child_that_ends_before_the_first_operation_tells_nothing_about_bfloat16(program, reason):
    found = check_bfloat16(command=[sys.executable, "-c", program], timeout_s=2)
    assert found == Bfloat16Check(error=reason)
    assert not found.works


def test_a_program_that_cannot_be_started_is_an_error_and_not_a_trap():
    assert "cannot be started" in check_bfloat16(command=["/no/such/program"]).error


@pytest.mark.torch
def test_the_real_child_answers_for_every_operation():
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", CHILD, *OPERATIONS], capture_output=True, text=True, check=False)
    rows = [row.split()[:2] for row in done.stdout.splitlines()]
    assert [words[1] for words in rows if words[0] == "begin"] == list(OPERATIONS)[: len(rows) // 2 + len(rows) % 2]
    assert {words[0] for words in rows} <= {"begin", "works", "error"}


@pytest.mark.parametrize(
    ("flags", "claimed"),
    [("fpu avx2 avx512f", ()), ("fpu amx_tile avx512_bf16 amx_bf16_not", ("amx_tile", "avx512_bf16"))],
    ids=["none", "some"],
)
def test_the_flags_that_a_processor_claims_are_read_as_words(flags, claimed, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: amx_bf16\n")
    assert claimed_flags(tmp_path / "cpuinfo") == claimed


def test_without_cpuinfo_nothing_is_claimed(tmp_path):
    assert claimed_flags(tmp_path / "missing") == ()


def doctor(env: dict[str, str], tmp_path: Path) -> str:
    command = [sys.executable, "-m", "sonde", "doctor"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr  # trainings in float32 can be watched
    return " ".join(done.stdout.split())


def test_doctor_names_what_dies_and_what_to_set(trapping_torch, tmp_path):
    printed = doctor(trapping_torch, tmp_path)
    assert "• bfloat16" in printed
    assert "linear and LSTM die of SIGILL; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 prevents it." in printed
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 sonde run train.py" in printed


def test_doctor_names_what_dies_with_the_limit_too(trapping_torch, tmp_path):
    printed = doctor(trapping_torch | {"LSTM_TRAPS": "1"}, tmp_path)
    assert "with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 still LSTM dies of SIGILL." in printed
    assert "Train in float32 here" in printed


def test_doctor_is_content_where_the_limit_is_set(trapping_torch, tmp_path):
    printed = doctor(trapping_torch | LIMIT, tmp_path)
    assert "works on this processor: linear, convolution, LSTM, with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in printed


GUARDED = """
import os
import pytest

@pytest.mark.parametrize("number", range(4))
def test_the_limit_is_set(number):
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"

@pytest.mark.needs_bfloat16("linear", "convolution")
def test_this_runs(): pass

@pytest.mark.needs_bfloat16("LSTM")
def test_this_cannot_run(): os.abort()
"""


def guarded(env: dict[str, str], tmp_path: Path, *options: str) -> str:
    """The output of pytest with tests/conftest.py, over tests of its own."""
    (tmp_path / "test_guarded.py").write_text(GUARDED)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rs", *options, "test_guarded.py"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("options", [("-n", "2"), ("-q",)], ids=["two workers", "one process"])
def test_the_tests_ask_once_set_the_limit_and_skip_what_still_dies(options, trapping_torch, tmp_path):
    env = trapping_torch | {bfloat16.ASK: "1", "LSTM_TRAPS": "1", "TORCH_IMPORTED": str(tmp_path / "imports")}
    output = guarded(env, tmp_path, *options)
    assert "5 passed, 1 skipped" in output
    assert "processor: bfloat16 kills the process on this processor: linear and LSTM die of SIGILL" in output
    assert "bare bfloat16 LSTM dies of SIGILL on this processor" in output
    # linear dies, then LSTM dies, then both again with the limit: three children, however many workers
    assert len((tmp_path / "imports").read_text()) == 3


def test_where_nothing_is_claimed_the_tests_ask_nothing(trapping_torch, tmp_path):
    if claimed_flags():
        pytest.skip("this processor claims instructions that could trap")
    output = guarded(trapping_torch | {"TORCH_IMPORTED": str(tmp_path / "imports")}, tmp_path, "-k", "this_runs")
    assert "1 passed" in output
    assert "processor:" not in output
    assert not (tmp_path / "imports").exists()

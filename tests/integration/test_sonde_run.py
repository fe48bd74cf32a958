"""`sonde run`: the script's output, errors and exit code stay its own; the verdict is added on stderr."""

import json
import re
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from sonde.cli._script_argument import check_script  # noqa: E402
from sonde.errors import SondeError  # noqa: E402

TRAINING = """
import sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(40):
    x = torch.randn(16, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    {zero_grad}
    loss.backward()
    optimizer.step()
print("arguments", sys.argv[1:])
"""
HEALTHY = TRAINING.format(zero_grad="optimizer.zero_grad()")
BROKEN = TRAINING.format(zero_grad="pass")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a script and a package."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('imported to look for a module')")
    (tmp_path / "package" / "inner" / "train.py").write_text("")
    (tmp_path / "lively.py").write_text("__path__ = []")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["nobody.home", "package.home", "package.inner.home", "package..inner", ".train", "train.train"])
def test_a_module_that_does_not_exist_is_refused_before_anything_is_imported(name, here):
    with pytest.raises(SondeError, match=f"no module named {re.escape(name)} here"):
        check_script("run", name, module=True)


@pytest.mark.parametrize("name", ["train", "package.inner.train", "lively.made", "json.tool", "os"])
def test_a_module_that_may_exist_is_not_refused(name, here):
    check_script("run", name, module=True)


def test_a_file_that_is_taken_for_a_module_is_recognised(here):
    with pytest.raises(SondeError, match=r"It is a file: sonde run train\.py"):
        check_script("run", "train.py", module=True)


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.py"):
        (tmp_path / name).write_text(text)
        return name

    return write


def test_a_script_gets_its_arguments_untouched_and_stdout_is_its_own(sonde, script):
    given = ["--lr", "0.1", "--every", "7", "-m", "--help", "--", "--quiet", "x y"]
    child = sonde("run", script(HEALTHY), *given)
    assert child.returncode == 0, child.stderr
    assert child.stdout == f"arguments {given}\n"
    assert child.stderr.startswith("✓ healthy")


def test_problems_are_said_on_stderr_and_the_exit_code_stays_0(forked_sonde, script):
    child = forked_sonde("run", script(BROKEN))
    assert child.returncode == 0
    assert "missing-zero-grad" in child.stderr
    assert "train.py:13" in child.stderr
    assert "optimizer.step()" in child.stderr


def test_check_makes_problems_an_exit_code(forked_sonde, script):
    broken = forked_sonde("run", "--check", "--quiet", script(BROKEN))
    assert (broken.returncode, broken.stderr) == (1, "")
    assert forked_sonde("run", "--check", "--quiet", script(HEALTHY)).returncode == 0
    assert forked_sonde("run", "--check", "--quiet", script("print('no training')")).returncode == 3
    assert forked_sonde("run", "--check", "--quiet", script("raise SystemExit(5)")).returncode == 5


def test_a_preset_switches_and_layers_come_from_a_file_and_from_options(forked_sonde, script, tmp_path):
    (tmp_path / "sonde.toml").write_text('preset = "production"\ndebug_lr_scheduling = true\nlayers = ["Lineer"]\n')
    child = forked_sonde("run", "--switch", "gradient_norms", "--layer", "Linear", "--layer", "biass", "--to", "run", script(HEALTHY))
    assert child.returncode == 0, child.stderr
    lines = [json.loads(line) for line in child.stderr.splitlines() if line.startswith("{")]  # as the preset wants them
    assert {line["switch"] for line in lines} == {"lr_scheduling", "gradient_norms"}
    assert "the pattern 'biass' matches nothing. Nearest: bias" in child.stderr
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (manifest["level"], manifest["overhead_budget"], manifest["layers"]) == ("basic", 0.005, ["Linear", "biass"])


def test_a_module_is_run_as_python_m_would(forked_sonde, tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "train.py").write_text(HEALTHY)
    child = forked_sonde("run", "-m", "pkg.train", "--epochs", "3")
    assert child.returncode == 0, child.stderr
    assert child.stdout == "arguments ['--epochs', '3']\n"


@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('no data')", 1), ("raise ValueError('bad')", 1)]
)
def test_the_exit_code_and_the_error_are_those_of_the_script(sonde, script, tmp_path, ending, code):
    name = script(f"import sys\n{ending}\n")
    bare = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, check=False)
    watched = sonde("run", "--quiet", name)
    assert bare.returncode == watched.returncode == code
    assert watched.stderr.splitlines()[-1:] == bare.stderr.splitlines()[-1:]
    assert "sonde" not in watched.stderr


def test_a_script_that_fails_after_training_still_gets_its_verdict(forked_sonde, script):
    child = forked_sonde("run", script(BROKEN + "raise RuntimeError('late')\n"))
    assert child.returncode == 1
    assert "RuntimeError: late" in child.stderr
    assert "missing-zero-grad" in child.stderr


def test_ctrl_c_ends_the_process_by_its_signal(script, tmp_path):
    name = script("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "sonde", "run", "--quiet", name]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, error = child.communicate()
    assert child.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in error


MUTE = """
class Mute(Exception):
    def __str__(self):
        raise RuntimeError
raise Mute
"""


@pytest.mark.parametrize(("ending", "name"), [("raise ValueError\n", "ValueError"), (MUTE, "Mute")], ids=["empty", "mute"])
def test_an_error_without_a_text_is_named_by_its_class(forked_sonde, script, tmp_path, ending, name):
    result = forked_sonde("run", "--to", str(tmp_path / "run"), script(HEALTHY + ending))
    assert result.returncode == 1
    assert f"ended by {name} loss " in " ".join(result.stderr.split())


def test_a_script_that_trains_nothing_gets_one_line(sonde, script):
    child = sonde("run", script("print('hello')\n"))
    assert child.returncode == 0
    assert child.stdout == "hello\n"
    assert child.stderr == "Sonde saw no training: no optimizer stepped and no backward ran.\n"


FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({kib} << 10, resource.RLIM_INFINITY))\n"


def test_what_a_full_disk_has_cost_is_said_with_the_verdict(forked_sonde, script):
    result = forked_sonde("run", "--every", "1", script(FULL.format(kib=16) + BROKEN))
    assert result.returncode == 0
    assert "arguments []" in result.stdout
    said = " ".join(result.stderr.split())
    assert re.search(r"\d+ records of steps \d+ to \d+ could not be written: \[Errno 27\] File too large", said)
    assert "healthy" not in said


def test_a_run_that_is_removed_while_the_script_runs_is_not_said_to_be_kept(forked_sonde, script):
    result = forked_sonde("run", "--to", "gone", script(HEALTHY + "import shutil; shutil.rmtree('gone')\n"))
    assert result.returncode == 0
    assert result.stderr == "sonde: the run in gone was removed while the script ran: nothing is left to judge.\n"


def test_the_run_goes_where_it_is_told_and_is_the_newest(forked_sonde, script, tmp_path):
    assert forked_sonde("run", "--quiet", "--to", "runs/base", "--every", "1", script(HEALTHY)).returncode == 0
    assert (tmp_path / "runs" / "base" / "run.json").exists()
    document = json.loads(forked_sonde("diagnose", "--json").stdout)
    assert document["run"] == "base"
    assert document["overhead"]["num_observed"] == document["steps"] == 40


def test_a_name_becomes_part_of_the_directory(forked_sonde, script, tmp_path):
    forked_sonde("run", "--quiet", "--name", "baseline", script(HEALTHY))
    assert [path for path in (tmp_path / "runs").iterdir() if "_baseline_" in path.name]


def test_a_directory_with_other_files_is_refused_before_the_script_starts(sonde, script, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images.bin").touch()
    child = sonde("run", "--to", "data", script("print('started')\n"))
    assert child.returncode == 2
    assert child.stderr.startswith("sonde: ")
    assert child.stdout == ""


def test_the_demo_gives_five_right_verdicts_and_a_page(sonde, tmp_path):
    child = sonde("demo")
    assert child.returncode == 0, child.stdout + child.stderr
    assert "5 of 5 verdicts are right." in child.stdout
    (page,) = (tmp_path / "runs").glob("*.html")
    assert page.name in child.stdout.splitlines()[-1]

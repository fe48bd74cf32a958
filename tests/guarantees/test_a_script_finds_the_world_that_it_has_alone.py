"""R72: a script under `sonde run` finds the arguments, modules, variables, streams, descriptors and stack that it has alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sonde
from sonde.script_runner import existing_directory
from training_harness import call, environment, python, write

# Everything that it prints must be the same without Sonde. The memory addresses of objects are not printed.
WORLD = """
    import atexit, pickle, random, sys, threading
    names = {name: (type(value).__name__, value if name in ("__name__", "__file__", "__package__", "__cached__", "__spec__") else "")
             for name, value in globals().items()}
    import click, rich                        # beside this script
    import numpy as np, torch
    x: int = 3

    class Thing:
        pass

    def train(num_steps):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(num_steps):
            optimizer.zero_grad()
            (model(torch.randn(16, 4)) - 1).square().mean().backward()
            optimizer.step()

    def world(who):
        import __main__, late                 # beside this script as well
        print(who, sys.argv, sys.path[0] == late.__file__.rpartition("/")[0], sys.path[1:3], len(pickle.dumps(Thing())),
              __main__.__dict__ is globals(), click.OWNER, rich.OWNER, len(sys.modules["click"].__dict__), "rich.console" in sys.modules,
              threading.main_thread().is_alive(), sys.getrecursionlimit(), getattr(sys, "last_type", None), flush=True)
        print(who, random.random(), np.random.rand(), torch.rand(1).item(), flush=True)

    def in_thread():
        has_ended.wait()
        threading.main_thread().join()
        world("thread")
        train(20)

    def at_exit():
        world("atexit")
        train(3)

    class Late:
        def __del__(self, print=print, argv=sys.argv, sys=sys):
            print("destructor", argv is sys.argv, flush=True)

    print(names, __annotations__)
    world("main")
    random.seed(1); np.random.seed(1); torch.manual_seed(1)
    has_ended = threading.Event()
    threading.Thread(target=in_thread).start()
    atexit.register(at_exit)
    late_object = Late()
    has_ended.set()
    raise ValueError("mine")
"""


def test_r72_threads_and_exit_functions_find_the_script_and_are_watched(tmp_path: Path) -> None:
    for name in ("click", "rich", "late"):
        write(f"OWNER = 'the script {name}'\n", tmp_path, f"{name}.py")
    write(WORLD, tmp_path)
    bare = call("train.py", "a", "b", folder=tmp_path)
    watched = call("-m", "sonde", "run", "--to", "run", "train.py", "a", "b", folder=tmp_path)
    last = next(line for line in bare.stdout.splitlines() if line.startswith("atexit"))
    assert "the script click the script rich" in last, bare.stderr
    # The random numbers before the seed differ from run to run.
    assert _seeded(watched.stdout) == _seeded(bare.stdout)
    assert (watched.returncode, bare.returncode) == (1, 1)
    assert watched.stderr.startswith(bare.stderr)
    assert "ValueError: mine" in bare.stderr
    assert "23 steps of" in watched.stderr.removeprefix(bare.stderr)
    run = sonde.Run(tmp_path / "run")
    assert (run.last_step, run.ended.how, run.ended.exit_code) == (22, "exception", 1)


def _seeded(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if not line.startswith("main 0.")]


# Forked from a process that has torch in memory. With "real" as its argument, each child ends as the interpreter ends; otherwise up to
# where the interpreter takes torch apart, which takes seconds.
FAMILY = """
    import json, os, sys
    import torch, torch._dynamo
    from sonde.cli import main

    rows = []
    for number, (arguments, script) in enumerate(json.loads(sys.stdin.read())):
        if script:
            with open(f"script{number}.py", "w") as file:
                file.write(script)
            arguments = ["--to", f"run{number}", *arguments, f"script{number}.py"]
        child = os.fork()
        if child == 0:
            for target, suffix in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{number}.{suffix}", os.O_CREAT | os.O_WRONLY), target)
            os.closerange(3, 64)
            break
        _, status = os.waitpid(child, 0)
        texts = [open(f"{number}.{suffix}").read() for suffix in ("out", "err")]
        rows.append([os.waitstatus_to_exitcode(status), *texts])
    else:
        print(json.dumps(rows))
        sys.exit()
    is_real, sys.argv = sys.argv[1:] == ["real"], ["sonde"]
    if is_real:
        main(["run", *arguments])
    code = 0
    try:
        if "bare" in arguments:
            exec(compile(script, f"script{number}.py", "exec"))
        else:
            main(["run", *arguments])
    except SystemExit as leaving:
        code = leaving.code
    sys.stdout.flush()
    os._exit(code)
"""
TRAINING = """
import os, sys, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
def train(num_steps=10):
    for _ in range(num_steps):
        optimizer.zero_grad()
        (model(torch.randn(16, 4)) - 1).square().mean().backward()
        optimizer.step()
train()
print("out", flush=True)
"""
STREAMS = {
    "sys.stderr.close()": False,
    "os.close(2); mine = open('mine.txt', 'w'); mine.write('mine'); mine.flush()": False,
    "sys.stdout = None": True,
    "sys.stderr = None; child = os.fork(); child and os.waitpid(child, 0)": True,
    "os.close(1); sys.stderr = open('errors.txt', 'w')": True,
}
"""Endings of a script, and whether the verdict can be printed: only where stderr is what it was when Sonde started."""
CLOSED = """
os.closerange(3, 4096)
files = [open(f"user{i}.txt", "w") for i in range(1000 - 3)]
train()
for file in files:
    file.write("mine")
    file.close()
print({open(f"user{i}.txt").read() for i in range(1000 - 3)}, os.open("user0.txt", os.O_RDONLY))
"""
MODES = """
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

calls = []
class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        calls.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        calls.append(str(function))
        return function(*args, **(kwargs or {}))

for mode in (Functions, Operations, Functions):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with mode():
        train(6)
print(len(calls), calls)
"""
DEEP = """
import bisect

class Nested(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x)

class Endless(torch.nn.Module):
    def forward(self, x):
        return self(x)

def fails_at(depth):
    sys.setrecursionlimit(100_000)      # to construct it
    model = torch.nn.Linear(4, 1)
    for _ in range(depth):
        model = Nested(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sys.setrecursionlimit(1000)
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
    except RecursionError:
        return True
    return False

deepest = bisect.bisect_left(range(350), True, lo=200, key=fails_at) - 1 if {is_bare} else {deepest}
print(deepest, fails_at(deepest), sys.getrecursionlimit())
try:
    Endless()(torch.ones(1))
except RecursionError:
    print("endless", sys.getrecursionlimit())
"""
FAILING = """
class Failing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.num_calls = torch.nn.Linear(4, 1), 0
    def forward(self, x):
        self.num_calls += 1
        y = self.layer(x)
        if self.num_calls in (1, 3, 9):
            raise ValueError("mine")
        return y

model = Failing()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    try:
        train(1)
    except Exception as error:
        print(step, repr(error), repr(error.__context__))
"""
WARNINGS = """
import warnings
from torch.optim import lr_scheduler
warnings.simplefilter("always")
warnings.showwarning = lambda message, kind, file, line, *_: print(os.path.basename(file), line, kind.__name__, str(message)[:40])
for _ in range(3):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    scheduler.step()
    x = torch.randn(5, 4)
    torch.nn.functional.mse_loss(model(x), torch.randn(5)).backward()
    optimizer.step()
    scheduler.step(3)
    scheduler.get_lr()
    y = model(x)
    y.sum().backward()
    y.grad
    torch.nn.utils.clip_grad_norm(model.parameters(), 1.0)
    model(x).sum().backward(create_graph=True)
    chained = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 2)], milestones=[2])
    chained.step()
    torch.nn.functional.softmax(x)
    torch.utils.data.DataLoader(x, num_workers=500)
    torch.amp.GradScaler("cuda")
    torch.jit.trace(model, x)
"""


def family(folder: Path, cases: list[tuple[list[str], str]], *arguments: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each script, under `sonde run` with these options, or bare; without a script, of this command."""
    write(FAMILY, folder, "family.py")
    (folder / "cases.json").write_text(json.dumps(cases))
    with (folder / "cases.json").open() as stdin:
        command = [sys.executable, "family.py", *arguments]
        result = subprocess.run(command, cwd=folder, env=environment(), stdin=stdin, capture_output=True, encoding="utf-8", check=False)
    assert result.returncode == 0, result.stderr
    return [(code, stdout, stderr) for code, stdout, stderr in json.loads(result.stdout)]


def test_r72_what_a_script_does_to_its_streams_changes_neither_its_exit_code_nor_its_output(tmp_path: Path) -> None:
    cases = [([], TRAINING + ending) for ending in STREAMS]
    for (code, stdout, stderr), (ending, is_printed) in zip(family(tmp_path, cases, "real"), STREAMS.items()):
        assert (code, stdout) == (0, "out\n"), (ending, stderr)
        assert stderr.count("10 steps of Linear") == is_printed, ending  # once, not in a forked child that ends as well
        assert "Traceback" not in stderr, ending
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (tmp_path / "errors.txt").read_text() == ""


def test_r72_closed_descriptors_modes_deep_models_failures_and_warnings_are_as_without_sonde(tmp_path: Path) -> None:
    programs = [CLOSED, MODES, DEEP.format(is_bare=True, deepest=0), FAILING, WARNINGS]
    bare = family(tmp_path, [(["bare"], TRAINING + each) for each in programs])
    assert [code for code, _, _ in bare] == [0] * 5, bare
    deepest = bare[2][1].split()[1]
    programs = [CLOSED, MODES, DEEP.format(is_bare=False, deepest=deepest), FAILING, WARNINGS]
    watched = family(tmp_path, [(["--quiet", "--every", "1"], TRAINING + each) for each in programs])
    for program, (code, stdout, stderr), (_, expected, _) in zip(programs, watched, bare):
        assert (code, stdout, stderr) == (0, expected, ""), program
    run = sonde.Run(tmp_path / "run0")
    assert (run.last_step, run.damage, run.ended.how) == (19, [], "finished")


def test_r72_directories_archives_deleted_directories_and_unwritable_runs(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    script = "import sys\nprint(__file__, __name__, __package__, __spec__.name, sys.argv, sys.path[0], __loader__.__class__.__name__)\n"
    write(script, tmp_path / "program", "__main__.py")
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
        archive.write(tmp_path / "program" / "__main__.py", "__main__.py")
    bare = [call(target, "a", folder=tmp_path).stdout for target in ("program", "program.zip")]
    assert all("__main__.py" in stdout for stdout in bare)

    to = ["--to", "/proc/nobody/writes/here"]
    delete = "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
    launch = "from sonde.cli import main; sys.argv = ['sonde']; main(['run', *OPTIONS, SCRIPT])\n"
    write("import sys, os; print('started', sys.argv[1:]); sys.exit(4)", tmp_path, "four.py")
    path = str(tmp_path / "four.py")
    cases = [
        *((["--quiet", "--to", f"run-{target}", target, "a"], "") for target in ("program", "program.zip")),
        (["bare"], "import sys\n" + delete + launch.replace("OPTIONS", "[]").replace("SCRIPT", repr(path))),
        (to, TRAINING),
        ([*to, "--check"], TRAINING),
    ]
    *packed, deleted, unwatched, checked = family(tmp_path, cases)
    assert packed == [(0, stdout, "") for stdout in bare]
    assert deleted[:2] == (4, "started []\n"), deleted[2]
    assert unwatched[:2] == (0, "out\n")
    for _, _, stderr in (deleted, unwatched):
        assert "The run cannot be written to" in stderr
        assert "The script runs without Sonde." in stderr
        assert "Traceback" not in stderr
    assert checked[:2] == (2, "")
    assert "The run cannot be written to" in checked[2]


def test_r72_printing_a_report_draws_no_random_number_and_the_signal_file_closes_no_file_of_the_script(tmp_path: Path) -> None:
    code = """
        import os, random
        from pathlib import Path
        before = random.getstate()
        import sonde.render.terminal.report_terminal, sonde.render.draw_gradient_flow_animation, rich.live
        print(before == random.getstate())

        from sonde.runlog.fatal_signal_file import fatal_signals_recorded
        with fatal_signals_recorded(Path()):
            (ours,) = [int(fd) for fd in os.listdir("/proc/self/fd") if "fatal-signal" in os.path.realpath(f"/proc/self/fd/{fd}")]
            mine = os.open("mine.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(mine, ours)       # as after os.closerange
        print(os.write(ours, b"mine"), mine < 10 < ours)
    """
    result = python(code, tmp_path)
    assert (result.stdout, result.stderr) == ("True\n4 True\n", "")


def test_r72_a_deleted_working_directory_is_left_and_entered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with existing_directory():
        assert os.getcwd() == os.sep
    with pytest.raises(FileNotFoundError):
        os.getcwd()
    with existing_directory():
        assert os.path.isdir(os.getcwd())

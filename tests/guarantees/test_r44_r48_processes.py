"""R44–R48: workers, exits and signals. Sonde lives in one process, installs no signal handler, and lets everything through."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sonde
from guarantees.harness import environment, python, sonde_run, write

LOADING = """
    import sys, torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self):
            return 12
        def __getitem__(self, index):
            # a worker that uses a model and an optimizer of its own must not appear in the run
            model = nn.Linear(2, 1)
            model(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            return torch.full((3,), float(index))

    def main():
        import faulthandler
        faulthandler.dump_traceback_later(100, exit=True)      # a deadlock shows where it hangs
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        for way in sys.argv[1].split(","):
            loader = DataLoader(Numbers(), batch_size=3, num_workers=2, multiprocessing_context=way)
            with watching(model, optimizer, way):
                for x in loader:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
        faulthandler.cancel_dump_traceback_later()
        print("done")

    {watching}

    if __name__ == "__main__":
        main()
"""
INSIDE = """def watching(model, optimizer, way):
        import sonde
        return sonde.watch(model, optimizer, to=way, every=1, strict=True)"""
OUTSIDE = "def watching(model, optimizer, way):\n        import contextlib\n        return contextlib.nullcontext()"


def one_process(run: sonde.Run, steps: int) -> None:
    assert len({manifest["pid"] for manifest in run.manifests}) == len(run.processes) == 1
    assert run.last_step == steps - 1
    assert run.scalar("optimizer_steps")[1].tolist() == [1] * steps
    assert run.damage == []
    assert run.ended.how in ("finished", "exit")


def test_r44_loader_workers_never_write_to_a_run_that_is_watched_in_the_script(tmp_path: Path) -> None:
    result = python(LOADING.format(watching=INSIDE), tmp_path, "fork,spawn,forkserver")
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
    for way in ("fork", "spawn", "forkserver"):
        one_process(sonde.Run(tmp_path / way), 4)


def test_r44_loader_workers_never_write_to_a_run_under_sonde_run(tmp_path: Path) -> None:
    result = sonde_run(LOADING.format(watching=OUTSIDE), tmp_path, "fork,spawn,forkserver")
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
    one_process(sonde.Run(tmp_path / "run"), 12)
    assert len(list(tmp_path.glob("*/*.sonde"))) == 1


def test_r44_a_forked_child_that_trains_and_exits_leaves_the_run_alone(tmp_path: Path) -> None:
    code = """
        import os, torch, sonde
        from torch import nn

        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        with sonde.watch(model, optimizer, to="run", every=1, strict=True) as session:
            step()
            for leave in (os._exit, None):
                child = os.fork()
                if child == 0:
                    for _ in range(5):
                        with torch.no_grad():
                            model(torch.ones(1, 3))
                        session.log(child=1.0)
                    session.close()
                    os._exit(0)
                os.waitpid(child, 0)
                step()
    """
    result = python(code, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    run = sonde.Run(tmp_path / "run")
    one_process(run, 3)
    assert "log" not in run.kinds
    assert len(list(run.events("end"))) == 1


def test_r45_a_script_without_a_main_guard_is_not_watched_again_by_its_spawned_workers(tmp_path: Path) -> None:
    """Each worker imports the script again, up to where it would start workers itself; the run must stay one and whole."""
    code = """
        import torch, sonde
        from torch import nn
        import multiprocessing as mp

        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = sonde.watch(model, optimizer, to="run", every=1, strict=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        if not getattr(mp.current_process(), "_inheriting", False):
            for way in ("spawn", "forkserver"):
                worker = mp.get_context(way).Process(target=print, args=("hello",))
                worker.start()
                worker.join()
                print("worker", worker.exitcode)
        session.close()
    """
    result = python(code, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("worker 0") == 2
    one_process(sonde.Run(tmp_path / "run"), 3)


# -- R46 -------------------------------------------------------------------------------------------

TRAIN = """
    import atexit, os, sys, torch
    from torch import nn
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
"""
ENDINGS = {
    "falling off the end": ("", 0, "", "finished"),
    "sys.exit(3)": ("sys.exit(3)", 3, "", "exit"),
    "sys.exit(text)": ("sys.exit('no luck')", 1, "no luck\n", "exit"),
    "os._exit": ("os._exit(5)", 5, "", "killed"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_r46_every_way_to_leave_a_script_keeps_its_exit_code_its_output_and_all_steps(ending: str, tmp_path: Path) -> None:
    last, code, stderr, how = ENDINGS[ending]
    result = sonde_run(TRAIN + f"    {last}\n", tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", stderr)
    run = sonde.Run(tmp_path / "run")
    assert run.last_step == 4
    assert run.ended.how == how
    assert run.ended.exit_code == (None if how == "killed" else code)


def test_r46_a_session_that_is_never_closed_keeps_all_steps_and_is_silent_at_exit(tmp_path: Path) -> None:
    code = TRAIN.replace("    for _", "    import sonde\n    session = sonde.watch(model, optimizer, to='run', every=1)\n    for _")
    result = python(code, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert sonde.Run(tmp_path / "run").last_step == 4


# -- R47, R48 --------------------------------------------------------------------------------------

ENDLESS = """
    import sys, torch
    from torch import nn
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    {watch}
    print("ready", flush=True)
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("way", ["sonde run", "watch"])
def test_r47_ctrl_c_at_any_time_reaches_the_user_and_the_log_stays_valid(way: str, tmp_path: Path) -> None:
    """A parent that imports torch once forks ten trainings and interrupts each at another moment, also twice in a row."""
    code = """
        import os, random, runpy, signal, sys, time, traceback
        from pathlib import Path
        import torch, sonde
        from sonde.capture.launch import run_script
        from sonde.config import DebugConfig
        rng = random.Random(5)
        for round in range(10):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.dup2(writer, 1)
                sys.stdout = os.fdopen(1, "w")
                quiet = os.open(f"stderr{round}", os.O_CREAT | os.O_WRONLY)
                os.dup2(quiet, 2)
                sys.stderr = os.fdopen(2, "w")
                code = 0
                try:
                    if WAY == "sonde run":
                        where = dict(to=f"run{round}", name=None, strict=False, module=False)
                        code = run_script("endless.py", [], config=DebugConfig(every=1), **where).exit_code
                    else:
                        os.environ["TO"] = f"run{round}"
                        runpy.run_path("endless.py", run_name="__main__")
                except KeyboardInterrupt:
                    code = 130
                except BaseException:
                    traceback.print_exc()
                    code = 1
                sys.stderr.flush()
                os._exit(code)
            os.close(writer)
            os.read(reader, 6)
            time.sleep(rng.uniform(0.0, 0.2))
            os.kill(child, signal.SIGINT)
            if round % 2:
                time.sleep(rng.uniform(0.0, 0.002))
                try:
                    os.kill(child, signal.SIGINT)
                except ProcessLookupError:
                    pass
            _, status = os.waitpid(child, 0)
            os.close(reader)
            print(os.waitstatus_to_exitcode(status), flush=True)
    """
    inside = "import os, sonde\n    session = sonde.watch(model, optimizer, to=os.environ['TO'], every=1)"
    watch = "" if way == "sonde run" else inside
    write(ENDLESS.format(watch=watch), tmp_path, "endless.py")
    result = python(code.replace("WAY", repr(way)), tmp_path)
    assert result.returncode == 0, result.stderr
    codes = [int(line) for line in result.stdout.split()]
    assert len(codes) == 10
    assert set(codes) <= {130, -2}
    for number in range(10):
        run = sonde.Run(tmp_path / f"run{number}")
        assert run.damage == []
        assert run.torn == []
        if way == "sonde run" and number % 2 == 0:
            assert (run.ended.how, run.ended.exit_code) == ("interrupted", 130)
            assert (tmp_path / f"stderr{number}").read_text().rstrip().endswith("KeyboardInterrupt")


def test_r47_ctrl_c_ends_sonde_run_as_it_ends_python(tmp_path: Path) -> None:
    write(ENDLESS.format(watch=""), tmp_path)
    command = [sys.executable, "-m", "sonde", "run", "--quiet", "--to", "run", "train.py"]
    child = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(random.uniform(0.0, 0.2))
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode in (130, -2)
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert stderr.count("Traceback") == 1
    run = sonde.Run(tmp_path / "run")
    assert run.ended.how == "interrupted"
    assert run.last_step >= 0


def test_r48_no_signal_handler_is_installed_or_replaced_and_faulthandler_is_left_as_it_is(tmp_path: Path) -> None:
    code = """
        import faulthandler, signal, sys
        def handlers():
            return {number: signal.getsignal(number) for number in signal.valid_signals()}, faulthandler.is_enabled(), sys.excepthook
        def mine(*_): pass
        signal.signal(signal.SIGTERM, mine)
        before = handlers()
        import torch
        from torch import nn
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            assert handlers() == before
        print({number: str(handler) for number, handler in handlers()[0].items() if number != signal.SIGTERM}, handlers()[1:])
    """
    bare, watched = python(code, tmp_path / "bare"), sonde_run(code, tmp_path / "watched")
    assert watched.stdout == bare.stdout
    assert (watched.returncode, watched.stderr) == (bare.returncode, bare.stderr) == (0, "")
    assert "SIGINT" in bare.stdout
    assert os.path.exists(tmp_path / "watched" / "run")

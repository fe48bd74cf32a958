"""R44–R48: workers, exits and signals. Sonde lives in one process, installs no signal handler, and lets everything through."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sonde
from training_harness import environment, python, sonde_run, write

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


@pytest.mark.slow
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


@pytest.mark.slow
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


LEAVING = """
    import os, sys, time, torch
    from torch import nn
    import states
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if os.environ["WAY"] == "watch":
        import sonde
        session = sonde.watch(model, optimizer, to=os.environ["TO"], every=1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    if os.environ["WAY"] != "bare":
        states.put_writer_in(os.environ["STATE"])
    with open(os.environ["TO"] + ".clock", "w") as file:
        file.write(str(time.monotonic()))
    exec(os.environ["ENDING"])
"""
STATES = """
    import errno, os, shutil, threading
    from sonde.runlog import writer

    def put_writer_in(state):
        ours = writer.Writer.newest
        ours.event("log", 4, {"name": "last", "text": "words"})      # not flushed: it is to be there all the same
        if state == "full":
            writer._write = full
        elif state == "short":
            writer._write = lambda fd, chunk: os.write(fd, chunk[: len(chunk) // 2])
        elif state == "closed":
            os.closerange(3, 200)
        elif state == "deleted":
            shutil.rmtree(os.environ["TO"])
        elif state == "stalled":
            inside = threading.Event()
            def stall(fd, chunk):
                inside.set()
                threading.Event().wait()
            writer._write = stall
            threading.Thread(target=ours.flush, daemon=True).start()
            inside.wait()

    def full(fd, chunk):
        raise OSError(errno.ENOSPC, "No space left on device")
"""
# Forked from a process that has torch in memory. Each child ends as the interpreter does, up to where it takes torch apart, which is long
# after Sonde has left and takes seconds.
FAMILY = """
    import atexit, json, os, runpy, signal, sys, threading, time
    import torch, sonde
    from sonde.session import run_script
    from sonde.config import DebugConfig
    from sonde.runlog.writer import Writer

    def noted(self, *args, init=Writer.__init__, **kwargs):
        init(self, *args, **kwargs)
        Writer.newest = self

    Writer.__init__ = noted
    warm = torch.nn.Linear(1, 1)
    torch.optim.SGD(warm.parameters(), lr=0.1).step()
    rows = []
    for number, (way, state, ending) in enumerate(json.loads(sys.argv[1])):
        name = f"run{number}"
        os.environ.update(WAY=way, STATE=state, ENDING=ending, TO=name)
        child = os.fork()
        if child == 0:
            signal.alarm(60)      # a child that hangs must not outlive the test
            for target, suffix in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{name}.{suffix}", os.O_CREAT | os.O_WRONLY), target)
            code = 0
            try:
                if way == "sonde run":
                    where = dict(to=name, name=None, strict=False, module=False)
                    code = run_script("script.py", [], config=DebugConfig(every=1), **where).exit_code
                else:
                    runpy.run_path("script.py", run_name="__main__")
            except SystemExit as leaving:
                code = leaving.code
            except BaseException as error:
                sys.last_value, code = error, 1
                sys.excepthook(type(error), error, error.__traceback__)
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        took_s = time.monotonic() - float(open(name + ".clock").read())
        texts = [open(f"{name}.{suffix}").read() for suffix in ("out", "err")]
        rows.append([way, state, ending, took_s, os.waitstatus_to_exitcode(status), *texts])
    print(json.dumps(rows))
"""
WRITERS = ("sound", "full", "short", "closed", "deleted", "stalled")
SAYS = {"full": 1, "short": 1, "closed": 1, "deleted": 1, "stalled": 1}  # lines on stderr: what could not be written is said once
LEAVES = {"": 0, "sys.exit(3)": 3, "raise ValueError('mine')": 1}
LIMIT_S = 2.0  # beyond what the same program takes to leave without Sonde


@pytest.mark.slow
def test_r46_a_process_leaves_within_two_seconds_whatever_state_the_writer_is_in(tmp_path: Path) -> None:
    """Three ways to end, six states of the writer, under `sonde run` and with a session that nobody closes."""
    write(STATES, tmp_path, "states.py")
    write(LEAVING, tmp_path, "script.py")
    bare = [("bare", "", ending) for ending in LEAVES]
    states = [(way, state, "") for way in ("watch", "sonde run") for state in WRITERS]
    others = [("sound", "sys.exit(3)"), ("sound", "raise ValueError('mine')"), ("stalled", "raise ValueError('mine')")]
    endings = [(way, *other) for way in ("watch", "sonde run") for other in others]
    result = python(FAMILY, tmp_path, json.dumps([*bare, *states, *endings]))
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    alone = {ending: (took_s, stderr) for way, _, ending, took_s, _, _, stderr in rows if way == "bare"}
    for number, (way, state, ending, took_s, code, stdout, stderr) in enumerate(rows):
        what = f"{way}, {state}, {ending!r}: {took_s:.2f} s, {stderr}"
        assert took_s < alone[ending][0] + LIMIT_S, what
        assert (code, stdout) == (LEAVES[ending], ""), what
        if way == "watch" and state == "sound":
            assert stderr == alone[ending][1], what
        else:
            assert stderr.count("Traceback") == ("raise" in ending), what
            assert state not in SAYS or "raise" in ending or len(stderr.splitlines()) <= SAYS[state], what
        if way != "bare" and state != "deleted":
            run = sonde.Run(tmp_path / f"run{number}")
            assert (run.last_step, run.damage) == (4, []), what
            if state == "sound":
                assert [event.data["text"] for event in run.events("log")] == ["words"], what
                how = "exception" if "raise" in ending else "finished" if way == "sonde run" and not ending else "exit"
                assert run.ended.how == how, what


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


@pytest.mark.parametrize("way", ["sonde run", pytest.param("watch", marks=pytest.mark.slow)])
def test_r47_ctrl_c_at_any_time_reaches_the_user_and_the_log_stays_valid(way: str, tmp_path: Path) -> None:
    """A parent that imports torch once forks six trainings and interrupts each at another moment, also twice in a row."""
    code = """
        import os, random, runpy, signal, sys, time, traceback
        from pathlib import Path
        import torch, sonde
        from sonde.session import run_script
        from sonde.config import DebugConfig
        rng = random.Random(5)
        for round in range(6):
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
    assert len(codes) == 6
    assert set(codes) <= {130, -2}
    for number in range(6):
        run = sonde.Run(tmp_path / f"run{number}")
        assert run.damage == []
        assert run.torn == []
        if way == "sonde run" and number % 2 == 0:
            assert (run.ended.how, run.ended.exit_code) == ("interrupted", 130)
            assert (tmp_path / f"stderr{number}").read_text().rstrip().endswith("KeyboardInterrupt")


def test_r47_ctrl_c_ends_sonde_run_as_it_ends_python(tmp_path: Path) -> None:
    write(ENDLESS.format(watch=""), tmp_path)
    command = [sys.executable, "-m", "sonde", "run", "--to", "run", "train.py"]
    child = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(random.uniform(0.0, 0.2))
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT  # so that a loop of the shell stops, too
    traceback, _, verdict = stderr.partition("KeyboardInterrupt\n")
    assert traceback.count("Traceback") == 1
    assert "interrupted" in verdict
    assert "Traceback" not in verdict
    run = sonde.Run(tmp_path / "run")
    assert run.ended.how == "interrupted"
    assert run.last_step >= 0


def test_r48_no_signal_handler_that_python_knows_is_installed_or_replaced(tmp_path: Path) -> None:
    code = """
        import signal, sys
        def handlers():
            # `sonde run` has faulthandler write fatal signals into the run, where the script has not enabled it itself.
            return {number: signal.getsignal(number) for number in signal.valid_signals()}, sys.excepthook
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

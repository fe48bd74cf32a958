"""`sonde run`: a script behaves as under Python alone. Each test runs a script twice, bare and watched, so several facts share one pair."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

import sonde
from training_harness import call, python, sonde_run, write

OPTIONS = ("--strict", "--quiet", "--to", "run")
TRAINING = """
    import torch
    from torch import nn
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
"""


def both(code: str, folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """The same script in the same folder, bare and under `sonde run`."""
    return python(code, folder, *arguments), sonde_run(code, folder, *arguments)


def test_a_script_has_the_environment_that_it_has_under_python_alone(tmp_path: Path) -> None:
    write("value = 'from beside the script'", tmp_path, "neighbour.py")
    code = """
        import argparse, os, sys, pickle
        import neighbour
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        parser.add_argument("--quiet", action="store_true")
        parser.add_argument("rest", nargs="*")
        class Mine: pass
        print(parser.parse_args(), parser.prog)
        print(sys.argv, __name__, os.path.basename(__file__), neighbour.value, os.getcwd())
        print(sys.path[0], __package__, __doc__, sys.modules["__main__"].__file__ == __file__)
        print(pickle.loads(pickle.dumps(Mine())).__class__ is Mine, Mine.__module__)
        print("to stderr", file=sys.stderr)
        sys.exit(3)
    """
    bare, watched = both(code, tmp_path, "--lr", "0.5", "--quiet", "one", "two")
    assert bare.returncode == watched.returncode == 3
    assert watched.stdout == bare.stdout
    assert watched.stderr == bare.stderr == "to stderr\n"


def test_an_exception_is_shown_as_python_shows_it_and_its_exit_code_is_one(tmp_path: Path) -> None:
    code = TRAINING + """
    def inner():
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("the user's own error") from error
    inner()
    """
    bare, watched = both(code, tmp_path)
    assert bare.returncode == watched.returncode == 1
    assert "the user's own error" in bare.stderr
    assert "direct cause" in bare.stderr
    assert watched.stderr == bare.stderr
    run = sonde.Run(tmp_path / "run")
    assert (run.ended.how, run.ended.exit_code, run.ended.exception) == ("exception", 1, "ValueError: the user's own error")
    assert run.last_step == 2


def test_an_exception_inside_of_a_model_is_the_users_own_with_no_frame_of_ours(tmp_path: Path) -> None:
    """torch's own frames differ by one where a module has hooks; the user's are the same."""
    code = TRAINING + """
    model(torch.ones(2, 5))
    """
    bare, watched = both(code, tmp_path)
    assert bare.returncode == watched.returncode == 1
    lines, expected = watched.stderr.splitlines(), bare.stderr.splitlines()
    assert lines[-1] == expected[-1]
    assert [line for line in lines if "train.py" in line] == [line for line in expected if "train.py" in line]
    assert lines[:3] == expected[:3]
    assert str(Path(sonde.__file__).parent) not in watched.stderr


def test_a_syntax_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    bare, watched = both("def broken(:\n    pass\n", tmp_path)
    assert bare.returncode == watched.returncode == 1
    assert "SyntaxError" in bare.stderr
    assert watched.stderr == bare.stderr


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    package = tmp_path / "trainer"
    write("", package, "__init__.py")
    write("size = 3", package, "settings.py")
    start = "from . import settings\nimport sys\nprint(settings.size, __name__, sys.argv[1:], __package__)\n"
    write(start + textwrap.dedent(TRAINING), package, "main.py")
    result = call("-m", "sonde", "run", *OPTIONS, "-m", "trainer.main", "--lr", "1", folder=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "3 __main__ ['--lr', '1'] trainer\n"
    assert sonde.Run(tmp_path / "run").last_step == 2


def test_a_missing_script_is_an_error_message_and_not_a_traceback(tmp_path: Path) -> None:
    write("", tmp_path, "train_mnist.py")
    result = call("-m", "sonde", "run", "train_mnst.py", folder=tmp_path)
    assert result.returncode not in (0, 1)
    assert "train_mnst.py" in result.stderr
    assert "train_mnist.py" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_script_that_never_trains_is_reported_and_keeps_its_exit_code(tmp_path: Path) -> None:
    result = sonde_run("print('hello')", tmp_path, options=("--strict", "--to", "run"))
    assert (result.returncode, result.stdout) == (0, "hello\n")
    assert "Traceback" not in result.stderr
    assert result.stderr  # there is a message
    assert sonde.Run(tmp_path / "run").last_step == -1


def test_the_excepthook_of_the_script_is_used(tmp_path: Path) -> None:
    code = """
        import sys
        sys.excepthook = lambda kind, error, trace: print("mine:", kind.__name__, error, trace.tb_lineno, trace.tb_next)
        1 / 0
    """
    bare, watched = both(code, tmp_path)
    assert bare.stdout.startswith("mine: ZeroDivisionError")
    assert (watched.stdout, watched.stderr, watched.returncode) == (bare.stdout, bare.stderr, bare.returncode)


@pytest.mark.parametrize("option", [("--every", "0"), ("--budget", "7")], ids=" ".join)
def test_an_impossible_setting_is_refused_before_the_script_starts(option: tuple[str, str], tmp_path: Path) -> None:
    result = sonde_run("print('started')", tmp_path, options=option)
    assert result.returncode not in (0, 1)
    assert "started" not in result.stdout
    assert "Traceback" not in result.stderr

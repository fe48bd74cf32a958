"""R41–R43: nobody shares a file by accident, nothing in a file is ever executed, and every value comes back as it was."""

import ast
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sonde
from sample_logs import start_training, write_log
from sonde.events import Site
from sonde.runlog import record_format as f
from sonde.runlog.run_directory import new_run_directory
from sonde.runlog.run_reader import Run
from sonde.runlog.writer import Writer

SOURCE = Path(sonde.__file__).parent


def start(parent):
    """What one start takes for itself: a new run, its file, and a file in a directory that all of them were told to use."""
    path = new_run_directory(parent / "runs", "train")
    return path.name, Writer(path).path.name, Writer(parent / "shared").path.name


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_r41_fifty_parallel_starts_share_nothing(tmp_path):
    (tmp_path / "shared").mkdir()
    waiting, go = os.pipe()
    receiving, answers = os.pipe()
    children = []
    for _ in range(50):
        child = os.fork()
        if child == 0:
            try:
                os.close(go)
                os.read(waiting, 1)  # returns in all of them at once, when the parent closes its end
                os.write(answers, " ".join(start(tmp_path)).encode() + b"\n")
            finally:
                os._exit(0)
        children.append(child)
    os.close(go)
    os.close(answers)
    for child in children:
        os.waitpid(child, 0)
    with os.fdopen(receiving) as lines:
        found = [line.split() for line in lines]
    os.close(waiting)
    assert len(found) == 50
    for column in zip(*found):
        assert len(set(column)) == 50
    assert len(Run(tmp_path / "shared").processes) == 50
    assert len(list((tmp_path / "runs").iterdir())) == 50


def test_r41_equal_names_in_the_same_nanosecond_still_differ(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time_ns", lambda: 1)  # as two containers, each with this host name and process id 1
    assert len({Writer(tmp_path).path for _ in range(5)}) == 5


BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "runpy"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load"}
# `sonde run` exists to execute the user's own script; looking back at a bad step executes statements of the function that is running,
# in its own process. Neither reads a run or a capsule.
ALLOWED = {("script_runner.py", name) for name in ("runpy", "exec", "compile")}
REPLAYED = ("statements_that_compute_value", "statements_after_backward")  # statements of the user
ALLOWED |= {(f"replay/{file}.py", name) for file in REPLAYED for name in ("exec", "compile")}


def executing_names(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names if alias.name.split(".")[0] in BANNED_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in BANNED_MODULES:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BANNED_CALLS:
            safe = any(keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True" for keyword in node.keywords)
            if not safe:
                yield ast.unparse(node.func)


def test_r42_no_module_can_execute_what_it_reads():
    files = [path for path in SOURCE.rglob("*.py") if "demo_programs" not in path.parts]
    found = {(str(path.relative_to(SOURCE)), name) for path in files for name in executing_names(path)}
    assert len(files) > 10
    assert found - ALLOWED == set()


def test_r42_the_lint_sees_what_it_looks_for(tmp_path):
    code = "import pickle.x\nfrom yaml import load\nimport torch\ntorch.load('x')\neval('1')\ntorch.load(1, weights_only=True)"
    (tmp_path / "bad.py").write_text(code)
    assert sorted(executing_names(tmp_path / "bad.py")) == ["eval", "pickle", "torch.load", "yaml"]


class Hostile:
    def __reduce__(self):
        return os.mkdir, (self.canary,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_r42_a_hostile_pickle_named_as_a_log_is_only_damage(tmp_path, protocol):
    hostile = Hostile()
    hostile.canary = str(tmp_path / "pwned")
    data = pickle.dumps(hostile, protocol)
    for content in (data, f.header() + data, f.header() + f.record(f.MANIFEST, data) + f.record(f.FRAME, data)):
        run = Run(write_log(tmp_path / "run", content))
        (tmp_path / "run" / "run.json").write_bytes(data)
        assert list(run.steps()) == []
        assert Run(tmp_path / "run").damage
    assert not (tmp_path / "pwned").exists()
    pickle.loads(data)
    assert (tmp_path / "pwned").exists()  # it would have worked


any_text = st.text(st.characters(), max_size=30)  # with surrogates and NUL
any_float = st.floats(allow_nan=True, allow_infinity=True)
any_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**300), 10**300) | any_float | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)


def same(one, other):
    """Equal to the last bit of meaning: types, NaN, the sign of zero."""
    return repr(one) == repr(other)


@given(
    names=st.lists(any_text, min_size=1, max_size=4),
    kind=any_text,
    data=st.dictionaries(any_text, any_data, max_size=4),
    values=st.lists(any_float, min_size=4, max_size=4),
    step=st.integers(0, 2**62),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_r43_every_value_and_every_name_comes_back_as_it_was(tmp_path, names, kind, data, values, step):
    directory = new_run_directory(tmp_path)
    writer = Writer(directory)
    sites = [Site(i, kind, name, model=name, type=name, dtype=name) for i, name in enumerate(names)]
    writer.sites(sites)
    writer.event(kind, step, data)
    writer.frame(writer.plan(kind or "k", ("a", "b", "c", "d"), [0]), step, np.array([values]))
    writer.frame(writer.plan("step", ("value",), range(4)), step, np.array(values)[:, None])
    writer.close()
    run = Run(directory)
    assert list(run.sites.values()) == sites
    (event,) = run.events()
    assert (event.kind, event.step) == (kind, step)
    assert same(event.data, data)
    assert same(next(run.frames("step")).values[0].tolist(), values)
    if kind not in ("", "step", "batch"):
        (frame,) = run.frames(kind)
        assert same(frame.values[:, 0].tolist(), np.array(values).astype(frame.values.dtype).tolist())
        assert [math.isinf(value) for value in frame.values[:, 0]] == [math.isinf(value) for value in values]
        assert [value == 0 for value in frame.values[:, 0]] == [value == 0 for value in values]


def test_r43_names_that_torch_allows_survive_a_real_process(tmp_path):
    code = r"""
        names = ["\ud800", "a\x00b", "\x1b[31m", "<img onerror=x>", "__proto__", "x" * 100_000, "\u202e", "line\nbreak"]
        writer = Writer(Path(directory))
        writer.sites([Site(i, "output", name) for i, name in enumerate(names)])
        writer.flush()
    """
    assert start_training(tmp_path, code).wait() == 0
    paths = [site.path for site in Run(tmp_path).sites.values()]
    assert paths[:5] == ["\ud800", "a\x00b", "\x1b[31m", "<img onerror=x>", "__proto__"]
    assert len(paths[5]) == f.MAX_NAME

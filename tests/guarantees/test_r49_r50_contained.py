"""R49: a bug in any part of capture never reaches the training, and is said. R50: nor does running out of memory inside of it."""

from __future__ import annotations

import inspect
import itertools
import logging
import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from guarantees.harness import Outcome, digest, generators, patched_functions, python, seed
from sonde.capture import calls, kernel
from sonde.capture.loop import Loop, contained
from zoo import Program, _regression

STEPS = 6  # a probe has three chances before it is taken out


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.last(self.drop(torch.relu(self.norm(self.first(x))))), 1


def play(to: Path | None, sabotage: Callable[[], None] = lambda: None) -> Outcome:
    """A training with everything that the switchboard hears, on which a saboteur is let loose after attaching."""
    seed()
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(torch.randn(STEPS * 5, 6), batch_size=5, shuffle=True)
    outcome = Outcome()
    session = sonde.watch(model, optimizer, to=to, every=1, strict=False) if to else None
    sabotage()
    for x in loader:
        optimizer.zero_grad()
        loss = model(x)[0].square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            model(x)
        if session is not None:
            session.log(extra=loss)
        outcome.losses.append(loss.item())
        outcome.generators.append(generators())
    if session is not None:
        session.close()
    outcome.state = digest(model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
    return outcome


@cache
def undisturbed() -> Outcome:
    return play(None)


# What the session does when the user calls it by name, and the hooks themselves: they hold nothing but the containment of what is inside.
BOUNDARY = {"attach", "start", "stop", "close", "report", "log", "pause", "_watch_given", "resume", "caught"}


def inner_functions() -> dict[str, tuple[Any, str]]:
    """Every function of capture that may run while a training is under way."""
    import sonde.capture as package

    found: dict[str, tuple[Any, str]] = {}
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if info.name.endswith("._kernel") or info.name == calls.__name__ or info.name.endswith((".launch", ".faults")):
            continue
        module = import_module(info.name)
        short = info.name.removeprefix("sonde.capture.")
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != info.name:
                continue
            if isinstance(value, FunctionType):
                found[f"{short}.{name}"] = (module, name)
            elif inspect.isclass(value):
                for inner, method in vars(value).items():
                    if isinstance(method, (FunctionType, staticmethod)) and not inner.startswith("__") and inner not in BOUNDARY:
                        found[f"{short}.{name}.{inner}"] = (value, inner)
    return found


FUNCTIONS = inner_functions()


def test_the_list_of_inner_functions_is_not_empty_by_mistake() -> None:
    assert len(FUNCTIONS) > 80
    for expected in ("loop.Loop._end_step", "kernel.guard", "journal.Journal.end_step", "probes.activations.Activations.take"):
        assert expected in FUNCTIONS


@pytest.mark.parametrize("function", FUNCTIONS)
def test_r49_an_error_in_any_inner_function_leaves_the_training_as_it_is(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, name = FUNCTIONS[function]
    raised = []
    errors = itertools.cycle((RuntimeError, MemoryError, RecursionError))

    def broken(*args: Any, **kwargs: Any) -> Any:
        raised.append(next(errors))
        raise raised[-1]("injected")

    broken.__name__ = name
    # Where containment is around the function, it stays around the broken one.
    replacement = contained(broken) if hasattr(getattr(owner, name), "__wrapped__") and owner is Loop else broken
    functions_before = patched_functions()
    caplog.set_level(logging.WARNING, "sonde")
    assert play(tmp_path / "run", lambda: monkeypatch.setattr(owner, name, replacement)) == undisturbed()
    monkeypatch.undo()
    assert patched_functions() == functions_before
    assert sonde.Run(tmp_path / "run").damage == []
    if len(raised) > 3 * STEPS:  # often enough to be noticed, so it must have been said
        assert caplog.records, f"{function} failed {len(raised)} times in silence"


def test_r49_a_retired_probe_is_named_with_its_error_and_all_else_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("one probe is broken")

    from sonde.capture.probes.activations import Activations

    play(tmp_path / "run", lambda: monkeypatch.setattr(Activations, "take", broken))
    run = sonde.Run(tmp_path / "run")
    retired = {event.data["where"]: event.data for event in run.events("retired")}
    assert set(retired) == {"first", "norm", "drop", "last"}
    assert all("ZeroDivisionError: one probe is broken" in data["error"] for data in retired.values())
    assert run.last_step == STEPS - 1
    assert run.series("gradient", "first.weight", "num")[0].tolist() == list(range(STEPS))


def test_r49_strict_raises_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    model = nn.Linear(2, 1)
    session = sonde.watch(model, to=tmp_path / "run", every=1, strict=True)
    monkeypatch.setattr(kernel, "guard", broken)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2))
    monkeypatch.undo()
    session.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_r49_what_is_meant_for_the_user_passes(error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise error

    model = nn.Linear(2, 1)
    with sonde.watch(model, to=tmp_path / "run", every=1, strict=False):
        monkeypatch.setattr(kernel, "guard", interrupted)
        with pytest.raises(error):
            model(torch.ones(1, 2))
        monkeypatch.undo()


# -- R50 -------------------------------------------------------------------------------------------


def test_r50_running_out_of_device_memory_in_the_statistics_is_contained(tmp_path: Path) -> None:
    """Without the native kernel the statistics are torch operations; here every one of them, called by Sonde, runs out of memory."""
    code = """
        import sys
        from pathlib import Path
        import torch, sonde
        from sonde.capture import kernel
        from guarantees.test_r49_r50_contained import play, undisturbed
        assert not kernel.NATIVE
        home = str(Path(sonde.__file__).parent)
        switchboard = str(Path(home, "capture", "calls.py"))
        failed = 0
        REDUCERS = {"sum", "mul", "stack", "aminmax", "amin", "amax", "isfinite", "linalg_vector_norm", "clone", "sub"}

        class Full(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                global failed
                frame = sys._getframe(1)
                while frame is not None:
                    name = frame.f_code.co_filename
                    if name.startswith(home) and name != switchboard:
                        if getattr(func, "__name__", "") in REDUCERS:
                            failed += 1
                            raise torch.OutOfMemoryError("injected")
                        break
                    frame = frame.f_back
                return func(*args, **(kwargs or {}))

        expected = undisturbed()
        with Full():
            observed = play(Path("run"))
        assert observed == expected
        assert failed > 20, failed
        print("the same", sonde.Run("run").last_step)
    """
    result = python(code, tmp_path, SONDE_NATIVE="0")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"the same {STEPS - 1}\n"


def test_r50_tensors_of_a_failed_measurement_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    from sonde.capture.probes.activations import Activations

    outputs: list[weakref.ref[torch.Tensor]] = []

    def full(self: Activations, leaf: Any, call: int, item: int, tensor: torch.Tensor) -> None:
        outputs.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(Activations, "take", full)
    program = Program("mlp", lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), _regression(5, 6))
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=False):
        for _ in range(5):
            optimizer.zero_grad()
            program.loss(model).backward()
            optimizer.step()
            assert outputs
            assert not any(output() is not None for output in outputs)


def test_r50_where_the_address_space_is_full_the_training_goes_on_without_the_copies(tmp_path: Path) -> None:
    """A limit of the operating system, and parameters of 84 MB whose copies do not fit below it."""
    code = """
        import resource, hashlib, torch, sonde
        from torch import nn
        torch.set_num_threads(1)

        def train(watch):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3000, 3500), nn.ReLU(), nn.Linear(3500, 3000))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
            x = torch.randn(2, 3000)
            def step():
                optimizer.zero_grad(set_to_none=False)
                model(x).square().mean().backward()
                optimizer.step()
            step()
            step()
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            before = resource.getrlimit(resource.RLIMIT_AS)
            if watch:
                resource.setrlimit(resource.RLIMIT_AS, (used + (70 << 20), before[1]))
                with sonde.watch(model, optimizer, to="run", every=1):
                    for _ in range(5): step()
                resource.setrlimit(resource.RLIMIT_AS, before)
            else:
                for _ in range(5): step()
            return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()

        assert train(True) == train(False)
        run = sonde.Run("run")
        assert run.last_step == 4 and not run.damage
        assert not len(run.series("update", "0.weight", "l2")[0])      # no room for them, and said so below
        assert run.series("gradient", "0.weight", "l2")[0].tolist() == [0, 1, 2, 3, 4]
        print("the same")
    """
    result = python(code, tmp_path)
    assert (result.returncode, result.stdout) == (0, "the same\n"), result.stderr

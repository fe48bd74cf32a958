"""R49: a bug in any part of capture never reaches the training, and is said. R50: nor does running out of memory inside of it."""

from __future__ import annotations

import builtins
import inspect
import itertools
import logging
import pkgutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from model_examples import Program, _regression
from sonde.config import DebugConfig
from sonde.statistics import native_extension, reductions
from training_harness import Outcome, digest, generators, patched_functions, python, seed

BOUNDARY_MODULES = {
    "sonde.capture.torch_patches", "sonde.capture.forward_call_patch", "sonde.capture.tensor_method_patch", "sonde.capture.monkeypatch",
    "sonde.capture.training_callbacks", "sonde.statistics.private_torch_api",
}  # fmt: skip
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


def busy(to: Path | None, sabotage: Callable[[], None] = lambda: None) -> Outcome:
    """What an ordinary training does not have: models to be found, hooks of the user's, a scaler that skips, a closure, bad numbers."""
    seed()
    outcome = Outcome()
    session = sonde.DebugSession(DebugConfig(every=2), to=to).start() if to else None
    sabotage()
    model, critic = Small(), nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    model.first.register_forward_hook(lambda module, args, output: output * 1.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    second = torch.optim.LBFGS(critic.parameters(), lr=0.1, max_iter=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    data = torch.randn(STEPS * 5, 6)
    for step in range(STEPS):
        optimizer.zero_grad()
        made = model(data[5 * step : 5 * step + 5])[0]
        loss = critic(made).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

        def closure(made: torch.Tensor = made) -> torch.Tensor:
            second.zero_grad()
            value: torch.Tensor = critic(made.detach()).mean()
            value.backward()
            return value

        second.step(closure)
        outcome.losses.append(loss.item())
        outcome.generators.append(generators())
    for bad in (float("nan"), float("inf")):
        optimizer.zero_grad()
        model(data[:5] * bad)[0].mean().backward()
        with torch.no_grad():
            model(data[:5] * bad)
    if session is not None:
        session.log(extra=loss, words="text")
        session.close()
    outcome.state = digest(model.state_dict(), critic.state_dict(), optimizer.state_dict())
    return outcome


def by_torch(to: Path | None, sabotage: Callable[[], None] = lambda: None) -> Outcome:
    """The ordinary training where there is no native kernel."""
    before = native_extension.ENABLED
    native_extension.use_native(False)
    try:
        return play(to, sabotage)
    finally:
        native_extension.use_native(before)


SCENES = {"ordinary": play, "busy": busy, "by torch": by_torch}
ERRORS = (RuntimeError, MemoryError, RecursionError)
# What the user calls by name, or torch by a hook: such a function isolates what is inside of it, and holds nothing else.
BOUNDARY = {
    "capture.step_tracker.isolated", "capture.disable_failing_probes.ErrorIsolation.report",
    "capture.probes.activations._LeafHook.__call__",
    *(f"capture.probes.activations.ActivationProbe.{name}" for name in ("_on_output", "_on_own_output", "_on_gradient")),
    "capture.find_models_in_script.ModelDiscovery._on_call_start", "capture.find_models_in_script.ModelDiscovery._on_call_end",
    "statistics.native_extension.use_native", "capture.step_tracker.StepTracker.on_suspend", "capture.step_tracker.StepTracker.on_resume",
}  # fmt: skip


@cache
def inner_functions() -> dict[str, Any]:
    """Every function, method, property and constructor of capture and statistics but the boundary."""
    import sonde.capture
    import sonde.statistics

    found: dict[str, Any] = {}
    packages = (sonde.capture, sonde.statistics)
    for info in [each for package in packages for each in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]:
        if info.name in BOUNDARY_MODULES or info.name.endswith("._native"):
            continue
        module = import_module(info.name)
        short = info.name.removeprefix("sonde.")
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != info.name:
                continue
            if isinstance(value, FunctionType):
                found[f"{short}.{name}"] = value
            elif inspect.isclass(value):
                methods = {inner: method for inner, method in vars(value).items() if isinstance(method, METHODS)}
                found |= {f"{short}.{name}.{inner}": method for inner, method in methods.items()}
    # What dataclasses and named tuples write for themselves is not ours to break.
    ours = {name: method for name, method in found.items() if function_of(method).__code__.co_filename.startswith(HOME)}
    return {name: ours[name] for name in sorted(ours) if name not in BOUNDARY}


HOME = str(Path(sonde.__file__).parent)
# Without them the norms are computed one by one, with the same answer.
SLOWER_WAY = {"statistics.statistics_without_extension._norm", "statistics.statistics_without_extension.norms"}
METHODS = (FunctionType, staticmethod, classmethod, property)


def function_of(method: Any) -> FunctionType:
    """The function that does the work: below properties and decorators."""
    return inspect.unwrap(method.fget if isinstance(method, property) else getattr(method, "__func__", method))


@cache
def reached() -> dict[str, dict[str, int]]:
    """How often each scene calls which inner function once everything is attached. Elsewhere an error could not be raised."""
    names = {function_of(method).__code__: name for name, method in inner_functions().items()}
    found: dict[str, dict[str, int]] = {}
    for scene, program in SCENES.items():
        num_calls: Counter[str] = Counter()

        def note(frame: Any, event: str, arg: Any, num_calls: Counter[str] = num_calls) -> None:
            if event == "call" and frame.f_code in names:
                num_calls[names[frame.f_code]] += 1

        with tempfile.TemporaryDirectory() as folder:
            try:
                program(Path(folder) / "run", lambda note=note: sys.setprofile(note))  # type: ignore[misc]
            finally:
                sys.setprofile(None)
        found[scene] = dict(num_calls)
    return found


@cache
def undisturbed_in(scene: str) -> Outcome:
    return SCENES[scene](None)


def _broken(*args: Any, **kwargs: Any) -> Any:
    raise _sonde_injected()  # type: ignore[name-defined]  # noqa: F821 - a builtin while somebody is sabotaged: it is run among their globals


@contextmanager
def sabotage(method: Any, errors: Iterator[type[Exception]], raised: list[type[Exception]]) -> Iterator[Callable[[], None]]:
    """Breaks a function itself, not its name: whoever holds it, by whatever name, wrapped or bound, has the broken one."""
    function = function_of(method)
    sound = function.__code__

    def injected() -> Exception:
        raised.append(next(errors))
        return raised[-1]("injected")

    def break_it() -> None:
        function.__code__ = _broken.__code__.replace(co_freevars=sound.co_freevars)

    builtins._sonde_injected = injected  # type: ignore[attr-defined]
    try:
        yield break_it
    finally:
        function.__code__ = sound
        del builtins._sonde_injected  # type: ignore[attr-defined]


def test_the_scenes_reach_most_of_capture_and_what_torch_calls() -> None:
    everywhere = set().union(*reached().values())
    assert len(everywhere) > 230
    for expected in (
        "capture.step_tracker.StepTracker._end_step", "statistics.reductions.check_finite",
        "capture.run_log_recorder.StepRecorder.end_step",
        "capture.probes.activations.ActivationProbe._measure", "capture.run_log_recorder.StepRecorder.flush",
        "capture.watched_models_registry.ModelRegistry.__iter__", "capture.find_models_in_script.ModelDiscovery._search",
        "statistics.statistics_without_extension.statistics",
    ):  # fmt: skip
        assert expected in everywhere


MODULES = sorted({function_of(method).__module__.removeprefix("sonde.") for method in inner_functions().values()})


@pytest.mark.parametrize("module", MODULES)
def test_r49_an_error_in_any_inner_function_leaves_the_training_as_it_is(
    module: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every function that a scene calls, in the first scene that does, with each kind of error."""
    caplog.set_level(logging.WARNING, "sonde")
    functions_before = patched_functions()
    number = itertools.count()
    for function, method in inner_functions().items():
        scene = next((scene for scene, called in reached().items() if function in called), None)
        if scene is None or not function.startswith(f"{module}."):
            continue
        # Called often, it raises all three in one go; else there is a run for each.
        for first in range(1 if reached()[scene][function] >= len(ERRORS) else len(ERRORS)):
            caplog.clear()
            raised: list[type[Exception]] = []
            run = tmp_path / str(next(number))
            with sabotage(method, itertools.cycle(ERRORS[first:] + ERRORS[:first]), raised) as break_it:
                outcome = SCENES[scene](run, break_it)
            assert outcome == undisturbed_in(scene), function
            assert raised, f"{function} was not called"
            assert patched_functions() == functions_before, function
            assert sonde.Run(run).damage == [], function
            if len(raised) > 3 * STEPS and function not in SLOWER_WAY:  # often enough to be noticed, so it must have been said
                said = caplog.records or [*sonde.Run(run).events("unobserved")]
                assert said, f"{function} failed {len(raised)} times in silence"


def test_r49_tensors_that_cannot_be_measured_are_said_and_not_taken_for_missing(tmp_path: Path) -> None:
    with sabotage(inner_functions()["statistics.statistics_without_extension.statistics"], itertools.cycle(ERRORS[:1]), []) as break_it:
        by_torch(tmp_path / "run", break_it)
    said = {event.data["probe"]: event.data["reason"] for event in sonde.Run(tmp_path / "run").events("unobserved")}
    assert {"activations", "parameters_and_gradients", "batch_contents"} <= set(said)
    assert "injected" in said["parameters_and_gradients"]
    assert "parameters_and_gradients" in {one.where for one in sonde.diagnose(tmp_path / "run").unobserved}


def test_r49_a_retired_probe_is_named_with_its_error_and_all_else_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("one probe is broken")

    from sonde.capture.probes.activations import ActivationProbe

    play(tmp_path / "run", lambda: monkeypatch.setattr(ActivationProbe, "_measure", broken))
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
    monkeypatch.setattr(reductions, "check_finite", broken)
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
        monkeypatch.setattr(reductions, "check_finite", interrupted)
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
        from sonde.statistics import native_extension
        from guarantees.test_errors_of_sonde_never_reach_the_training import play, undisturbed
        from training_harness import visible_to_modes
        assert not native_extension.ENABLED
        home = str(Path(sonde.__file__).parent)
        patches = {str(Path(home, "capture", name)) for name in ("torch_patches.py", "tensor_method_patch.py")}
        failed = 0
        REDUCERS = {"sum", "mul", "stack", "aminmax", "amin", "amax", "isfinite", "linalg_vector_norm", "clone", "sub"}

        class Full(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                global failed
                frame = sys._getframe(1)
                while frame is not None:
                    name = frame.f_code.co_filename
                    if name.startswith(home) and name not in patches:
                        if getattr(func, "__name__", "") in REDUCERS:
                            failed += 1
                            raise torch.OutOfMemoryError("injected")
                        break
                    frame = frame.f_back
                return func(*args, **(kwargs or {}))

        expected = undisturbed()
        with visible_to_modes(), Full():
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

    from sonde.capture.probes.activations import ActivationProbe

    outputs: list[weakref.ref[torch.Tensor]] = []

    def full(self: ActivationProbe, leaf: Any, tensor: torch.Tensor) -> None:
        outputs.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(ActivationProbe, "_measure", full)
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

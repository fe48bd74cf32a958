"""What stands in for a forward changes nothing: not the numbers, nor the fast path, nor the signature; its own failures stay its own."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde.profiler.autograd_node_timers import Nodes  # noqa: E402
from sonde.profiler.module_timers import Doors  # noqa: E402
from sonde.profiler.script_step_watcher import watch_steps  # noqa: E402
from sonde.profiler.time_trace import Tape  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def running(read: Callable[[], int] | None = None) -> Tape:
    tape = Tape(read) if read is not None else Tape()
    tape.start()
    return tape


def test_outputs_and_gradients_are_the_same_to_the_bit() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    expected = model(x)
    grads = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    tape = running()
    with Doors({"": model}, eager=False).open(tape, roots_alone=False):
        output = model(x)
    nodes = Nodes(tape)
    nodes.hook([output])
    tape.backward_begins()
    found = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    tape.backward_ended()
    assert torch.equal(output, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, grads))
    assert len(tape.calls) > 5
    assert len(tape.marks) > 10


def test_a_module_keeps_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    tape = running()
    with torch.no_grad(), Doors({"": layer}, eager=False).open(tape, roots_alone=False):
        layer(torch.randn(2, 5, 16))
    assert len(tape.calls) == 1  # the fused kernel calls no module inside


def test_who_asks_for_the_signature_gets_the_real_one() -> None:
    model = nn.Conv2d(1, 1, 1)
    expected = inspect.signature(model.forward)
    with Doors({"": model}, eager=False).open(running(), roots_alone=False):
        assert inspect.signature(model.forward) == expected


def test_a_module_that_is_pickled_meanwhile_comes_back_plain() -> None:
    model = nn.Linear(2, 2)
    with Doors({"": model}, eager=False).open(running(), roots_alone=False):
        back = pickle.loads(pickle.dumps(model))
    assert torch.equal(back(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_two_profiles_of_one_model_may_end_in_any_order() -> None:
    model = nn.Linear(2, 2)
    first, second = running(), running()
    one, two = Doors({"": model}, eager=False), Doors({"": model}, eager=False)
    one.put_in(first, roots_alone=False)
    two.put_in(second, roots_alone=False)
    model(torch.ones(1, 2))
    one.take_out()
    model(torch.ones(1, 2))
    two.take_out()
    assert (len(first.calls), len(second.calls)) == (1, 2)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("good_readings", [0, 1, 4])
def test_a_clock_that_fails_does_not_reach_the_model(good_readings: int) -> None:
    left = iter(range(good_readings))

    def read() -> int:
        for number in left:
            return number
        raise OSError("the clock is gone")

    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    expected = model(x)
    tape = running(read)
    with Doors({"": model}, eager=False).open(tape, roots_alone=False):
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
    assert tape.failure == "OSError: the clock is gone"


def test_the_users_own_error_passes_as_it_is() -> None:
    class Fails(nn.Module):
        def forward(self, x: Any) -> Any:
            raise KeyError("theirs")

    model = nn.Sequential(nn.Identity(), Fails())
    tape = running()
    with pytest.raises(KeyError, match="theirs"), Doors({"": model}, eager=False).open(tape, roots_alone=False):
        model(torch.ones(1))
    assert tape.is_outside
    assert tape.failure == ""


def test_another_thread_is_not_recorded() -> None:
    import threading

    model, tape = nn.Linear(2, 2), running()
    with Doors({"": model}, eager=False).open(tape, roots_alone=False):
        thread = threading.Thread(target=model, args=(torch.ones(1, 2),))
        thread.start()
        thread.join()
    assert tape.calls == []


# ---- what is compiled


def test_a_compiled_model_is_profiled_uncompiled_and_says_so() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    report = sonde.Profiler().profile(model, torch.randn(2, 4), warmup=1, repeats=1)
    assert [layer.path for layer in report.layers] == ["", "0", "1"]
    assert any("uncompiled" in note for note in report.notes)


def test_a_compiled_model_in_a_script_is_timed_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with watch_steps(num_steps=2, warmup=1) as watcher:
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            compiled(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    report = watcher.report()
    assert [layer.path for layer in report.layers] == [""]
    assert report.layers[0].backward.median_ms > 0
    assert any("compiled parts are timed as a whole" in note for note in report.notes)
    assert report.num_samples == 2


@pytest.mark.needs_bfloat16("linear")
def test_autocast_is_named_and_its_dtype_is_the_one_of_the_peak() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    with torch.autocast("cpu", torch.bfloat16):
        report = sonde.Profiler().profile(Cast(), torch.randn(2, 4), warmup=1, repeats=1)
    assert report.environment["dtype"] == "float32 with autocast to bfloat16"

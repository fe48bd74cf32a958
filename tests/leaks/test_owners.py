"""Who keeps a tensor alive, in words; and asking leaves no trace."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from sonde.leaks.owners import holders  # noqa: E402

pytestmark = pytest.mark.torch

CACHE: list = []


class Slotted:
    __slots__ = ("value",)


class Trainer:
    seen: list = []  # noqa: RUF012

    def __init__(self) -> None:
        self.history: list = []
        self.config: dict = {"a": {}}
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())


def held_by(hold) -> list[str]:
    """The chains of a tensor that nothing holds but what `hold` has done with it."""
    CACHE.clear()
    Trainer.seen.clear()
    tensor = torch.zeros(3)
    hold(tensor)
    alive = weakref.ref(tensor)
    del tensor
    return [str(chain) for chain in holders(alive(), name="loss")]


def hook_with(tensor):
    kept = [tensor]

    def remember(module, args, output):
        kept.append(output)

    return remember


@pytest.mark.usefixtures("unfrozen")
def test_a_list_of_a_global_variable():
    assert held_by(lambda tensor: CACHE.append((1, tensor))) == [f"{__name__} global 'CACHE' -> list[0] -> tuple[1] -> loss"]


def test_an_attribute_of_an_object_in_a_local_variable():
    trainer = Trainer()
    name = "test_an_attribute_of_an_object_in_a_local_variable() local"
    assert held_by(trainer.history.append)[0] == f"{name} 'trainer.history' -> list[0] -> loss"
    assert held_by(lambda tensor: setattr(trainer, "last", tensor))[0] == f"{name} 'trainer.last' -> loss"
    trainer.config["a"]["x"] = None
    assert held_by(lambda tensor: trainer.config["a"].update(x=tensor))[0] == f"{name} 'trainer.config' -> dict['a'] -> dict['x'] -> loss"


def test_a_buffer_is_an_attribute_of_its_module():
    trainer = Trainer()
    (first, *_) = held_by(lambda tensor: trainer.model[0].register_buffer("kept", tensor))
    assert first.endswith("local 'trainer.model.0.kept' -> loss")


@pytest.mark.usefixtures("unfrozen")
def test_a_class_attribute():
    assert held_by(lambda tensor: Trainer.seen.append(tensor)) == ["class Trainer attribute 'seen' -> list[0] -> loss"]


def test_slots_sets_and_bounded_containers():
    slotted = Slotted()
    assert held_by(lambda tensor: setattr(slotted, "value", tensor))[0].endswith("local 'slotted.value' -> loss")
    things = set()
    assert held_by(things.add)[0].endswith("local 'things' -> set -> loss")
    recent = deque(maxlen=3)
    assert held_by(recent.append)[0].endswith("local 'recent' -> deque[0] -> loss")
    alive = weakref.ref(recent[0])
    assert holders(alive())[0].is_bounded


def test_the_closure_of_a_forward_hook():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    (first, *_) = held_by(lambda tensor: model[1].register_forward_hook(hook_with(tensor)) and None)
    assert first.endswith("local 'model.1' -> forward hook -> remember() closure 'kept' -> list[0] -> loss")


@pytest.mark.usefixtures("unfrozen")
def test_a_partial_and_a_default_argument():
    (first, *_) = held_by(lambda tensor: CACHE.append(functools.partial(print, tensor)))
    assert first.endswith("list[0] -> partial(print) -> tuple[0] -> loss")
    (first, *_) = held_by(lambda tensor: CACHE.append(lambda x=tensor: x))
    assert first.endswith("list[0] -> <lambda> default arguments -> tuple[0] -> loss")


def test_a_local_variable_of_a_caller():
    def train():
        loss = torch.zeros(3)
        return holders(loss, name="loss")

    assert str(train()[0]) == "train() local 'loss' -> loss"


def test_a_variable_of_another_thread():
    ready, done = threading.Event(), threading.Event()
    seen = []

    def work():
        batch = torch.zeros(3)
        seen.append(weakref.ref(batch))
        ready.set()
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        assert str(holders(seen[0](), name="x")[0]) == "work() local 'batch' -> x"
    finally:
        done.set()
        thread.join()


def test_a_suspended_generator():
    def batches():
        batch = torch.zeros(3)
        yield weakref.ref(batch)

    generator = batches()
    alive = next(generator)
    assert [str(chain) for chain in holders(alive(), name="x")] == ["generator batches() local 'batch' -> x"]


def test_an_exception_that_is_kept_holds_the_variables_of_its_frames():
    def fail():
        batch = torch.zeros(3)
        raise ValueError(weakref.ref(batch))

    kept = None
    try:
        fail()
    except ValueError as error:
        kept = error
    (first, *_) = (str(chain) for chain in holders(kept.args[0](), name="x"))
    assert first.endswith("local 'kept' -> ValueError -> traceback -> frame of fail() local 'batch' -> x")


def test_a_graph_names_the_variable_that_holds_its_root():
    def evaluate():
        model = nn.Linear(8, 1)
        total = torch.zeros(())
        inputs = []
        for _ in range(3):
            x = torch.zeros(4, 8)
            inputs.append(weakref.ref(x))
            total = total + model(x).mean()
        del x
        return [str(chain) for chain in holders(inputs[1](), name="x")]

    assert evaluate() == ["evaluate() local 'total' -> AddBackward0 graph -> x"]


def test_what_nothing_holds_has_no_chain():
    found = holders(torch.zeros(1))  # in an assert, pytest would hold it
    assert found == []


def test_optimizer_state_is_found_through_the_optimizer():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    alive = weakref.ref(optimizer.state[model.weight]["momentum_buffer"])
    (first, *_) = (str(chain) for chain in holders(alive(), name="momentum"))
    assert first.endswith("local 'optimizer.state' -> dict[Parameter] -> dict['momentum_buffer'] -> momentum")


def test_asking_keeps_nothing_alive_also_in_functions_that_are_still_running():
    tensor = torch.zeros(3)
    other = torch.ones(3)
    alive = [weakref.ref(tensor), weakref.ref(other)]
    holders(tensor)
    del tensor, other
    assert [ref() for ref in alive] == [None, None]


def test_a_copy_of_the_variables_that_the_user_holds_is_left_alone():
    tensor = torch.zeros(3)
    arguments = locals()
    holders(tensor)
    assert arguments["tensor"] is tensor


def test_no_code_of_the_user_runs():
    class Touchy:
        def __init__(self, kept):
            self.kept = kept

        def __getattribute__(self, name):
            raise AssertionError("touched")

        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = None

    touchy = [Touchy(None)]
    alive = []

    def hold():
        tensor = torch.zeros(3)
        object.__setattr__(touchy[0], "kept", tensor)
        alive.append(weakref.ref(tensor))

    hold()
    assert str(holders(alive[0](), name="x")[0]).endswith("-> list[0] -> Touchy.kept -> x")

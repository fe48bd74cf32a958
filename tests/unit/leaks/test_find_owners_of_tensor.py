"""`find_owners` names the references that keep a tensor alive, and keeps nothing alive itself."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from sonde.leaks.find_owners_of_tensor import find_owners  # noqa: E402

pytestmark = pytest.mark.torch

CACHE: list = []


class Slotted:
    __slots__ = ("value",)


class Trainer:
    collected: list = []  # noqa: RUF012

    def __init__(self) -> None:
        self.history: list = []
        self.config: dict = {"a": {}}
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())


def chains_after(hold) -> list[str]:
    """The chains of a tensor that only `hold` stored somewhere."""
    CACHE.clear()
    Trainer.collected.clear()
    tensor = torch.zeros(3)
    hold(tensor)
    alive = weakref.ref(tensor)
    del tensor
    return [str(chain) for chain in find_owners(alive(), name="loss")]


def hook_with(tensor):
    outputs = [tensor]

    def remember(module, args, output):
        outputs.append(output)

    return remember


@pytest.mark.usefixtures("unfrozen")
def test_a_list_in_a_global_variable_is_named():
    assert chains_after(lambda tensor: CACHE.append((1, tensor))) == [f"{__name__} global 'CACHE' -> list[0] -> tuple[1] -> loss"]


def test_an_attribute_of_an_object_in_a_local_variable_is_named():
    trainer = Trainer()
    name = "test_an_attribute_of_an_object_in_a_local_variable_is_named() local"
    assert chains_after(trainer.history.append)[0] == f"{name} 'trainer.history' -> list[0] -> loss"
    assert chains_after(lambda tensor: setattr(trainer, "last", tensor))[0] == f"{name} 'trainer.last' -> loss"
    trainer.config["a"]["x"] = None
    (first, *_) = chains_after(lambda tensor: trainer.config["a"].update(x=tensor))
    assert first == f"{name} 'trainer.config' -> dict['a'] -> dict['x'] -> loss"


def test_a_buffer_is_an_attribute_of_its_module():
    trainer = Trainer()
    (first, *_) = chains_after(lambda tensor: trainer.model[0].register_buffer("stored", tensor))
    assert first.endswith("local 'trainer.model.0.stored' -> loss")


@pytest.mark.usefixtures("unfrozen")
def test_a_class_attribute_is_named():
    assert chains_after(lambda tensor: Trainer.collected.append(tensor)) == ["class Trainer attribute 'collected' -> list[0] -> loss"]


def test_slots_sets_and_bounded_containers_are_named():
    slotted = Slotted()
    assert chains_after(lambda tensor: setattr(slotted, "value", tensor))[0].endswith("local 'slotted.value' -> loss")
    things = set()
    assert chains_after(things.add)[0].endswith("local 'things' -> set -> loss")
    recent = deque(maxlen=3)
    assert chains_after(recent.append)[0].endswith("local 'recent' -> deque[0] -> loss")
    alive = weakref.ref(recent[0])
    assert find_owners(alive())[0].is_bounded


def test_the_closure_of_a_forward_hook_is_named():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    (first, *_) = chains_after(lambda tensor: model[1].register_forward_hook(hook_with(tensor)) and None)
    assert first.endswith("local 'model.1' -> forward hook -> remember() closure 'outputs' -> list[0] -> loss")


@pytest.mark.usefixtures("unfrozen")
def test_a_partial_and_a_default_argument_are_named():
    (first, *_) = chains_after(lambda tensor: CACHE.append(functools.partial(print, tensor)))
    assert first.endswith("list[0] -> partial(print) -> tuple[0] -> loss")
    (first, *_) = chains_after(lambda tensor: CACHE.append(lambda x=tensor: x))
    assert first.endswith("list[0] -> <lambda> default arguments -> tuple[0] -> loss")


def test_a_local_variable_of_a_caller_is_named():
    def train():
        loss = torch.zeros(3)
        return find_owners(loss, name="loss")

    assert str(train()[0]) == "train() local 'loss' -> loss"


def test_a_variable_of_another_thread_is_named():
    ready, done = threading.Event(), threading.Event()
    refs = []

    def work():
        batch = torch.zeros(3)
        refs.append(weakref.ref(batch))
        ready.set()
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        assert str(find_owners(refs[0](), name="x")[0]) == "work() local 'batch' -> x"
    finally:
        done.set()
        thread.join()


def test_a_variable_of_a_suspended_generator_is_named():
    def batches():
        batch = torch.zeros(3)
        yield weakref.ref(batch)

    generator = batches()
    alive = next(generator)
    assert [str(chain) for chain in find_owners(alive(), name="x")] == ["generator batches() local 'batch' -> x"]


def test_a_stored_exception_holds_the_variables_of_its_frames():
    def fail():
        batch = torch.zeros(3)
        raise ValueError(weakref.ref(batch))

    stored = None
    try:
        fail()
    except ValueError as error:
        stored = error
    (first, *_) = (str(chain) for chain in find_owners(stored.args[0](), name="x"))
    assert first.endswith("local 'stored' -> ValueError -> traceback -> frame of fail() local 'batch' -> x")


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
        return [str(chain) for chain in find_owners(inputs[1](), name="x")]

    assert evaluate() == ["evaluate() local 'total' -> AddBackward0 graph -> x"]


def test_a_tensor_without_an_owner_has_no_chain():
    found = find_owners(torch.zeros(1))  # in an assert, pytest would hold it
    assert found == []


def test_optimizer_state_is_found_through_the_optimizer():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    alive = weakref.ref(optimizer.state[model.weight]["momentum_buffer"])
    (first, *_) = (str(chain) for chain in find_owners(alive(), name="momentum"))
    assert first.endswith("local 'optimizer.state' -> dict[Parameter] -> dict['momentum_buffer'] -> momentum")


def test_the_search_keeps_no_variable_of_a_running_function_alive():
    tensor = torch.zeros(3)
    other = torch.ones(3)
    alive = [weakref.ref(tensor), weakref.ref(other)]
    find_owners(tensor)
    del tensor, other
    assert [ref() for ref in alive] == [None, None]


def test_the_result_of_locals_that_the_user_holds_is_not_emptied():
    tensor = torch.zeros(3)
    arguments = locals()
    find_owners(tensor)
    assert arguments["tensor"] is tensor


def test_the_search_runs_no_code_of_the_user():
    class RaisesOnAccess:
        def __init__(self, value):
            self.value = value

        def __getattribute__(self, name):
            raise AssertionError("attribute was read")

        def __eq__(self, other):
            raise AssertionError("object was compared")

        __hash__ = None

    objects = [RaisesOnAccess(None)]
    alive = []

    def hold():
        tensor = torch.zeros(3)
        object.__setattr__(objects[0], "value", tensor)
        alive.append(weakref.ref(tensor))

    hold()
    assert str(find_owners(alive[0](), name="x")[0]).endswith("-> list[0] -> RaisesOnAccess.value -> x")

"""The slicer selects the statements that compute a value, and leaves out those that must not run twice."""

import sys

import pytest

from sonde.errors import CannotReplay
from sonde.replay.statements_that_compute_loss import slices_up_to_backward
from sonde.replay.statements_that_compute_value import ValueQueries


class Computed:
    """Replaces a tensor that depends on a model: it must be recomputed."""

    grad_fn = object()

    def __init__(self, text):
        self.text = text

    def __add__(self, other):
        return Computed(f"({self.text}+{getattr(other, 'text', other)})")

    __radd__ = __add__

    def backward(self):
        frame = sys._getframe(1)
        SLICES.append(slices_up_to_backward(frame, "loss", QUERIES))


class Model:
    def __init__(self):
        self.inputs = []

    def __call__(self, *args):
        self.inputs.append(args)
        return Computed(f"model({','.join(str(getattr(x, 'text', x)) for x in args)})")


SLICES = []
QUERIES = ValueQueries(
    must_be_recomputed=lambda value: (
        isinstance(value, Computed) or (isinstance(value, list) and any(isinstance(item, Computed) for item in value))
    ),
    has_recorded_inputs=lambda value: isinstance(value, Model),
)


def replayed(train, *args):
    """The text of the recomputed value on which `.backward()` is called, and the slices that computed it."""
    SLICES.clear()
    train(*args)
    slices = SLICES[-1]
    result = None
    for part in slices:
        variables = {**part.variables, **dict(zip(part.parameters, result))} if part.parameters else part.variables
        result = part.slice.run(variables, _sonde_call=lambda model: model(*model.inputs[-1]))
    return result.text, slices


def test_the_model_and_the_loss_run_again_and_the_batch_is_read_from_its_variable():
    def train(model):
        x = 3
        out = model(x)
        history = []
        history.append("a line that nobody needs")
        loss = out + 1
        loss.backward()

    text, slices = replayed(train, Model())
    assert text == "(model(3)+1)"
    assert "x" in slices[0].slice.inputs
    assert len(slices[0].slice.lines) == 3


def test_a_variable_that_was_assigned_several_times_is_recomputed_from_the_first():
    def train(model):
        x = model(1)
        x = x + 2
        x = x + 3
        x.backward()

    assert replayed(train, Model())[0] == "((model(1)+2)+3)"


def test_an_input_that_was_overwritten_is_taken_from_the_recorded_call():
    def train(model):
        for h in [5]:
            h = model(h)
            (h + 1).backward()

    assert replayed(train, Model())[0] == "(model(5)+1)"


def test_a_sum_over_a_loop_runs_as_a_whole():
    def train(model):
        total = 0
        for i in range(3):
            total = total + model(i)
        total.backward()

    assert replayed(train, Model())[0] == "(((model(0)+0)+model(1))+model(2))"


def test_a_list_that_the_step_creates_is_filled_again():
    def train(model):
        parts = []
        for i in range(2):
            parts.append(model(i))
        loss = parts[0] + parts[1]
        loss.backward()

    assert replayed(train, Model())[0] == "(model(0)+model(1))"


def test_an_attribute_is_not_assigned():
    class Trainer:
        def step(self, model):
            self.loss = model(1)
            self.loss = self.loss + 1
            self.loss.backward()

    trainer = Trainer()
    text, _ = replayed(trainer.step, Model())
    assert text == "(model(1)+1)"
    before = trainer.loss
    SLICES[-1][0].slice.run(SLICES[-1][0].variables)
    assert trainer.loss is before


def test_a_statement_that_takes_the_next_item_of_an_iterator_is_not_run_again():
    def train(model):
        items = iter([Computed("a"), Computed("b")])
        x = next(items)
        loss = model(x)
        loss.backward()
        assert next(items).text == "b"

    text, slices = replayed(train, Model())
    assert text == "model(a)"
    assert any("next()" in note for note in slices[0].slice.notes)


def test_a_helper_that_mutates_its_argument_is_run_again():
    """In a copy of the process, where that does no harm."""
    log = []

    def compute(model, log):
        out = model(1)
        log.append(out)
        return out

    def train(model):
        out = compute(model, log)
        loss = out + 1
        loss.backward()

    text, slices = replayed(train, Model())
    assert text == "(model(1)+1)"
    assert len(log) == 2
    assert not slices[0].slice.notes


def test_the_caller_is_sliced_too_if_the_loss_is_an_argument():
    def finish(loss, scale):
        (loss + scale).backward()

    def train(model):
        out = model(2)
        finish(out, 7)

    text, slices = replayed(train, Model())
    assert text == "(model(2)+7)"
    assert len(slices) == 2


def test_a_branch_runs_again_with_its_condition():
    def train(model, wide):
        if wide:
            out = model(1, 2)
        else:
            out = model(1)
        out.backward()

    assert replayed(train, Model(), True)[0] == "model(1,2)"
    assert replayed(train, Model(), False)[0] == "model(1)"


def test_two_statements_on_one_line_are_distinguished():
    def train(model):
        out = model(1); out.backward(); out = None  # fmt: skip  # noqa: E702

    assert replayed(train, Model())[0] == "model(1)"


def test_a_library_that_runs_the_training_is_the_reason():
    with pytest.raises(CannotReplay, match="a library runs the training"):
        slices_up_to_backward(None, "loss", QUERIES)


class Trainer:
    """Keeps its output and its loss."""

    def __init__(self, model):
        self.model, self.num_calls, self.loss = model, 0, None

    def forward(self, x):
        self.num_calls += 1
        self.out = self.model(x)

    def compute_loss(self):
        self.loss = self.out + 1

    def step(self, x):
        self.out = self.model(x)
        self.loss = self.out + 1
        self.loss.backward()


def test_a_loss_that_methods_of_an_object_compute_is_computed_again():
    def train(model):
        trainer = Trainer(model)
        trainer.forward(3)
        trainer.compute_loss()
        trainer.loss.backward()

    model = Model()
    text, _ = replayed(train, model)
    assert text == "(model(3)+1)"
    assert len(model.inputs) == 2


def test_a_loss_that_is_an_attribute_is_computed_again_although_the_object_has_changed():
    model = Model()
    text, _ = replayed(Trainer(model).step, 3)
    assert text == "(model(3)+1)"
    assert len(model.inputs) == 2

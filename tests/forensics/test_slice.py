"""Which statements of a function are run again to make a value again, and which are not."""

import sys

import pytest

from sonde.replay.backward_call_site import parts_of
from sonde.replay.program_slice import CannotReplay, Reader


class Made:
    """Stands for a tensor that came out of a model: it must be made again."""

    grad_fn = object()

    def __init__(self, text):
        self.text = text

    def __add__(self, other):
        return Made(f"({self.text}+{getattr(other, 'text', other)})")

    __radd__ = __add__

    def backward(self):
        frame = sys._getframe(1)
        SEEN.append(parts_of(frame, "loss", READER))


class Model:
    def __init__(self):
        self.inputs = []

    def __call__(self, *given):
        self.inputs.append(given)
        return Made(f"model({','.join(str(getattr(x, 'text', x)) for x in given)})")


SEEN = []
READER = Reader(
    must_be_made=lambda value: isinstance(value, Made) or (isinstance(value, list) and any(isinstance(item, Made) for item in value)),
    harmless=lambda value: isinstance(value, Model),
    was_called=lambda value: isinstance(value, Model),
)


def replayed(train, *args):
    """What the expression before `.backward()` is when it is made again, and the parts that made it."""
    SEEN.clear()
    train(*args)
    parts = SEEN[-1]
    made = None
    for part in parts:
        names = {**part.names, **dict(zip(part.binds, made))} if part.binds else part.names
        made = part.slice.run(names, _sonde_call=lambda model: model(*model.inputs[-1]))
    return made.text, parts


def test_the_model_and_the_loss_are_run_again_and_the_batch_is_taken_as_it_is():
    def train(model):
        x = 3
        out = model(x)
        history = []
        history.append("a line that nobody needs")
        loss = out + 1
        loss.backward()

    text, parts = replayed(train, Model())
    assert text == "(model(3)+1)"
    assert "x" in parts[0].slice.given
    assert len(parts[0].slice.lines) == 3


def test_a_variable_that_was_assigned_again_is_followed_back():
    def train(model):
        x = model(1)
        x = x + 2
        x = x + 3
        x.backward()

    assert replayed(train, Model())[0] == "((model(1)+2)+3)"


def test_an_input_that_is_gone_is_taken_from_what_the_model_was_called_with():
    def train(model):
        for h in [5]:
            h = model(h)
            (h + 1).backward()

    assert replayed(train, Model())[0] == "(model(5)+1)"


def test_a_sum_over_a_loop_is_run_as_a_whole():
    def train(model):
        total = 0
        for i in range(3):
            total = total + model(i)
        total.backward()

    assert replayed(train, Model())[0] == "(((model(0)+0)+model(1))+model(2))"


def test_a_list_that_the_step_itself_makes_may_be_filled_again():
    def train(model):
        parts = []
        for i in range(2):
            parts.append(model(i))
        loss = parts[0] + parts[1]
        loss.backward()

    assert replayed(train, Model())[0] == "(model(0)+model(1))"


def test_an_attribute_is_not_written_to():
    class Trainer:
        def step(self, model):
            self.loss = model(1)
            self.loss = self.loss + 1
            self.loss.backward()

    trainer = Trainer()
    text, _ = replayed(trainer.step, Model())
    assert text == "(model(1)+1)"
    before = trainer.loss
    SEEN[-1][0].slice.run(SEEN[-1][0].names)
    assert trainer.loss is before


def test_what_takes_the_next_item_of_an_iterator_is_not_run_again():
    def train(model):
        items = iter([Made("a"), Made("b")])
        x = next(items)
        loss = model(x)
        loss.backward()
        assert next(items).text == "b"

    text, parts = replayed(train, Model())
    assert text == "model(a)"
    assert any("next()" in note for note in parts[0].slice.notes)


def test_a_helper_that_changes_what_it_was_given_is_not_run_again():
    log = []

    def compute(model, log):
        out = model(1)
        log.append(out)
        return out

    def train(model):
        out = compute(model, log)
        loss = out + 1
        loss.backward()

    text, parts = replayed(train, Model())
    assert text == "(model(1)+1)"
    assert len(log) == 1
    assert any("changes log" in note for note in parts[0].slice.notes)


def test_the_caller_is_a_part_of_it_where_the_loss_comes_in_as_an_argument():
    def finish(loss, scale):
        (loss + scale).backward()

    def train(model):
        out = model(2)
        finish(out, 7)

    text, parts = replayed(train, Model())
    assert text == "(model(2)+7)"
    assert len(parts) == 2


def test_a_branch_is_run_again_with_its_condition():
    def train(model, wide):
        if wide:
            out = model(1, 2)
        else:
            out = model(1)
        out.backward()

    assert replayed(train, Model(), True)[0] == "model(1,2)"
    assert replayed(train, Model(), False)[0] == "model(1)"


def test_two_statements_on_one_line_are_told_apart():
    def train(model):
        out = model(1); out.backward(); out = None  # fmt: skip  # noqa: E702

    assert replayed(train, Model())[0] == "model(1)"


def test_a_library_that_trains_is_said_to():
    with pytest.raises(CannotReplay, match="a library runs the training"):
        parts_of(None, "loss", READER)

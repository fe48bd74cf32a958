"""The rule about fatal signals: its three answers, and what it advises."""

from __future__ import annotations

import pytest

from sonde.events import Event, Severity, Step
from sonde.rules.crash.fatal_signal import RULE as fatal_signal
from sonde.rules.rule import Clear, NotEvaluated
from synthetic_steps import ask

DEATH = {
    "signal": "SIGILL", "meaning": "illegal instruction", "source": "train.py:19", "function": "main",
    "inside": "torch/nn/modules/linear.py", "inside_line": 125, "inside_function": "forward",
}  # fmt: skip


def answer(*events, num_steps=3):
    at = {number: tuple(event for event in events if event.step == number) for number in range(num_steps)}
    steps = [Step(number, 0, {"loss": 1.0}, {}, here, {}) for number, here in at.items()]
    rest = tuple(event for event in events if event.step >= num_steps)
    return ask(fatal_signal, [*steps, Step(num_steps, 0, {}, {}, rest, {})] if rest else steps)


def test_an_illegal_instruction_inside_of_torch_is_named_with_line_and_limit():
    (finding,) = answer(Event("source", 0, {"line": "train.py:19", "text": "out = model(x)"}), Event("fatal_signal", 3, DEATH))
    assert (finding.severity, finding.step) == (Severity.CRITICAL, 3)
    assert finding.cause == (
        "the process was killed by SIGILL (illegal instruction) at train.py:19, inside of torch, in step 3; it raised no exception"
    )
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in finding.fix
    assert finding.evidence["source_text"] == "out = model(x)"
    assert finding.evidence["inside"] == "torch/nn/modules/linear.py:125 in forward"


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"inside": ""}, "ONEDNN_MAX_CPU_ISA"),
        ({"inside": "flash_attn/ops.py"}, "built for another processor"),
        ({"signal": "SIGSEGV"}, "memory that is not its own"),
        ({"signal": "SIGBUS"}, "/dev/shm"),
        ({"signal": "SIGFPE"}, "by zero"),
        ({"signal": "SIGABRT"}, "stderr"),
    ],
    ids=["SIGILL on the user's line", "SIGILL elsewhere", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT"],
)
def test_the_advice_fits_the_signal(change, advice):
    (finding,) = answer(Event("fatal_signal", 3, DEATH | change))
    assert advice in finding.fix


def test_an_event_with_values_of_the_wrong_type_is_not_read():
    assert answer(Event("fatal_signal", 3, {"signal": 4, "inside": [], "source": None})) == Clear()


@pytest.mark.parametrize("data", [{}, {"signal": "x" * 9999}], ids=["empty", "long"])
def test_a_damaged_event_does_no_harm(data):
    (finding,) = answer(Event("fatal_signal", 3, data))
    assert finding.cause.startswith("the process was killed by ")
    assert len(finding.cause) < 1000


def test_a_training_that_lives_is_clear_and_none_is_not_evaluated():
    assert answer() == Clear()
    assert isinstance(answer(num_steps=0), NotEvaluated)

"""The training ended because there was no memory left.

What it finds    an error that says so: torch.OutOfMemoryError, MemoryError, or torch's "can't allocate memory".
Why it matters   the run has ended, and the error names neither what had filled the memory nor a remedy.
How it knows     from the error and its traceback (what was requested, in which module and line), the sizes of models and optimizers, and,
                 if the model can be run with fake tensors, the batch that would have fitted.
Known problems   a process that the system kills (exit code 137) writes nothing: memory-growth may give the reason. The batch that would fit
                 is an estimate.
Fix              a smaller batch with accumulated gradients, activation checkpointing, or an optimizer with less state.
"""

from sonde.events import Finding, MemoryExhausted, Severity
from sonde.formatting import layer_name, size
from sonde.rules.rule import Clear, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.source_lines_of_calls import source_evidence

PHASES = {
    "forward": "in the forward", "backward": "in the backward", "optimizer": "in the optimizer's step", "data": "while data were loaded",
}  # fmt: skip


def check(view: RunView) -> Result:
    event = next(iter(view.events(MemoryExhausted)), None)
    if event is None:
        return Clear()
    sizes = {"requested": event.requested, "in_use": event.in_use, "limit": event.limit, **_parts(event)}
    counts = {"batch_size": event.batch_size, "batch_that_fits": event.batch_fits}
    evidence: dict[str, float | str] = {
        **{name: size(num_bytes) for name, num_bytes in sizes.items() if num_bytes},
        **source_evidence(event.source, event.text),
        **{f"operand {number}": operand for number, operand in enumerate(event.operands, 1)},
        **{name: float(count) for name, count in counts.items() if count},
    }
    return [Finding(RULE.name, Severity.CRITICAL, event.module, event.step, _cause(event), _fix(event), evidence)]


def _parts(event: MemoryExhausted) -> dict[str, int]:
    """What filled the memory, in bytes."""
    parts = {
        "parameters": event.parameters,
        "gradients": event.gradients,
        "optimizer state": event.optimizer_state,
        "activations and everything else": event.rest,
    }
    return {name: num_bytes for name, num_bytes in parts.items() if num_bytes}


def _cause(event: MemoryExhausted) -> str:
    name, of_type = layer_name(event.module, event.module_type), f" ({event.module_type})" if event.module_type else ""
    module = f" of {name}{of_type if name == event.module else ''}" if event.module else ""
    where = f"{' ' if event.phase in PHASES else ''}{PHASES.get(event.phase, '')}{module}{f' at {event.source}' if event.source else ''}"
    shape = f" for {event.shape}" if event.shape else ""
    asked = f"{size(event.requested)}{shape} more were asked for" if event.requested else "more was asked for"
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in _parts(event).items())
    filled = f" while {size(event.in_use)} were in use ({parts})" if event.in_use else ""
    limit = f", of the {size(event.limit)} that {event.limit_by} gives" if event.limit else ""
    return f"memory ran out{where}: {asked}{filled}{limit}"


def _fix(event: MemoryExhausted) -> str:
    if event.limit and event.requested and event.requested > event.limit:
        shapes = f" ({', '.join(event.operands)}): shapes that differ are broadcast" if event.operands else ""
        return f"this one tensor is larger than all of the memory: check the shapes on that line{shapes}"
    if event.phase == "data":
        return "read the data in pieces: a memory map, an IterableDataset, or one file per sample"
    if event.phase == "optimizer":
        return "use an optimizer with less state (SGD with momentum keeps half of Adam's, Adafactor next to none), or foreach=False"
    if event.batch_fits and event.batch_size:
        return (
            f"use a batch of at most about {event.batch_fits} instead of {event.batch_size}, with accumulated gradients if the result must "
            "be the same; or compute activations again in backward (torch.utils.checkpoint)"
        )
    if event.batch_fits == 0:
        return "not even a batch of 1 has room: checkpoint the activations (torch.utils.checkpoint), or make the model smaller"
    return "use a smaller batch, or compute activations again in backward (torch.utils.checkpoint); sonde memory shows what is needed"


RULE = Rule("out-of-memory", check, page=__doc__)

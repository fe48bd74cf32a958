"""From what was recorded to a report: figures of steps become spreads, layers get their names, what could not be told is said."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from sonde.profiler import LayerCost, ProfileReport, Spread
from sonde.profiler.layer_costs import Cost, Figures
from sonde.profiler.module_timers import Doors, Layer
from sonde.profiler.peak_flops import peak_flops_per_s
from sonde.profiler.profile_report import DISTURBED, PHASES, UNKNOWN
from sonde.profiler.samples_per_step import seen_in
from sonde.profiler.step_recording import Recorded
from sonde.profiler.timer_cost_correction import corrected
from sonde.profiler.undisturbed_steps import least_disturbed
from sonde.rules.words import number

_NOTHING = Cost()


def assemble(
    recorded: Recorded, doors: Doors, *, title: str, dtype: torch.dtype, device: torch.device, notes: Sequence[str] = ()
) -> ProfileReport:
    recorded = least_disturbed(recorded)
    timed = corrected(recorded)
    flops = recorded.flops or Figures()
    seen = seen_in(recorded.batches.values(), recorded.num_fetched)
    order = dict.fromkeys(layer for step in timed for layer in step.layers)
    backward = any(step.backward for step in timed)
    report = ProfileReport(
        title=title,
        layers=tuple(
            _layer(doors.layers[layer], layer, recorded, timed, with_backward=backward) for layer in _outer_first(order, doors.layers)
        ),
        step=Spread.of([step["step"] for step in recorded.bare]),
        phases=_phases(recorded.bare),
        remainder=_remainder(recorded, timed),
        num_samples=seen.num_samples,
        num_tokens=seen.num_tokens,
        flops_per_step=sum(cost.forward_self + cost.backward_self for cost in flops.layers.values()) + flops.loss_backward,
        peak_flops_per_s=peak_flops_per_s(recorded.autocast or dtype, device),
        utilisation=recorded.utilisation.result(),
        batch=seen.text,
        environment=environment(dtype, device, recorded.autocast),
        notes=(*notes, *_notes(recorded, doors, device)),
        own_cost=_own_cost(recorded),
        spans=tuple(sorted(recorded.spans, key=lambda span: (span.step, span.start_ms, -span.duration_ms))),
    )
    return replace(report, notes=(*report.notes, *_disturbed(report)))


def _disturbed(report: ProfileReport) -> Iterator[str]:
    """A step is long when anything in it was disturbed, a layer when it was itself: on a busy machine the two no longer agree."""
    share = report.accounted_ms / report.step.median_ms if report.step.median_ms > 0 else 1.0
    if not 1 / DISTURBED < share < DISTURBED:
        busy = report.utilisation.get("busy_cores", float("nan"))
        yield (
            f"layers and remainder add up to {100 * share:.0f} % of the step: other programs disturbed it (this one kept "
            f"{number(float(busy))} cores busy). Profile again when the machine is quieter, or with more repeats"
        )


def environment(dtype: torch.dtype, device: torch.device, autocast: torch.dtype | None) -> dict[str, str]:
    computes = str(dtype) if autocast is None else f"{dtype} with autocast to {autocast}"
    return {
        "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(), "system": platform.system(),
        "device": str(device), "dtype": computes.replace("torch.", ""), "threads": str(torch.get_num_threads()),
    }  # fmt: skip


def _outer_first(called: dict[int, None], layers: Sequence[Layer]) -> list[int]:
    """In the order of first calls, but each under the module that its path puts it in: so that a tree can be drawn line by line."""
    inside: dict[str, list[int]] = {}
    paths = {layers[each].path for each in called}
    for each in called:
        path = layers[each].path
        above = path
        while above:
            above = above.rpartition(".")[0]
            if above in paths and above != path:
                break
        inside.setdefault(above if above != path and above in paths else "\0", []).append(each)

    def walk(above: str) -> Iterator[int]:
        for each in inside.get(above, ()):
            yield each
            yield from walk(layers[each].path)

    return list(walk("\0"))


def _layer(layer: Layer, index: int, recorded: Recorded, timed: Sequence[Figures], *, with_backward: bool) -> LayerCost:
    steps = [step.layers.get(index, _NOTHING) for step in timed]

    def spread(value: Callable[[Cost], int], known: bool = True) -> Spread:
        return Spread.of([value(step) / 1e6 for step in steps]) if known else UNKNOWN

    flops = (recorded.flops or Figures()).layers.get(index, _NOTHING)
    kept = (recorded.kept or Figures()).layers.get(index, _NOTHING)
    return LayerCost(
        path=layer.path,
        kind=layer.kind,
        depth=layer.depth,
        calls=statistics.mean(step.calls for step in steps),
        forward=spread(lambda step: step.forward),
        backward=spread(lambda step: step.backward, with_backward),
        forward_self=spread(lambda step: step.forward_self),
        backward_self=spread(lambda step: step.backward_self, with_backward),
        memory_bytes=kept.forward,
        memory_self_bytes=kept.forward_self,
        parameter_bytes=layer.parameter_bytes,
        flops_forward=flops.forward,
        flops_backward=flops.backward,
        flops_self=flops.forward_self + flops.backward_self,
        source=layer.source,
    )


def _phases(bare: Sequence[dict[str, float]]) -> dict[str, Spread]:
    return {name: Spread.of([step.get(name, 0.0) for step in bare]) for name in PHASES if any(step.get(name) for step in bare)}


def _remainder(recorded: Recorded, timed: Sequence[Figures]) -> dict[str, float]:
    """What is in no layer: loss and whatever else the loop does, optimizer, data, and autograd's own way."""
    phases = _phases(recorded.bare)
    found: dict[str, float] = {name: phases[name].median_ms for name in ("data", "optimizer") if name in phases}
    if "other" in phases:
        found["loss and other code of the loop"] = phases["other"].median_ms
    for name, each in (
        ("loss, backward", [step.loss_backward for step in timed]),
        ("autograd, before the first node", [step.engine for step in timed]),
    ):
        ms = statistics.median(each) / 1e6 if each else 0.0
        if ms:
            found[name] = ms
    return found


def _own_cost(recorded: Recorded) -> float:
    bare, timed = (statistics.median([step["step"] for step in steps] or [0.0]) for steps in (recorded.bare, recorded.timed_ms))
    return timed / bare if bare > 0 else float("nan")


def _notes(recorded: Recorded, doors: Doors, device: torch.device) -> Iterator[str]:
    if recorded.failures:
        yield f"{len(recorded.failures)} steps could not be measured, by a mistake of the profiler: {recorded.failures[0]}"
    for path in doors.hidden[:5]:
        yield f"{path or 'the model'} is compiled, scripted or runs as copies: what is inside of it was not seen"
    if recorded.uncounted:
        yield f"FLOPs of {', '.join(sorted(recorded.uncounted))} are not counted: torch has no formula for it"
    if device.type != "cpu":
        yield f"times on {device.type} wait for the device at every layer, which hides what would overlap; not tested on real devices"


def dtype_and_device(tensors: Any) -> tuple[torch.dtype, torch.device]:
    """Those of most of a model's numbers."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and not torch.nn.parameter.is_lazy(tensor):
            key = tensor.dtype, tensor.device
            sizes[key] = sizes.get(key, 0) + tensor.numel()
    return max(sizes, key=lambda key: sizes[key], default=(torch.float32, torch.device("cpu")))

"""Builds a ProfileReport from recorded steps: medians and quartiles over the steps, layer names, and notes about what is missing."""

import platform
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from sonde.capture.layer_timing.layer_times_from_trace import LayerCosts, ModuleCost
from sonde.formatting import number, whole_percent
from sonde.profiler import LayerCost, ProfileReport, TimeSpread
from sonde.profiler.choose_timed_modules import TimedModule, TimedModules
from sonde.profiler.flops import peak_flops_per_s
from sonde.profiler.profile_report import DISTURBED, ENGINE_START, LOSS_BACKWARD, PHASES, UNKNOWN
from sonde.profiler.run_and_time_steps import StepRecordings
from sonde.profiler.samples_per_step import samples_per_step
from sonde.profiler.timer_overhead import without_timer_cost
from sonde.render.profile_tree import enclosing_paths

_NO_COST = ModuleCost()


def build_report(
    recordings: StepRecordings, modules: TimedModules, *, title: str, dtype: torch.dtype, device: torch.device, notes: Sequence[str] = ()
) -> ProfileReport:
    """The report of some recorded steps. `dtype` and `device` are those of the model; `notes` come first in the report's notes."""
    recordings = recordings.least_disturbed()
    recordings = replace(recordings, timed=without_timer_cost(recordings.timed, recordings.bare, recordings.timer_cost))
    timed, flops = recordings.timed, recordings.flops or LayerCosts()
    samples = samples_per_step(recordings.batches.values(), recordings.num_fetched)
    called = _parents_first(dict.fromkeys(layer for step in timed for layer in step.layers), modules.layers)
    has_backward = any(step.backward for step in timed)
    step, timed_step = (TimeSpread.of([step["step"] for step in steps]) for steps in (recordings.bare, recordings.timed_ms))
    own_cost = timed_step.median_ms / step.median_ms if step.median_ms > 0 else float("nan")
    report = ProfileReport(
        title=title, layers=tuple(_layer_cost(modules.layers[layer], layer, recordings, has_backward) for layer in called),
        step=step, phases=_phases(recordings.bare), remainder=_remainder(recordings),
        num_samples=samples.num_samples, num_tokens=samples.num_tokens,
        flops_per_step=sum(cost.forward_self + cost.backward_self for cost in flops.layers.values()) + flops.loss_backward,
        peak_flops_per_s=peak_flops_per_s(recordings.autocast or dtype, device), utilisation=recordings.utilization.result(),
        batch=samples.text, environment=environment(dtype, device, recordings.autocast),
        notes=(*notes, *_notes(recordings, modules, device)), disturbed_share=recordings.disturbed_share, own_cost=own_cost,
        spans=tuple(sorted(recordings.spans, key=lambda span: (span.step, span.start_ms, -span.duration_ms))),
    )  # fmt: skip
    return replace(report, notes=(*report.notes, *_disturbance_notes(report)))


def _disturbance_notes(report: ProfileReport) -> Iterator[str]:
    """Any interruption makes a step longer, but only the interrupted layer: on a busy machine the sum of medians differs from the step."""
    if report.is_disturbed:
        yield (
            f"other programs interrupted {whole_percent(report.disturbed_share)} of the measured steps, so times are too long. "
            "Profile again when the machine is less busy, or with fewer threads: torch.set_num_threads(1)"
        )
        return
    share = report.accounted_ms / report.step.median_ms if report.step.median_ms > 0 else 1.0
    if not 1 / DISTURBED < share < DISTURBED:
        cores = number(float(report.utilisation.get("busy_cores", float("nan"))))
        yield (
            f"layers and remainder add up to {100 * share:.0f} % of the step: other programs disturbed it (this one used {cores} cores). "
            "Profile again when the machine is less busy, or with more repeats"
        )


def environment(dtype: torch.dtype, device: torch.device, autocast: torch.dtype | None) -> dict[str, str]:
    dtypes = str(dtype) if autocast is None else f"{dtype} with autocast to {autocast}"
    return {
        "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(), "system": platform.system(),
        "device": str(device), "dtype": dtypes.replace("torch.", ""), "threads": str(torch.get_num_threads()),
    }  # fmt: skip


def _parents_first(called: Collection[int], layers: Sequence[TimedModule]) -> list[int]:
    """Layers in the order of their first calls, but each after its parent by path, so that a tree can be drawn row by row."""
    children: dict[str | None, list[int]] = {}
    paths = {layers[layer].path for layer in called}
    for layer in called:
        parent = next((path for path in enclosing_paths(layers[layer].path) if path in paths), None)
        children.setdefault(parent, []).append(layer)

    def walk(parent: str | None) -> Iterator[int]:
        for layer in children.get(parent, ()):
            yield layer
            yield from walk(layers[layer].path)

    return list(walk(None))


def _layer_cost(module: TimedModule, layer: int, recordings: StepRecordings, has_backward: bool) -> LayerCost:
    steps = [step.layers.get(layer, _NO_COST) for step in recordings.timed]

    def spread(value: Callable[[ModuleCost], int], is_known: bool = True) -> TimeSpread:
        return TimeSpread.of([value(step) / 1e6 for step in steps]) if is_known else UNKNOWN

    flops = (recordings.flops or LayerCosts()).layers.get(layer, _NO_COST)
    saved = (recordings.saved_bytes or LayerCosts()).layers.get(layer, _NO_COST)
    return LayerCost(
        path=module.path, kind=module.kind, depth=module.depth, calls=statistics.mean(step.calls for step in steps),
        forward=spread(lambda step: step.forward), backward=spread(lambda step: step.backward, has_backward),
        forward_self=spread(lambda step: step.forward_self), backward_self=spread(lambda step: step.backward_self, has_backward),
        memory_bytes=saved.forward, memory_self_bytes=saved.forward_self, parameter_bytes=module.parameter_bytes,
        flops_forward=flops.forward, flops_backward=flops.backward, flops_self=flops.forward_self + flops.backward_self,
        source=module.source, latency=spread(lambda step: step.forward + step.backward),
    )  # fmt: skip


def _phases(bare: Sequence[dict[str, float]]) -> dict[str, TimeSpread]:
    return {name: TimeSpread.of([step.get(name, 0.0) for step in bare]) for name in PHASES if any(step.get(name) for step in bare)}


def _remainder(recordings: StepRecordings) -> dict[str, float]:
    """Milliseconds that belong to no layer: data, optimizer, the loss and other code of the loop, and autograd's start."""
    phases = _phases(recordings.bare)
    names = {"data": "data", "optimizer": "optimizer", "other": "loss and other code of the loop"}
    remainder: dict[str, float] = {text: phases[name].median_ms for name, text in names.items() if name in phases}
    engine = {
        LOSS_BACKWARD: statistics.median([step.loss_backward for step in recordings.timed] or [0]) / 1e6,
        ENGINE_START: statistics.median([step.engine for step in recordings.timed] or [0]) / 1e6,
    }
    return remainder | {name: ms for name, ms in engine.items() if ms}


def _notes(recordings: StepRecordings, modules: TimedModules, device: torch.device) -> Iterator[str]:
    if recordings.failures:
        yield f"{len(recordings.failures)} steps could not be measured because of an error in the profiler: {recordings.failures[0]}"
    for path in modules.opaque_paths[:5]:
        yield f"{path or 'the model'} is compiled, scripted or replicated: the layers inside it are not timed"
    if recordings.uncounted:
        yield f"FLOPs of {', '.join(sorted(recordings.uncounted))} are not counted: torch has no formula for it"
    if device.type != "cpu":
        yield f"timing on {device.type} waits for the device at every layer, which hides overlap; not tested on real devices"


def dtype_and_device(tensors: Iterable[torch.Tensor]) -> tuple[torch.dtype, torch.device]:
    """The dtype and device of most of the numbers in these tensors."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and not torch.nn.parameter.is_lazy(tensor):
            key = tensor.dtype, tensor.device
            sizes[key] = sizes.get(key, 0) + tensor.numel()
    return max(sizes, key=lambda key: sizes[key], default=(torch.float32, torch.device("cpu")))

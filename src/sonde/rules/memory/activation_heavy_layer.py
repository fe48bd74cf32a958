"""The output of one layer is so large that it decides how much memory the whole training needs.

What it finds    attention scores of all pairs of positions, logits over a large vocabulary, a convolution with many channels at full
                 resolution: few layers hold most of what is stored for backward, and much of the memory.
Why it matters   backward needs gradients as large again at the same time. A slightly larger batch or sequence ends the training.
How it knows     from the exact sizes of the outputs of all layers and the memory that this process may use. Layers in a row with outputs of
                 equal size count as one. A tenth of the memory, and half of all outputs, is a finding.
Known problems   outputs of functions between layers are not measured, operations in place count as a tensor of their own, and layers whose
                 output needs no gradient are left out. On a device the memory of the machine is the limit.
Fix              make the tensor smaller (checkpointing would compute it again): in pieces of the batch or the sequence,
                 scaled_dot_product_attention, a stride or fewer channels earlier, bfloat16.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sonde.events import Kind, MemoryLimitFound, Severity, Site
from sonde.formatting import layer_name, size
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import Block, Reduction, RunView

MUCH = 0.1  # of the memory: with its gradients and what a loss makes of it, four or five of that size are there at once
MOST = 0.5  # of the outputs of all layers: else no single place is to blame
FEW = 3  # at most one layer in so many may form that place: if all are alike, none is heavy
ENOUGH = 3  # observed steps: one odd batch is chance
WIDTHS = re.compile(r"(\d+)")  # of a dtype, in bits


@dataclass
class OutputSizes:
    num_observed: int = 0
    first_step: int = -1
    largest: dict[int, list[float]] = field(default_factory=dict)  # by site, in the order of calls: elements in its ENOUGH largest steps
    with_gradient: set[int] = field(default_factory=set)


def _reduce(block: Block, state: OutputSizes) -> OutputSizes:
    outputs, gradients = block.get(Kind.ACTIVATION), block.get(Kind.ACTIVATION_GRADIENT)
    columns = [] if outputs is None else [at for at, site in enumerate(outputs.sites) if site is not None and site.kind == "output"]
    if outputs is None or not columns:
        return state
    if not state.num_observed:
        state.first_step = int(block.numbers[0])
    state.num_observed += len(block)
    largest = np.sort(outputs["num"][:, columns], axis=0)[-ENOUGH:].T
    for site, elements in zip(outputs.site_ids[columns].tolist(), largest.tolist()):
        state.largest[site] = sorted([*state.largest.get(site, ()), *elements])[-ENOUGH:]
    if gradients is not None:
        state.with_gradient.update(gradients.site_ids.tolist())
    return state


OUTPUT_SIZES = Reduction((Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT), OutputSizes, _reduce)


def check(view: RunView) -> Result:
    limit = next(reversed(view.events(MemoryLimitFound)), None)
    if limit is None or not limit.num_bytes:
        return NotEvaluated("how much memory there is is not known")
    outputs = view.reduced(OUTPUT_SIZES)
    if outputs.num_observed < ENOUGH:
        return NotEvaluated(f"the outputs of layers were observed in fewer than {ENOUGH} steps")
    # As large as in several steps, not in the largest one.
    layers = [
        (view.sites[site], largest[0] * _width(view.sites[site].dtype))
        for site, largest in outputs.largest.items()
        if len(largest) == ENOUGH and site in outputs.with_gradient
    ]
    place = _largest_place(layers)
    heavy, total = sum(num_bytes for _, num_bytes in place), sum(num_bytes for _, num_bytes in layers)
    if not heavy or heavy < MUCH * limit.num_bytes or heavy < MOST * total or len(place) > max(1, len(layers) // FEW):
        return Clear()
    first, others = place[0][0], [layer_name(site.name, site.type) for site, _ in place[1:]]
    with_others = f", with {' and '.join(others)} behind it," if others else ""
    measured = "the layers that you chose" if view.are_layers_chosen else "all layers"
    return RULE.finding(
        Severity.WARNING,
        outputs.first_step,
        cause=f"its output{with_others} takes {size(heavy)}: {100 * heavy / limit.num_bytes:.0f} % of the {size(limit.num_bytes)} of "
        f"{limit.by}, and {100 * heavy / total:.0f} % of what {measured} keep for backward, which needs gradients of that size as well",
        fix="make that tensor smaller: compute it in pieces of the batch or the sequence, attention by "
        "scaled_dot_product_attention, a stride or fewer channels before it, or bfloat16",
        evidence={
            "output_bytes": heavy,
            "share_of_memory": heavy / limit.num_bytes,
            "share_of_activations": heavy / total,
            "type": first.type,
            "shape": str(list(first.shape)),
        },
        where=first.name,
    )


def _largest_place(layers: Sequence[tuple[Site, float]]) -> Sequence[tuple[Site, float]]:
    """The layer with the largest output, and those right behind it whose output is as large."""
    sizes = [num_bytes for _, num_bytes in layers]
    first = last = sizes.index(max(sizes)) if sizes else 0
    while last < len(sizes) and sizes[last] == sizes[first]:
        last += 1
    return layers[first:last]


def _width(dtype: str) -> float:
    """Bytes of a number: of `float16` two, of `complex64` eight, of `bool` one."""
    bits = WIDTHS.search(dtype)
    return int(bits[0]) / 8 if bits else 1.0 if dtype == "bool" else 4.0


RULE = Rule(
    "activation-heavy-layer", check, page=__doc__, needs=(Kind.ACTIVATION,), explains=("out-of-memory",), reductions=(OUTPUT_SIZES,)
)

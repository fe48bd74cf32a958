"""One layer puts out a tensor so large that the memory of the whole training is decided there.

What it finds    attention that writes all pairs of positions down, logits over a large vocabulary for every position, a convolution with
                 many channels at full resolution: where few layers hold most of what is kept for backward, and that is much of the
                 memory that there is.
Why it matters   backward needs the gradient of that tensor, and often that of its input, as large again and at the same time. A batch that
                 is a little larger, or one longer sequence, ends the training.
How it knows     from the sizes of the outputs of all layers, which are exact, and the memory that this process may use. Layers that follow
                 each other with outputs of equal size (convolution, norm, ReLU) count as one. A tenth of the memory, and half of what
                 all layers put out, is a finding.
Known problems   what functions put out between the layers is not seen, and operations in place are counted as if they had made a tensor of
                 their own. Layers whose output needs no gradient are left out. On a device the machine's own memory is taken for the
                 limit, which is mostly larger: nothing is found there too early.
Fix              make the tensor smaller, since checkpointing would make it again: in pieces of the batch or the sequence,
                 scaled_dot_product_attention, a stride or fewer channels earlier, bfloat16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Kind, Severity, Site, Step
from sonde.formatting import size
from sonde.rules.rule import Answer, Clear, NotEvaluated

MUCH = 0.1  # of the memory: with its gradients and what a loss makes of it, four or five of that size are there at once
MOST = 0.5  # of what all layers put out: else no single place is to blame
FEW = 3  # at most one layer in so many may stand for that place: where all are alike, none is heavy
ENOUGH = 3  # observed steps: one odd batch is chance
WIDTHS = re.compile(r"(\d+)")  # of a dtype, in bits


@dataclass(slots=True)
class ActivationHeavyLayer:
    name: ClassVar[str] = "activation-heavy-layer"
    explains: ClassVar[tuple[str, ...]] = ("out-of-memory",)

    limit: float = 0.0  # bytes
    limit_by: str = ""
    num_observed: int = 0
    first_step: int = -1
    sites: dict[int, Site] = field(default_factory=dict)  # outputs that need gradients, in the order of their calls
    seen: dict[int, list[float]] = field(default_factory=dict)  # bytes: the largest outputs of each
    differentiable: set[int] = field(default_factory=set)

    def see(self, step: Step) -> None:
        for event in step.events:
            if event.kind == "memory_limit" and isinstance(event.data.get("num_bytes"), (int, float)):
                self.limit, self.limit_by = float(event.data["num_bytes"]), str(event.data.get("by", ""))
        rows = [(site, row["num"]) for site, row in step.table(Kind.ACTIVATION) if site.kind == "output"]
        if not rows:
            return
        self.num_observed += 1
        self.first_step = step.number if self.first_step < 0 else self.first_step
        self.differentiable.update(site.id for site, _ in step.table(Kind.ACTIVATION_GRADIENT))
        for site, num in rows:
            self.sites[site.id] = site
            largest = self.seen.setdefault(site.id, [])
            largest.append(num * _width(site.dtype))
            largest.sort(reverse=True)
            del largest[ENOUGH:]

    def answer(self) -> Answer:
        if not self.limit:
            return NotEvaluated("how much memory there is is not known")
        if self.num_observed < ENOUGH:
            return NotEvaluated(f"the outputs of layers were observed in fewer than {ENOUGH} steps")
        # As large as it was in several steps, not in the largest one.
        layers = [(site, self.seen[number][-1]) for number, site in self.sites.items() if len(self.seen[number]) == ENOUGH]
        layers = [(site, num) for site, num in layers if site.id in self.differentiable]
        whole = sum(num for _, num in layers)
        place = _largest_place(layers)
        heavy = sum(num for _, num in place)
        if not heavy or heavy < MUCH * self.limit or heavy < MOST * whole or len(place) > max(1, len(layers) // FEW):
            return Clear()
        first, others = place[0][0], [site.name for site, _ in place[1:]]
        beside = f", with {' and '.join(others)} behind it," if others else ""
        return [
            Finding(
                rule=self.name,
                severity=Severity.WARNING,
                where=first.name,
                step=self.first_step,
                cause=f"its output{beside} takes {size(heavy)}: {100 * heavy / self.limit:.0f} % of the {size(self.limit)} of "
                f"{self.limit_by}, and {100 * heavy / whole:.0f} % of what all layers keep for backward, which needs gradients of that "
                "size beside it",
                fix="make that tensor smaller: compute it in pieces of the batch or the sequence, attention by "
                "scaled_dot_product_attention, a stride or fewer channels before it, or bfloat16",
                evidence={
                    "output_bytes": heavy, "share_of_memory": heavy / self.limit, "share_of_activations": heavy / whole,
                    "type": first.type, "shape": str(list(first.shape)),
                },
            )
        ]  # fmt: skip


def _largest_place(layers: list[tuple[Site, float]]) -> list[tuple[Site, float]]:
    """The layer with the largest output, and those right behind it whose output is as large."""
    if not layers:
        return []
    most = max(num for _, num in layers)
    first = next(at for at, (_, num) in enumerate(layers) if num == most)
    last = first
    while last < len(layers) and layers[last][1] == most:
        last += 1
    return layers[first:last]


def _width(dtype: str) -> float:
    """Bytes of a number: of `float16` two, of `complex64` eight, of `bool` one."""
    bits = WIDTHS.search(dtype)
    return int(bits[0]) / 8 if bits else 1.0 if dtype == "bool" else 4.0

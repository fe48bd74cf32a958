"""Profiles for tests of what draws and exports them: a classifier with a stack of blocks, of any size, with times that a test chooses."""

from __future__ import annotations

from sonde.profiler import LayerCost, ProfileReport, Section, Span, TimeSpread

PARTS = (
    ("attention", "MultiheadAttention", 1.0, 2.0, 4_000_000),
    ("up", "Linear", 0.8, 1.6, 6_000_000),
    ("norm", "LayerNorm", 0.02, 0.05, 0),
)


def spread(ms: float) -> TimeSpread:
    return TimeSpread(ms, 0.97 * ms, 1.04 * ms, 10)


def block(path: str, slow: float) -> list[LayerCost]:
    inside = [
        LayerCost(
            f"{path}.{name}", kind, 2, 1.0, *2 * (spread(slow * forward), spread(slow * backward)),
            memory_bytes=1000, memory_self_bytes=1000, flops_forward=flops, flops_backward=2 * flops, flops_self=3 * flops,
        )
        for name, kind, forward, backward, flops in PARTS
    ]  # fmt: skip
    forward, backward = (sum(getattr(part, side).median_ms for part in inside) + 0.1 for side in ("forward", "backward"))
    flops = sum(part.flops_forward for part in inside)
    whole = LayerCost(
        path, "Block", 1, 1.0, spread(forward), spread(backward), spread(0.1), spread(0.1), flops_forward=flops, flops_backward=2 * flops
    )
    return [whole, *inside]


def sample_profile(num_blocks: int = 4, *, slow: float = 1.0, slow_block: int = -1, title: str = "Classifier") -> ProfileReport:
    """`slow` is a factor for all blocks, or for one."""
    layers: list[LayerCost] = []
    for number in range(num_blocks):
        layers += block(f"layers.{number}", slow if slow_block in (-1, number) else 1.0)
    blocks = [layer for layer in layers if layer.kind == "Block"]
    forward, backward = (sum(getattr(layer, side).median_ms for layer in blocks) + 0.5 for side in ("forward", "backward"))
    flops = sum(layer.flops_forward for layer in blocks)
    root = LayerCost(
        "", title, 0, 1.0, spread(forward), spread(backward), spread(0.1), spread(0.1), parameter_bytes=4000,
        flops_forward=flops, flops_backward=2 * flops, source="model.py:12",
    )  # fmt: skip
    head = LayerCost("head", "Linear", 1, 1.0, spread(0.4), spread(0.4), spread(0.4), spread(0.4), flops_forward=1000, flops_self=3000)
    step = forward + backward + 2.0
    return ProfileReport(
        title=title,
        layers=(root, *layers, head),
        sections=(Section("tokenise", 10, 12.0, spread(1.2)), Section("pad", 10, 4.0, spread(0.4), "tokenise")),
        step=spread(step),
        phases={"data": spread(0.5), "forward": spread(forward), "backward": spread(backward), "optimizer": spread(1.5)},
        remainder={"data": 0.5, "optimizer": 1.5},
        num_samples=32,
        flops_per_step=3 * flops,
        peak_flops_per_s=4e10,
        batch="int64 [32, 64]",
        environment={"torch": "2.13.0"},
        own_cost=1.2,
        spans=tuple(spans(layers[:8])),
    )


def spans(layers: list[LayerCost]) -> list[Span]:
    """Two steps: each layer one after the other, forward and then in reverse, inside of their phases."""
    found: list[Span] = []
    at = 0.0
    for step in (0, 1):
        for direction, order in (("forward", layers), ("backward", layers[::-1])):
            start = at
            for layer in order:
                if layer.kind != "Block":
                    ms = getattr(layer, direction).median_ms
                    found.append(Span(step, direction, layer.path, at, ms))
                    at += ms
            found += [Span(step, "phase", direction, start, at - start), Span(step, direction, "", start, at - start)]
        found.append(Span(step, "section", "tokenise", at, 0.5))
        at += 1.0
    return found

"""The layers of a profile as a tree of rows: equal blocks (`layers.0` … `layers.11`) are one row, cheap layers are one last row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonde.profiler import LayerCost, ProfileReport

SMALLEST = 0.005  # share of the step: a layer below it is not what makes a step slow
EXPENSIVE = 1.5  # times the median of equal blocks: such a block keeps its own row
NOTABLE = 0.02  # share of the step above the median that such a block must have too: less may be chance


@dataclass(slots=True)
class LayerNode:
    """A layer, or several that are alike, or what was folded. Times and counts are sums over all of them."""

    name: str  # relative to the row above it
    kind: str
    layers: tuple[LayerCost, ...] = ()  # those in this row; empty for a folded row
    children: list[LayerNode] = field(default_factory=list)
    num_folded: int = 0

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    self_ms: float = 0.0
    spread_ms: float = math.nan  # half of the width of the middle half, forward and backward together
    flops: int = 0
    memory_bytes: int = 0
    calls: float = 0.0
    source: str = ""

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def num(self) -> int:
        return max(len(self.layers), 1)


def enclosing_paths(path: str) -> Iterator[str]:
    """The paths of the modules around a module, the nearest first; "" is the model itself."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def forest(layers: Sequence[LayerCost]) -> list[LayerNode]:
    """The layers by their paths: one node each, under the nearest module around it that was measured. Usually one tree, the model's."""
    nodes: dict[str, LayerNode] = {}
    roots: list[LayerNode] = []
    for layer in layers:
        above = next((nodes[path] for path in enclosing_paths(layer.path) if path in nodes), None)
        prefix = f"{above.layers[0].path}." if above is not None and above.layers[0].path else ""
        node = _node(layer.path.removeprefix(prefix) or layer.kind, (layer,))
        nodes.setdefault(layer.path, node)
        (roots if above is None else above.children).append(node)
    return roots


def merged(nodes: Sequence[LayerNode], whole_ms: float) -> list[LayerNode]:
    """Neighbours that are numbered, alike and alike expensive, as one."""
    result: list[LayerNode] = []
    for _, group in groupby(nodes, key=_likeness):
        alike = list(group)
        usual = median(node.total_ms for node in alike)
        expensive = [node for node in alike if node.total_ms > max(EXPENSIVE * usual, usual + NOTABLE * whole_ms)]
        result += [_joined([node for node in alike if node not in expensive]), *expensive]
    for node in result:
        node.children = merged(node.children, whole_ms)
    return result


def folded(nodes: Sequence[LayerNode], whole_ms: float, smallest: float = SMALLEST) -> list[LayerNode]:
    """What takes less than `smallest` of the whole is one row at the end; a single small one is not worth that."""
    shown = [node for node in nodes if not node.total_ms < smallest * whole_ms]
    hidden = [node for node in nodes if node.total_ms < smallest * whole_ms]
    for node in shown:
        node.children = folded(node.children, whole_ms, smallest)
    is_worth_it = len(hidden) > 1 or any(node.children for node in hidden)
    return [*shown, _folded(hidden)] if is_worth_it else [*shown, *hidden]


def rows(report: ProfileReport, limit: int) -> list[tuple[LayerNode, tuple[bool, ...]]]:
    """The rows to draw, at most about `limit`: nodes in order, each with whether it and those around it are the last of theirs."""
    whole_ms = report.step.median_ms if report.step.is_known else report.accounted_ms
    smallest = SMALLEST
    while True:
        trees = folded(merged(forest(report.layers), whole_ms), whole_ms, smallest)
        found = [row for number, tree in enumerate(trees) for row in _walk(tree, (number == len(trees) - 1,))]
        if len(found) <= limit or smallest >= 1 or not whole_ms > 0:
            return found
        smallest *= 1.5


def _walk(node: LayerNode, lasts: tuple[bool, ...]) -> Iterator[tuple[LayerNode, tuple[bool, ...]]]:
    yield node, lasts
    for number, child in enumerate(node.children):
        yield from _walk(child, (*lasts, number == len(node.children) - 1))


def _node(name: str, layers: tuple[LayerCost, ...]) -> LayerNode:
    spreads = [spread for layer in layers for spread in (layer.forward, layer.backward)]
    return LayerNode(
        name, layers[0].kind, layers, source=layers[0].source,
        forward_ms=math.fsum(finite(layer.forward.median_ms) for layer in layers),
        backward_ms=math.fsum(finite(layer.backward.median_ms) for layer in layers),
        self_ms=math.fsum(finite(layer.forward_self.median_ms) + finite(layer.backward_self.median_ms) for layer in layers),
        spread_ms=math.fsum(finite((spread.high_ms - spread.low_ms) / 2) for spread in spreads),
        flops=sum(layer.flops_forward + layer.flops_backward for layer in layers),
        memory_bytes=sum(layer.memory_bytes for layer in layers), calls=math.fsum(layer.calls for layer in layers),
    )  # fmt: skip


def finite(ms: float) -> float:
    return ms if math.isfinite(ms) else 0.0


def _likeness(node: LayerNode) -> tuple[object, ...]:
    """Equal for what may be one row: siblings of one list, of one class, with the same layers inside."""
    head, _, last = node.name.rpartition(".")
    return (head, node.kind, _shape(node)) if last.isdecimal() else (node.name, id(node))


def _shape(node: LayerNode) -> tuple[object, ...]:
    return tuple((child.name, child.kind, _shape(child)) for child in node.children)


def _joined(alike: Sequence[LayerNode]) -> LayerNode:
    """One node for several of one shape; their children are joined in the same way, place by place."""
    if len(alike) == 1:
        return alike[0]
    name = alike[0].name if len({node.name for node in alike}) == 1 else _span([node.name for node in alike])
    node = _node(name, tuple(layer for each in alike for layer in each.layers))
    node.children = [_joined(children) for children in zip(*(each.children for each in alike))]
    return node


def _span(names: Sequence[str]) -> str:
    """`layers.0–11`, or `layers.0 … 11` where some between them are not meant."""
    head, _, first = names[0].rpartition(".")
    numbers = [int(name.rpartition(".")[2]) for name in names]
    gap = "–" if numbers == list(range(numbers[0], numbers[-1] + 1)) else " … "
    return f"{head}.{first}{gap}{numbers[-1]}" if head else f"{first}{gap}{numbers[-1]}"


def _folded(hidden: Sequence[LayerNode]) -> LayerNode:
    num = sum(_count(node) for node in hidden)
    node = _node(f"{num:,} more", tuple(layer for each in hidden for layer in each.layers))
    node.kind, node.source, node.layers, node.num_folded = "", "", (), num
    return node


def _count(node: LayerNode) -> int:
    return node.num + sum(_count(child) for child in node.children)

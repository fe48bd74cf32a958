"""A profile as one HTML page: flame graphs of forward and backward on one time scale, tables, and a comparison.

All positions, widths and texts are computed here; the script only moves them when a layer is selected or zoomed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sonde.formatting import DASH, factor, milliseconds, printable, si_number, whole_percent
from sonde.render.html.html_page import bullet_list, cell, definition_list, html_lines, html_page, html_text, json_script, resource, table
from sonde.render.profile_content import SECTION_HEAD, advice, headline, outside_layers, phases, profile_facts, sections
from sonde.render.profile_tree import LayerNode, finite, forest
from sonde.render.terminal.profile_terminal import profile_text, shown_changes

if TYPE_CHECKING:
    from sonde.profiler import ProfileComparison, ProfileReport

NUM_TONES = 8  # classes of layers with their own color: the eye distinguishes no more
MAX_ROWS = 40  # of a table
NARROWEST = 0.2  # of the page, for the narrower of the two flames
Pair = tuple[float, float]  # forward, backward


def profile_html(report: ProfileReport, comparison: ProfileComparison | None = None) -> str:
    """The whole page. Without a script running, the tree in characters is there instead of the flames."""
    advice_titles = ("What takes the time", "What to try", "Notes")
    parts = [
        f"<style>{resource('flame.css')}</style><h1>{html_text(report.title or 'Profile')}</h1>",
        f'<p class="story">{html_text(headline(report))}</p>', _comparison(comparison) if comparison is not None else "",
        definition_list("notes", profile_facts(report)[1:]), _phases(report), _flames(report),
        *(f"<h2>{title}</h2>{bullet_list(texts)}" for title, texts in zip(advice_titles, advice(report)) if texts),
        _layers(report),
    ]  # fmt: skip
    if report.sections:
        rows = [[cell(text) for text in row] for row in sections(report)]
        parts.append(f"<h2>Sections</h2>{table(SECTION_HEAD, rows)}")
    return html_page(f"Profile of {report.title or 'a model'}", "".join(parts), script=resource("flame.js"))


def flame_boxes(report: ProfileReport) -> list[dict[str, Any]]:
    """One box per layer: its place in both flame graphs, as shares of their width, and its facts."""
    tones = _tones(report)
    result: list[dict[str, Any]] = []

    def place(nodes: Sequence[LayerNode], above: int, depth: int, left: Pair, widths: Pair, whole: Pair) -> None:
        # Medians do not add up exactly: where the parts are longer than the whole, they are drawn in proportion.
        inside = _sums(nodes)
        for node in nodes:
            lengths = (node.forward_ms, node.backward_ms)
            shares = [part / max(each, total) if total > 0 else 0.0 for part, each, total in zip(lengths, whole, inside)]
            mine = (widths[0] * shares[0], widths[1] * shares[1])
            result.append(
                {
                    "name": printable(node.name), "path": printable(node.layers[0].path or "(the model)"), "kind": printable(node.kind),
                    "above": above, "depth": depth, "at": [round(value, 6) for value in (left[0], mine[0], left[1], mine[1])],
                    "tone": tones.get(node.kind, NUM_TONES), "facts": _box_facts(report, node),
                }
            )  # fmt: skip
            place(node.children, len(result) - 1, depth + 1, left, mine, lengths)
            left = (left[0] + mine[0], left[1] + mine[1])

    place(forest(report.layers), -1, 0, (0.0, 0.0), (1.0, 1.0), (0.0, 0.0))
    return result


def _sums(nodes: Sequence[LayerNode]) -> Pair:
    return math.fsum(node.forward_ms for node in nodes), math.fsum(node.backward_ms for node in nodes)


def _tones(report: ProfileReport) -> dict[str, int]:
    """Numbers of colors by class of layer, the class with the most time of its own first."""
    own: dict[str, float] = {}
    for layer in report.layers:
        own[layer.kind] = own.get(layer.kind, 0.0) + finite(layer.self_ms)
    return {kind: tone for tone, kind in enumerate(sorted(own, key=lambda kind: -own[kind])[:NUM_TONES])}


def _box_facts(report: ProfileReport, node: LayerNode) -> list[str]:
    facts = [
        f"forward {milliseconds(node.forward_ms)} ms",
        f"backward {milliseconds(node.backward_ms)} ms",
        f"itself {milliseconds(node.self_ms)} ms",
        f"{whole_percent(report.share(node.total_ms))} of the step",
    ]
    if 0 < node.spread_ms < node.total_ms:
        facts.append(f"±{whole_percent(node.spread_ms / node.total_ms)}")
    if node.flops:
        facts.append(si_number(node.flops, "FLOP"))
        if report.peak_flops_per_s > 0 and node.total_ms > 0:
            facts.append(f"{whole_percent(node.flops / node.total_ms * 1e3 / report.peak_flops_per_s)} of peak")
    if node.memory_bytes:
        facts.append(f"saved {si_number(node.memory_bytes, 'B')}")
    if node.calls != 1:
        facts.append(f"{node.calls:g} calls")
    return [*facts, printable(node.source)] if node.source else facts


def _flames(report: ProfileReport) -> str:
    found = flame_boxes(report)
    if not found:
        return ""
    data = {"boxes": found, "depth": max(box["depth"] for box in found) + 1}
    lengths = _sums(forest(report.layers))
    panels = [
        f'<div class="flame" style="flex:{max(ms / sum(lengths), NARROWEST):.3f} 1 0"><h3>{name} <span>{milliseconds(ms)} ms</span></h3>'
        f'<div class="boxes" data-direction="{number}"></div></div>'
        for number, (name, ms) in enumerate(zip(("forward", "backward"), lengths)) if ms > 0
    ]  # fmt: skip
    legend = "".join(f'<span class="tone{tone}"><i></i>{html_text(kind)}</span>' for kind, tone in _tones(report).items())
    beside = f'<p class="story">In no layer: {html_text(text)}.</p>' if (text := outside_layers(report)) else ""
    fallback = html_lines(profile_text(report, width=100))
    return (
        '<h2>Layers</h2><div id="flames"><div class="tools"><input id="find" type="search" placeholder="find a layer or class" '
        'aria-label="find a layer or class"><button id="out" type="button" disabled>Zoom out</button>'
        '<span class="keys">click or Enter zooms in, Esc out, arrows walk</span></div>'
        '<output id="said" aria-live="polite">Each box is a layer, above the layers that it calls; the rest is its own time.</output>'
        f'<div class="panels" tabindex="0" role="application" aria-label="time of layers, forward and backward">{"".join(panels)}</div>'
        f'<div class="legend">{legend}</div>{beside}</div><noscript><pre>{fallback}</pre></noscript>'
        f"{json_script('profile', data)}"
    )


def _phases(report: ProfileReport) -> str:
    known = [(name, spread, share) for name, spread, share in phases(report) if share > 0]
    if not known:
        return ""
    parts = "".join(f'<div class="phase {html_text(name)}" style="flex:{share:.4f} 1 0"></div>' for name, _, share in known)
    words = "".join(
        f'<span class="{html_text(name)}"><i></i>{html_text(name)} {milliseconds(spread.median_ms)} ms, {whole_percent(share)}</span>'
        for name, spread, share in known
    )
    return f'<h2>Phases of a step</h2><div class="phases">{parts}</div><div class="legend">{words}</div>'


def _layers(report: ProfileReport) -> str:
    layers = sorted(report.layers, key=lambda layer: -finite(layer.self_ms))
    rows = []
    for layer in layers[:MAX_ROWS]:
        speed = layer.flops_per_s
        numbers = (
            milliseconds(layer.forward_self.median_ms), milliseconds(layer.backward_self.median_ms),
            milliseconds(layer.total_ms), milliseconds(layer.latency.p95_ms), milliseconds(layer.latency.p99_ms),
            whole_percent(report.share(layer.self_ms)), f"{layer.calls:g}",
            si_number(layer.flops_self, "FLOP") if layer.flops_self else DASH,
            whole_percent(speed / report.peak_flops_per_s) if speed and report.peak_flops_per_s > 0 else DASH,
            si_number(layer.memory_self_bytes, "B") if layer.memory_self_bytes else DASH, layer.source,
        )  # fmt: skip
        rows.append([_layer_cell(layer.path, layer.kind), *map(cell, numbers)])
    times = ("forward itself", "backward itself", "with all inside", "p95", "p99", "share itself")
    head = ("layer", *times, "calls", "FLOP", "of peak", "saved", "source")
    more = f'<p class="pass">and {len(layers) - MAX_ROWS:,} more</p>' if len(layers) > MAX_ROWS else ""
    summary = "<summary><h2>Layers by the time that they take themselves, in ms</h2></summary>"
    return f"<details>{summary}{table(head, rows)}{more}</details>" if rows else ""


def _layer_cell(path: str, kind: str) -> str:
    return f'<td><span class="mono">{html_text(path or "(the model)")}</span><span class="kind">{html_text(kind)}</span></td>'


def _comparison(comparison: ProfileComparison) -> str:
    shown, left_out = shown_changes(comparison, MAX_ROWS)
    rows = []
    for one in (comparison.step, *comparison.phases, *shown):
        times = milliseconds(one.before.median_ms), milliseconds(one.after.median_ms), factor(one.ratio)
        verdict = f'<td class="verdict-{html_text(one.verdict).split()[0]}">{html_text(one.verdict)}</td>'
        rows.append((_layer_cell(one.path, one.kind), *map(cell, times), verdict))
    more = f'<p class="pass">{html_text(left_out)}</p>' if left_out else ""
    layers = table(("compared", "before, ms", "after, ms", "ratio", "verdict"), rows)
    return (
        f'<div class="finding info"><div class="head"><b>{html_text(comparison.sentence)}</b></div>{bullet_list(comparison.notes)}</div>'
        f"<details><summary>layer by layer</summary>{layers}{more}</details>"
    )

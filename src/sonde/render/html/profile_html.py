"""A profile as one HTML page: flame graphs of forward and backward on one time scale, tables, and a comparison.

All positions, widths and texts are computed here; the script only moves them when a layer is selected or zoomed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sonde.formatting import DASH, factor, milliseconds, printable, si_number, whole_percent
from sonde.render.html.html_page import bullet_list, cell, definition_list, html_lines, html_page, html_text, json_script, resource, table
from sonde.render.profile_content import headline, outside_layers, phases, profile_facts, sections
from sonde.render.profile_tree import LayerNode, forest
from sonde.render.terminal.profile_terminal import profile_text, shown_changes

if TYPE_CHECKING:
    from sonde.profiler import ProfileComparison, ProfileReport

NUM_TONES = 8  # classes of layers with their own color: the eye distinguishes no more
MAX_ROWS = 40  # of a table
NARROWEST = 0.2  # of the page, for the narrower of the two flames
DIRECTIONS = ("forward", "backward")


def profile_html(report: ProfileReport, comparison: ProfileComparison | None = None) -> str:
    """The whole page. Without a script running, the tree in characters is there instead of the flames."""
    body = "".join(
        (
            f"<style>{resource('flame.css')}</style>",
            f"<h1>{html_text(report.title or 'Profile')}</h1>",
            f'<p class="story">{html_text(headline(report))}</p>',
            _comparison(comparison) if comparison is not None else "",
            definition_list("notes", profile_facts(report)[1:]),
            _phases(report),
            _flames(report),
            _advice(report),
            _layers(report),
            _sections(report),
        )
    )
    return html_page(f"Profile of {report.title or 'a model'}", body, script=resource("flame.js"))


# -- the flames -----------------------------------------------------------------------------------


def flame_boxes(report: ProfileReport) -> list[dict[str, Any]]:
    """One box per layer: its place in both flame graphs, as shares of their width, and its facts."""
    tones = {kind: tone for tone, kind in enumerate(_kinds(report)[:NUM_TONES])}
    trees = forest(report.layers)
    whole = {direction: math.fsum(_length(tree, direction) for tree in trees) for direction in DIRECTIONS}
    result: list[dict[str, Any]] = []
    left = dict.fromkeys(DIRECTIONS, 0.0)
    for tree in trees:
        widths = {each: _length(tree, each) / whole[each] if whole[each] > 0 else 0.0 for each in DIRECTIONS}
        _place(report, tree, -1, 0, dict(left), widths, tones, result)
        left = {each: left[each] + widths[each] for each in DIRECTIONS}
    return result


def _place(
    report: ProfileReport, node: LayerNode, above: int, depth: int, left: dict[str, float], widths: dict[str, float], tones: dict[str, int],
    result: list[dict[str, Any]],
) -> None:  # fmt: skip
    number = len(result)
    path = node.layers[0].path
    places = [round(value, 6) for each in DIRECTIONS for value in (left[each], widths[each])]
    result.append(
        {
            "name": printable(node.name), "path": printable(path or "(the model)"), "kind": printable(node.kind),
            "above": above, "depth": depth, "at": places, "tone": tones.get(node.kind, NUM_TONES), "facts": _box_facts(report, node),
        }
    )  # fmt: skip
    # Medians do not add up exactly: where the parts are longer than the whole, they are drawn in proportion.
    inside = {each: math.fsum(_length(child, each) for child in node.children) for each in DIRECTIONS}
    for child in node.children:
        share = {each: _length(child, each) / max(_length(node, each), inside[each]) if inside[each] > 0 else 0.0 for each in DIRECTIONS}
        child_widths = {each: widths[each] * share[each] for each in DIRECTIONS}
        _place(report, child, number, depth + 1, dict(left), child_widths, tones, result)
        left = {each: left[each] + child_widths[each] for each in DIRECTIONS}


def _length(node: LayerNode, direction: str) -> float:
    return node.forward_ms if direction == "forward" else node.backward_ms


def _kinds(report: ProfileReport) -> list[str]:
    """Classes of layers, by the time that they take themselves."""
    own: dict[str, float] = {}
    for layer in report.layers:
        own[layer.kind] = own.get(layer.kind, 0.0) + (layer.self_ms if math.isfinite(layer.self_ms) else 0.0)
    return sorted(own, key=lambda kind: -own[kind])


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
        facts.append(f"keeps {si_number(node.memory_bytes, 'B')}")
    if node.calls != 1:
        facts.append(f"{node.calls:g} calls")
    return [*facts, printable(node.source)] if node.source else facts


def _flames(report: ProfileReport) -> str:
    found = flame_boxes(report)
    if not found:
        return ""
    data = {"boxes": found, "depth": max(box["depth"] for box in found) + 1}
    lengths = [math.fsum(_length(tree, each) for tree in forest(report.layers)) for each in DIRECTIONS]
    panels = []
    for direction, ms in zip(DIRECTIONS, lengths):
        if ms > 0:
            share = max(ms / math.fsum(lengths), NARROWEST)
            panels.append(
                f'<div class="flame" style="flex:{share:.3f} 1 0"><h3>{direction} <span>{milliseconds(ms)} ms</span></h3>'
                f'<div class="boxes" data-direction="{DIRECTIONS.index(direction)}"></div></div>'
            )
    legend = "".join(
        f'<span class="tone{tone}"><i></i>{html_text(kind)}</span>' for tone, kind in enumerate(_kinds(report)[:NUM_TONES])
    )
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


# -- the rest of the page -------------------------------------------------------------------------


def _phases(report: ProfileReport) -> str:
    known = [(name, spread, share) for name, spread, share in phases(report) if share > 0]
    if not known:
        return ""
    parts = "".join(
        f'<div class="phase {html_text(name)}" style="flex:{share:.4f} 1 0"></div>' for name, _, share in known
    )
    words = "".join(
        f'<span class="{html_text(name)}"><i></i>{html_text(name)} {milliseconds(spread.median_ms)} ms, {whole_percent(share)}</span>'
        for name, spread, share in known
    )
    return f'<h2>Phases of a step</h2><div class="phases">{parts}</div><div class="legend">{words}</div>'


def _advice(report: ProfileReport) -> str:
    slow = [f"{one.where}: {milliseconds(one.ms)} ms; {one.why}" for one in report.bottlenecks()]
    lists = (("What takes the time", slow), ("What to try", report.recommendations()), ("Notes", report.notes))
    return "".join(f"<h2>{title}</h2>{bullet_list(texts)}" for title, texts in lists if texts)


def _layers(report: ProfileReport) -> str:
    layers = sorted(report.layers, key=lambda layer: -(layer.self_ms if math.isfinite(layer.self_ms) else 0.0))
    rows = []
    for layer in layers[:MAX_ROWS]:
        speed = layer.flops_per_s
        numbers = (
            milliseconds(layer.forward_self_ms), milliseconds(layer.backward_self_ms),
            milliseconds(layer.total_ms), whole_percent(report.share(layer.self_ms)), f"{layer.calls:g}",
            si_number(layer.flops_self, "FLOP") if layer.flops_self else DASH,
            whole_percent(speed / report.peak_flops_per_s) if speed and report.peak_flops_per_s > 0 else DASH,
            si_number(layer.memory_self_bytes, "B") if layer.memory_self_bytes else DASH, layer.source,
        )  # fmt: skip
        rows.append([_layer_cell(layer.path, layer.kind), *map(cell, numbers)])
    head = ("layer", "forward itself", "backward itself", "with all inside", "share itself", "calls", "FLOP", "of peak", "keeps", "source")
    more = f'<p class="pass">and {len(layers) - MAX_ROWS:,} more</p>' if len(layers) > MAX_ROWS else ""
    summary = "<summary><h2>Layers by the time that they take themselves, in ms</h2></summary>"
    return f"<details>{summary}{table(head, rows)}{more}</details>" if rows else ""


def _sections(report: ProfileReport) -> str:
    rows = [[cell(text) for text in row] for row in sections(report)]
    return f"<h2>Sections</h2>{table(('section', 'calls', 'total ms', 'one call ms'), rows)}" if rows else ""


def _layer_cell(path: str, kind: str) -> str:
    return f'<td><span class="mono">{html_text(path or "(the model)")}</span><span class="kind">{html_text(kind)}</span></td>'


def _comparison(comparison: ProfileComparison) -> str:
    shown, left_out = shown_changes(comparison, MAX_ROWS)
    rows = [
        (
            _layer_cell(one.path, one.kind),
            cell(milliseconds(one.before.median_ms)),
            cell(milliseconds(one.after.median_ms)),
            cell(factor(one.ratio)),
            f'<td class="verdict-{html_text(one.verdict).split()[0]}">{html_text(one.verdict)}</td>',
        )
        for one in (comparison.step, *comparison.phases, *shown)
    ]
    more = f'<p class="pass">{html_text(left_out)}</p>' if left_out else ""
    layers = table(("compared", "before, ms", "after, ms", "ratio", "verdict"), rows)
    return (
        f'<div class="finding info"><div class="head"><b>{html_text(comparison.sentence)}</b></div>{bullet_list(comparison.notes)}</div>'
        f"<details><summary>layer by layer</summary>{layers}{more}</details>"
    )

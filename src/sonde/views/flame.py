"""A profile as one page: forward and backward as flames that hang from the model (icicles), on one scale of time.

Every place, width and text comes from here; the script only moves them, when a layer is looked at or zoomed into.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from sonde.report import strict
from sonde.views.printable import printable
from sonde.views.profile_facts import facts, headline, outside, phases, sections
from sonde.views.profile_text import profile_text, told_changes
from sonde.views.profile_tree import Node, forest
from sonde.views.quantities import NOTHING, factor, large, milliseconds, whole_percent
from sonde.views.sheet import html_text, sheet

if TYPE_CHECKING:
    from sonde.profiler import LayerChange, ProfileComparison, ProfileReport

NUM_TONES = 8  # classes of layers with a colour of their own: the eye tells no more apart
MAX_ROWS = 40  # of a table
NARROWEST = 0.2  # of the page, for the narrower of the two flames
DIRECTIONS = ("forward", "backward")


def page(report: ProfileReport, comparison: ProfileComparison | None = None) -> str:
    """The whole page. Without a script running, the tree in characters is there instead of the flames."""
    script = _resource("flame.js")
    body = "".join(
        (
            f"<style>{_resource('flame.css')}</style>",
            f"<h1>{html_text(report.title or 'Profile')}</h1>",
            f'<p class="story">{html_text(headline(report))}</p>',
            _comparison(comparison) if comparison is not None else "",
            _facts(report),
            _phases(report),
            _flames(report),
            _advice(report),
            _layers(report),
            _sections(report),
        )
    )
    return sheet(f"Profile of {report.title or 'a model'}", body, script=script)


def _resource(name: str) -> str:
    return files("sonde.views").joinpath(name).read_text(encoding="utf-8")


# -- the flames -----------------------------------------------------------------------------------


def boxes(report: ProfileReport) -> list[dict[str, Any]]:
    """One box per layer: its place in both flames, as shares of the whole flame's width, and what is said about it."""
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
    report: ProfileReport, node: Node, above: int, depth: int, left: dict[str, float], widths: dict[str, float], tones: dict[str, int],
    result: list[dict[str, Any]],
) -> None:  # fmt: skip
    number = len(result)
    path = node.layers[0].path
    places = [round(value, 6) for each in DIRECTIONS for value in (left[each], widths[each])]
    result.append(
        {
            "name": printable(node.name), "path": printable(path or "(the model)"), "kind": printable(node.kind),
            "above": above, "depth": depth, "at": places, "tone": tones.get(node.kind, NUM_TONES), "facts": _said(report, node),
        }
    )  # fmt: skip
    # Medians do not add up exactly: where the parts are longer than the whole, they are drawn in proportion.
    inside = {each: math.fsum(_length(child, each) for child in node.children) for each in DIRECTIONS}
    for child in node.children:
        share = {each: _length(child, each) / max(_length(node, each), inside[each]) if inside[each] > 0 else 0.0 for each in DIRECTIONS}
        child_widths = {each: widths[each] * share[each] for each in DIRECTIONS}
        _place(report, child, number, depth + 1, dict(left), child_widths, tones, result)
        left = {each: left[each] + child_widths[each] for each in DIRECTIONS}


def _length(node: Node, direction: str) -> float:
    return node.forward_ms if direction == "forward" else node.backward_ms


def _kinds(report: ProfileReport) -> list[str]:
    """Classes of layers, by the time that they take themselves."""
    own: dict[str, float] = {}
    for layer in report.layers:
        own[layer.kind] = own.get(layer.kind, 0.0) + (layer.self_ms if math.isfinite(layer.self_ms) else 0.0)
    return sorted(own, key=lambda kind: -own[kind])


def _said(report: ProfileReport, node: Node) -> list[str]:
    said = [
        f"forward {milliseconds(node.forward_ms)} ms",
        f"backward {milliseconds(node.backward_ms)} ms",
        f"itself {milliseconds(node.self_ms)} ms",
        f"{whole_percent(report.share(node.total_ms))} of the step",
    ]
    if 0 < node.wobble_ms < node.total_ms:
        said.append(f"±{whole_percent(node.wobble_ms / node.total_ms)}")
    if node.flops:
        said.append(large(node.flops, "FLOP"))
        if report.peak_flops_per_s > 0 and node.total_ms > 0:
            said.append(f"{whole_percent(node.flops / node.total_ms * 1e3 / report.peak_flops_per_s)} of peak")
    if node.memory_bytes:
        said.append(f"keeps {large(node.memory_bytes, 'B')}")
    if node.calls != 1:
        said.append(f"{node.calls:g} calls")
    return [*said, printable(node.source)] if node.source else said


def _flames(report: ProfileReport) -> str:
    found = boxes(report)
    if not found:
        return ""
    data = {"boxes": found, "depth": max(box["depth"] for box in found) + 1}
    # "<" cannot open a tag inside of the data, whatever a layer is called.
    encoded = json.dumps(strict(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
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
    beside = f'<p class="story">In no layer: {html_text(text)}.</p>' if (text := outside(report)) else ""
    fallback = "\n".join(html_text(row) for row in profile_text(report, width=100).split("\n"))
    return (
        '<h2>Layers</h2><div id="flames"><div class="tools"><input id="find" type="search" placeholder="find a layer or class" '
        'aria-label="find a layer or class"><button id="out" type="button" disabled>Zoom out</button>'
        '<span class="keys">click or Enter zooms in, Esc out, arrows walk</span></div>'
        '<output id="said" aria-live="polite">A box is a layer. What lies below, it calls; what is bare, it does itself.</output>'
        f'<div class="panels" tabindex="0" role="application" aria-label="time of layers, forward and backward">{"".join(panels)}</div>'
        f'<div class="legend">{legend}</div>{beside}</div><noscript><pre>{fallback}</pre></noscript>'
        f'<script type="application/json" id="profile">{encoded}</script>'
    )


# -- the rest of the page -------------------------------------------------------------------------


def _facts(report: ProfileReport) -> str:
    rows = "".join(f"<div><dt>{html_text(name)}</dt><dd>{html_text(text)}</dd></div>" for name, text in facts(report)[1:])
    return f'<dl class="notes">{rows}</dl>' if rows else ""


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
    return "".join(f'<h2>{title}</h2><ul class="plain">{_items(texts)}</ul>' for title, texts in lists if texts)


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{html_text(text)}</li>" for text in texts)


def _layers(report: ProfileReport) -> str:
    layers = sorted(report.layers, key=lambda layer: -(layer.self_ms if math.isfinite(layer.self_ms) else 0.0))
    rows = []
    for layer in layers[:MAX_ROWS]:
        speed = layer.flops_per_s
        rows.append(
            (
                (layer.path or "(the model)", layer.kind), milliseconds(layer.forward_self_ms), milliseconds(layer.backward_self_ms),
                milliseconds(layer.total_ms), whole_percent(report.share(layer.self_ms)), f"{layer.calls:g}",
                large(layer.flops_self, "FLOP") if layer.flops_self else NOTHING,
                whole_percent(speed / report.peak_flops_per_s) if speed and report.peak_flops_per_s > 0 else NOTHING,
                large(layer.memory_self_bytes, "B") if layer.memory_self_bytes else NOTHING, layer.source,
            )
        )  # fmt: skip
    head = ("layer", "forward itself", "backward itself", "with all inside", "share itself", "calls", "FLOP", "of peak", "keeps", "source")
    more = f'<p class="pass">and {len(layers) - MAX_ROWS:,} more</p>' if len(layers) > MAX_ROWS else ""
    summary = "<summary><h2>Layers by the time that they take themselves, in ms</h2></summary>"
    return f"<details>{summary}{_table(head, rows)}{more}</details>" if rows else ""


def _sections(report: ProfileReport) -> str:
    rows = sections(report)
    head = ("section", "calls", "total ms", "one call ms")
    return f"<h2>Sections</h2>{_table(head, rows)}" if rows else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def cell(given: object) -> str:
        if isinstance(given, tuple):
            return f'<td><span class="mono">{html_text(given[0])}</span><span class="kind">{html_text(given[1])}</span></td>'
        return f"<td>{html_text(given)}</td>"

    body = "".join(f"<tr>{''.join(cell(each) for each in row)}</tr>" for row in rows)
    names = "".join(f"<th>{html_text(each)}</th>" for each in head)
    return f'<div class="table"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def _comparison(comparison: ProfileComparison) -> str:
    told, left_out = told_changes(comparison, MAX_ROWS)
    rows = "".join(_change_rows([comparison.step, *comparison.phases, *told]))
    head = "".join(f"<th>{name}</th>" for name in ("compared", "before, ms", "after, ms", "ratio", "verdict"))
    notes = f'<ul class="plain">{_items(comparison.notes)}</ul>' if comparison.notes else ""
    more = f'<p class="pass">{html_text(left_out)}</p>' if left_out else ""
    return (
        f'<div class="finding info"><div class="head"><b>{html_text(comparison.sentence)}</b></div>{notes}</div>'
        '<details><summary>layer by layer</summary><div class="table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{more}</details>"
    )


def _change_rows(changes: Sequence[LayerChange]) -> Iterator[str]:
    for one in changes:
        name = f'<span class="mono">{html_text(one.path or "(the model)")}</span><span class="kind">{html_text(one.kind)}</span>'
        verdict = html_text(one.verdict)
        yield (
            f"<tr><td>{name}</td><td>{milliseconds(one.before.median_ms)}</td><td>{milliseconds(one.after.median_ms)}</td>"
            f'<td>{factor(one.ratio)}</td><td class="verdict-{verdict.split()[0]}">{verdict}</td></tr>'
        )

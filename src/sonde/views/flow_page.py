"""Gradient flow as one page with a scrubber. All numbers and lengths come from here; the script only puts them in their places."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sonde.report import strict
from sonde.rules.words import number
from sonde.views.axis import Axis
from sonde.views.flow_animation import NOTHING, STATES, FlowFrame, ascii_animation, by_depth, layer_names, norm_axis, share, state, thinned
from sonde.views.printable import printable
from sonde.views.sheet import html_text, sheet

MAX_CELLS = 200_000  # layers times frames: above it the page would be slow to open

STYLE = """
.flow { position: sticky; top: 0; background: var(--paper); padding: 0.75rem 0; z-index: 1; }
.flow .row { display: flex; gap: 0.75rem; align-items: center; }
.flow input { flex: 1; accent-color: var(--accent); } .flow output { min-width: 7rem; font-weight: 650; text-align: right; }
.flow button { font: inherit; min-width: 4.5rem; padding: 0.2rem 0.8rem; border: 1px solid var(--line); border-radius: 6px;
  background: var(--card); color: var(--ink); cursor: pointer; }
.flow canvas { width: 100%; height: 72px; margin-top: 0.6rem; image-rendering: pixelated; border: 1px solid var(--line);
  border-radius: 4px; cursor: crosshair; display: block; }
.bars { width: 100%; }
.bars td { white-space: nowrap; padding-block: 0.1rem; } .bars .name { max-width: 20rem; overflow: hidden; text-overflow: ellipsis; }
.bars .track { width: 45%; } .bars .bar { height: 0.85rem; border-radius: 2px; background: var(--tone); }
.normal { --tone: #0072b2; } .vanishing { --tone: #e69f00; } .exploding { --tone: #d55e00; }
.nonfinite { --tone: repeating-linear-gradient(45deg, #d0021b 0 5px, #7d0110 5px 9px); }
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; color: var(--soft); font-size: 0.85rem; margin-top: 0.6rem; }
.legend i { display: inline-block; width: 0.9rem; height: 0.7rem; margin-right: 0.4rem; border-radius: 2px; background: var(--tone); }
"""

SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("frames").textContent);
const range = document.getElementById("scrubber"), button = document.getElementById("play"), where = document.getElementById("where");
const classes = ["normal", "vanishing", "exploding", "nonfinite"], colours = ["#0072b2", "#e69f00", "#d55e00", "#d0021b"];
const rows = data.layers.map((name, i) => {
  const row = document.getElementById("bars").insertRow(), cells = [0, 1, 2, 3, 4].map(() => row.insertCell());
  cells[0].textContent = name; cells[0].title = name; cells[0].className = "name mono"; cells[1].className = "track";
  const bar = document.createElement("div"); cells[1].append(bar);
  return { bar, texts: cells.slice(2) };
});
function show(at) {
  const frame = data.frames[at];
  range.value = at; where.textContent = "step " + frame.step;
  rows.forEach((row, i) => {
    const cell = frame.cells[i];
    row.bar.className = cell ? "bar " + classes[cell[1]] : "bar";
    row.bar.style.width = cell ? 100 * cell[0] + "%" : "0";
    row.texts.forEach((text, k) => {
      text.textContent = cell ? cell[2 + k] : k ? "" : "no gradient";
      text.className = cell && cell[1] === 3 ? "bad" : "";
    });
  });
}
const map = document.getElementById("map"), pen = map.getContext("2d");
// One bad layer of hundreds is less than a pixel high: a strip at the top marks its frame.
const strip = Math.ceil(data.layers.length * 0.12);
map.width = data.frames.length; map.height = data.layers.length + strip;
data.frames.forEach((frame, x) => {
  let worst = 0;
  frame.cells.forEach((cell, y) => {
    if (!cell) return;
    worst = Math.max(worst, cell[1]);
    pen.globalAlpha = cell[1] === 3 ? 1 : 0.12 + 0.88 * cell[0]; pen.fillStyle = colours[cell[1]]; pen.fillRect(x, y + strip, 1, 1);
  });
  if (worst > 1) { pen.globalAlpha = 1; pen.fillStyle = colours[worst]; pen.fillRect(x, 0, 1, strip); }
});
map.addEventListener("click", (event) => {
  const box = map.getBoundingClientRect();
  show(Math.min(data.frames.length - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * data.frames.length))));
});
let timer = 0;
function stop() { clearInterval(timer); timer = 0; button.textContent = "Play"; }
function advance() {
  const at = Number(range.value) + 1;
  if (at >= data.frames.length) stop(); else show(at);
}
button.addEventListener("click", () => {
  if (timer) { stop(); return; }
  if (Number(range.value) === data.frames.length - 1) show(0);
  timer = setInterval(advance, 120); button.textContent = "Pause";
});
range.addEventListener("input", () => { stop(); show(Number(range.value)); });
show(0);
"""


def page(frames: Sequence[FlowFrame]) -> str:
    """The whole page. Without a script running (a mail client, say) the animation in characters is there instead."""
    title = "Gradient flow"
    if not any(frame.layers for frame in frames):
        return sheet(title, f'<h1>{title}</h1><p class="story">{NOTHING}</p>')
    names = by_depth(layer_names(frames))
    shown = thinned(frames, max(MAX_CELLS // len(names), 2))
    axis = norm_axis(shown)
    data = {
        "layers": [printable(name) for name in names],
        "frames": [{"step": frame.step, "cells": _cells(frame, names, axis)} for frame in shown],
    }
    # "<" cannot open a tag inside of the data, whatever a layer is called.
    encoded = json.dumps(strict(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    steps = f"{len(shown)} of {len(frames)} frames, the worst of each group" if len(shown) < len(frames) else f"{len(frames)} frames"
    legend = "".join(f'<span class="{_class(each)}"><i></i>{each}</span>' for each in STATES)
    head = "".join(f"<th>{each}</th>" for each in ("layer", "", "norm", "mean |g|", "max |g|"))
    body = (
        f'<style>{STYLE}</style><h1>{title}</h1><p class="story">{len(names)} layers, {steps}, steps {shown[0].step} to {shown[-1].step}. '
        f"Bars show the L2 norm of each gradient on one {axis.scale} axis.</p>"
        '<div class="flow"><div class="row"><button id="play" type="button">Play</button>'
        f'<input id="scrubber" type="range" min="0" max="{len(shown) - 1}" value="0" aria-label="frame"><output id="where"></output></div>'
        '<canvas id="map" role="img" aria-label="all frames, one row per layer; above them a mark where a layer explodes"></canvas>'
        f'<div class="legend">{legend}</div></div>'
        f'<div class="table"><table class="bars"><thead><tr>{head}</tr></thead><tbody id="bars"></tbody></table></div>'
        f"<noscript><pre>{_escaped_lines(ascii_animation(shown))}</pre></noscript>"
        f'<script type="application/json" id="frames">{encoded}</script>'
    )
    return sheet(title, body, script=SCRIPT)


def _escaped_lines(text: str) -> str:
    return "\n".join(html_text(row) for row in text.split("\n"))


def _class(name: str) -> str:
    return name.replace("not finite", "nonfinite")


def _cells(frame: FlowFrame, names: Sequence[str], axis: Axis) -> list[list[object] | None]:
    by_name = {layer.name: layer for layer in frame.layers}
    cells: list[list[object] | None] = []
    for name in names:
        layer = by_name.get(name)
        if layer is None:
            cells.append(None)
            continue
        texts = [number(each) for each in (layer.grad_norm, layer.mean_abs_grad, layer.max_abs_grad)]
        cells.append([round(share(layer, axis), 4), STATES.index(state(layer)), *texts])
    return cells

"use strict";
const data = JSON.parse(document.getElementById("frames").textContent);
const range = document.getElementById("scrubber"), button = document.getElementById("play"), where = document.getElementById("where");
const classes = ["normal", "vanishing", "exploding", "nonfinite"], colors = ["#0072b2", "#e69f00", "#d55e00", "#d0021b"];
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
    pen.globalAlpha = cell[1] === 3 ? 1 : 0.12 + 0.88 * cell[0]; pen.fillStyle = colors[cell[1]]; pen.fillRect(x, y + strip, 1, 1);
  });
  if (worst > 1) { pen.globalAlpha = 1; pen.fillStyle = colors[worst]; pen.fillRect(x, 0, 1, strip); }
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

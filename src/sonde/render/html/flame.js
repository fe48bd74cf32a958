"use strict";
const { boxes, depth } = JSON.parse(document.getElementById("profile").textContent);
const HIGH = 23, said = document.getElementById("said"), out = document.getElementById("out"), find = document.getElementById("find");
const panels = document.querySelector(".panels"), flames = [...document.querySelectorAll(".boxes")];
const inside = boxes.map(() => []), roots = [];
boxes.forEach((box, i) => (box.above < 0 ? roots : inside[box.above]).push(i));
let at = -1, zoomed = -1;

// What is drawn of each flame: one element per layer, moved and resized when the zoom changes.
const drawn = flames.map((flame) => boxes.map((box, i) => {
  const element = document.createElement("div");
  element.className = "box tone" + box.tone;
  element.textContent = box.name;
  element.dataset.box = i;
  flame.append(element);
  return element;
}));

function lineage(i) {
  const line = new Set();
  for (; i >= 0; i = boxes[i].above) line.add(i);
  return line;
}

function place() {
  const around = lineage(zoomed < 0 ? -1 : boxes[zoomed].above), top = zoomed < 0 ? 0 : boxes[zoomed].depth;
  flames.forEach((flame, side) => {
    const k = 2 * Number(flame.dataset.direction), [from, width] = zoomed < 0 ? [0, 1] : boxes[zoomed].at.slice(k, k + 2);
    const room = flame.clientWidth || 1;
    let deepest = 1;
    boxes.forEach((box, i) => {
      const element = drawn[side][i], isAround = around.has(i);
      let left = (box.at[k] - from) / (width || 1), wide = box.at[k + 1] / (width || 1);
      if (isAround) { left = 0; wide = 1; }
      const shown = width > 0 && wide * room >= 0.3 && left < 0.99999 && left + wide > 0.00001 && (isAround || box.depth >= top);
      element.hidden = !shown;
      if (!shown) return;
      element.style.left = 100 * left + "%"; element.style.width = 100 * Math.min(wide, 1) + "%"; element.style.top = HIGH * box.depth + "px";
      element.classList.toggle("thin", wide * room < 14); element.classList.toggle("around", isAround);
      if (wide * room < 14) element.textContent = ""; else if (!element.textContent) element.textContent = box.name;
      deepest = Math.max(deepest, box.depth + 1);
    });
    flame.style.height = HIGH * deepest + "px";
  });
  out.disabled = zoomed < 0;
}

function look(i) {
  at = i;
  drawn.forEach((elements) => elements.forEach((element, k) => element.classList.toggle("at", k === i)));
  if (i < 0) return;
  said.replaceChildren();
  const name = document.createElement("b"), kind = document.createElement("i");
  name.textContent = boxes[i].path; kind.textContent = boxes[i].kind;
  said.append(name, kind, boxes[i].facts.join("  ·  "));
}

function zoom(i) {
  zoomed = i >= 0 && boxes[i].above < 0 && roots.length === 1 ? -1 : i;
  place();
}

function near(step) {
  const row = boxes[at].above < 0 ? roots : inside[boxes[at].above];
  return row[Math.min(Math.max(row.indexOf(at) + step, 0), row.length - 1)];
}

panels.addEventListener("mouseover", (event) => { if (event.target.dataset.box) look(Number(event.target.dataset.box)); });
panels.addEventListener("click", (event) => {
  if (!event.target.dataset.box) return;
  look(Number(event.target.dataset.box)); zoom(at);
});
panels.addEventListener("keydown", (event) => {
  if (at < 0) at = roots[0];
  const moves = {
    ArrowUp: () => look(Math.max(boxes[at].above, roots[0])), ArrowDown: () => look(inside[at].length ? inside[at][0] : at),
    ArrowLeft: () => look(near(-1)), ArrowRight: () => look(near(1)), Enter: () => zoom(at), Home: () => look(roots[0]),
    Escape: () => zoom(zoomed < 0 ? -1 : boxes[zoomed].above),
  };
  if (event.key in moves) { moves[event.key](); event.preventDefault(); }
});
out.addEventListener("click", () => zoom(boxes[zoomed].above));
find.addEventListener("input", () => {
  const wanted = find.value.trim().toLowerCase();
  boxes.forEach((box, i) => {
    const miss = wanted && !(box.path + " " + box.kind).toLowerCase().includes(wanted);
    drawn.forEach((elements) => elements[i].classList.toggle("dim", Boolean(miss)));
  });
});
new ResizeObserver(place).observe(panels);
place();

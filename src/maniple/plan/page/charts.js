"use strict";
// Elements, words and charts. Whatever is data becomes text or a number, never markup.

const SVG = "http://www.w3.org/2000/svg";
const GIB = 2 ** 30;

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("data-") || name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function painted(tag, color, properties = {}) {
  const element = make(tag, properties);
  element.style.background = `var(--${color})`;
  return element;
}

// --- words -----------------------------------------------------------------------------------------------------------

const number = (value, digits = 0) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const significant = (value) => number(value, value >= 100 || value === 0 ? 0 : value >= 10 ? 1 : value >= 1 ? 2 : 3);
const gib = (bytes, digits = 2) => number(bytes / GIB, digits);
const percent = (share, digits = 0) => `${number(100 * share, digits)}%`;

function seconds(value) {
  if (value >= 1 || value === 0) return `${significant(value)} s`;
  return value >= 1e-3 ? `${significant(value * 1e3)} ms` : `${significant(value * 1e6)} µs`;
}

function span(shares) {
  const [least, most] = [Math.min(...shares), Math.max(...shares)];
  return most - least < 0.005 ? percent(least) : `${number(100 * least)}–${percent(most)}`;
}

// --- tables, legends, tips -------------------------------------------------------------------------------------------

// A row with fewer cells than headings ends in words that take the rest.
function table(caption, headings, rows, { left = 1, marked = -1 } = {}) {
  const side = (index) => (index < left ? "" : "right");
  const head = make("tr", {}, ...headings.map((text, i) => make("th", { className: side(i), scope: "col" }, text)));
  const cell = (row, text, i) => {
    const rest = i === row.length - 1 ? headings.length - i : 1;
    return make("td", { className: rest > 1 ? "" : side(i), colSpan: rest }, text);
  };
  const body = rows.map((row, number) =>
    make("tr", { className: number === marked ? "marked" : "" }, ...row.map((text, i) => cell(row, text, i))));
  return make("table", { "aria-label": caption }, make("thead", {}, head), make("tbody", {}, ...body));
}

function legend(list, entries) {
  list.replaceChildren(...entries.map(([color, text]) => make("li", {}, painted("i", color), text)));
}

const tip = document.getElementById("tip");

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const below = event.clientY + 18 + height < innerHeight;
  tip.style.left = `${Math.max(6, Math.min(event.clientX + 14, innerWidth - width - 6))}px`;
  tip.style.top = `${below ? event.clientY + 18 : Math.max(6, event.clientY - height - 12)}px`;
}

function hideTip() {
  tip.hidden = true;
}

function tipped(element, text) {
  element.addEventListener("pointermove", (event) => showTip(event, text));
  element.addEventListener("pointerleave", hideTip);
  return element;
}

// --- charts ----------------------------------------------------------------------------------------------------------

function ticks(most, about) {
  const raw = most / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, index) => index * step);
}

// Bars of each rank's bytes by kind, and the line that they must stay left of.
function memoryChart(box, cell, capacity, gpu, whole) {
  const width = Math.max(260, box.clientWidth);
  const count = cell.ranks.length;
  const bar = count <= 20 ? 18 : count <= 48 ? 11 : 5;
  const row = bar + (bar > 10 ? 6 : 2);
  const [left, right, top] = [58, 74, 24];
  const totals = cell.ranks.map((rank) => Object.values(rank.bytes).reduce((sum, size) => sum + size, 0));
  const largest = Math.max(...totals);
  const most = whole ? Math.max(capacity, largest) : largest;
  const bottom = top + count * row;
  const x = (bytes) => left + (bytes / most) * (width - left - right);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${bottom + 26}`, role: "img" });
  svg.setAttribute("aria-label", `Memory of ${count} pipeline ranks in GiB. ${cell.verdict}.`);
  for (const tick of ticks(most / GIB, width < 500 ? 4 : 8)) {
    svg.append(
      draw("line", { class: "grid", x1: x(tick * GIB), x2: x(tick * GIB), y1: top - 4, y2: bottom }),
      draw("text", { x: x(tick * GIB), y: bottom + 17, "text-anchor": "middle" }, number(tick)),
    );
  }
  svg.append(draw("text", { x: width, y: bottom + 17, "text-anchor": "end" }, "GiB"));
  if (x(capacity) <= width - right + 1) {
    svg.append(
      draw("line", { class: "limit", x1: x(capacity), x2: x(capacity), y1: top - 6, y2: bottom + 2 }),
      draw("text", { class: "limit-name", x: Math.min(x(capacity) + 40, width), y: top - 11, "text-anchor": "end" },
        `${gpu}: ${gib(capacity, 1)} GiB`),
    );
  }
  const named = Math.ceil(14 / row);
  cell.ranks.forEach((rank, index) => {
    const y = top + index * row;
    const tight = index === cell.tightest;
    const group = draw("g");
    group.append(draw("rect", { x: 0, y: y - 1, width, height: row, fill: "transparent" }));
    if (index % named === 0 || tight) {
      const name = draw("text", { x: left - 10, y: y + bar / 2 + 4, "text-anchor": "end" }, `rank ${index}`);
      if (tight) name.setAttribute("class", "strong");
      group.append(name);
    }
    let sum = 0;
    for (const [kind, size] of Object.entries(rank.bytes)) {
      const part = draw("rect", { x: x(sum), y, width: Math.max(0, x(sum + size) - x(sum)), height: bar });
      part.style.fill = `var(--${kind})`;
      part.dataset.kind = kind;
      group.append(part);
      sum += size;
    }
    if (bar > 10) {
      const text = draw("text", { class: tight ? "strong clear" : "clear", x: x(sum) + 7, y: y + bar / 2 + 4 }, gib(sum, 1));
      group.append(text);
    }
    const parts = Object.entries(rank.bytes).map(([kind, size]) => `${kind} ${gib(size)}`).join("\n");
    svg.append(tipped(group, `rank ${index}: ${rank.holds.join(" · ")}\n${gib(sum)} GiB, ${percent(sum / capacity)} of the GPU\n${parts}`));
  });
  box.replaceChildren(svg);
}

// One bar of the whole step, then a line a part; a mark stands where the job's own is.
function timeChart(box, cell, own) {
  const most = Math.max(...cell.parts.map(([, time]) => time), ...(own ? own.parts.map(([, time]) => time) : []));
  const whole = make("div", { className: "whole", role: "img", "aria-label": `A step of ${seconds(cell.seconds)} by its parts` });
  for (const [name, time, family] of cell.parts) {
    const piece = painted("div", family);
    piece.style.width = `${(100 * time) / cell.seconds}%`;
    whole.append(tipped(piece, `${name}\n${seconds(time)}, ${percent(time / cell.seconds, 1)}`));
  }
  const before = new Map(own ? own.parts.map(([name, time]) => [name, time]) : []);
  const gone = own ? own.parts.filter(([name]) => !cell.parts.some(([other]) => other === name)) : [];
  const parts = [...cell.parts, ...gone.map(([name, , family]) => [name, 0, family])];
  const rows = parts.map(([name, time, family]) => {
    const fill = painted("div", family, { className: "fill" });
    fill.style.width = `${(100 * time) / most}%`;
    const track = make("div", { className: "track" }, fill);
    if (before.has(name)) {
      const was = make("div", { className: "was" });
      was.style.left = `calc(${(100 * before.get(name)) / most}% - 1px)`;
      track.append(was);
    }
    const words = before.has(name) ? `${seconds(time)}; the job: ${seconds(before.get(name))}` : seconds(time);
    return tipped(
      make("li", { className: "bar" },
        make("span", { className: "name" }, name), track,
        make("span", { className: "number" }, seconds(time)),
        make("span", { className: "share" }, percent(time / cell.seconds, 1))),
      `${name}: ${words}`);
  });
  box.replaceChildren(whole, make("ul", { className: "bars" }, ...rows));
}

// Speed a GPU at each size, over that of the first; a cross where the job cannot run.
function scalingChart(box, curves, bend) {
  const width = Math.max(260, box.clientWidth);
  const [height, left, right, top, bottom] = [260, 52, 104, 14, 36];
  const sizes = curves[0].map((point) => point.gpus);
  const last = Math.max(1, sizes.length - 1);
  const most = Math.max(1, ...curves.flat().map((point) => point.efficiency ?? 0)) * 1.05;
  const x = (index) => left + (index / last) * (width - left - right);
  const y = (share) => height - bottom - (share / most) * (height - bottom - top);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", `Tokens a second and GPU at ${sizes.map((size) => number(size)).join(", ")} GPUs, over those at ${number(sizes[0])}.`);
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(
      draw("line", { class: "grid", x1: left, x2: width - right, y1: y(share), y2: y(share) }),
      draw("text", { x: left - 10, y: y(share) + 4, "text-anchor": "end" }, percent(share)),
    );
  }
  svg.append(draw("line", { class: "bend", x1: left, x2: width - right, y1: y(bend), y2: y(bend) }));
  sizes.forEach((size, index) =>
    svg.append(draw("text", { x: x(index), y: height - 12, "text-anchor": "middle" }, number(size))));
  svg.append(draw("text", { x: width, y: height - 12, "text-anchor": "end" }, "GPUs"));
  const ends = [];
  for (const points of curves) {
    const color = `var(--${points[0].kind})`;
    const run = points.map((point, index) => [point, index]).filter(([point]) => point.efficiency !== null);
    const line = draw("polyline", {
      points: run.map(([point, index]) => `${x(index)},${y(point.efficiency)}`).join(" "),
      fill: "none", "stroke-width": 2, "stroke-linejoin": "round",
    });
    line.style.stroke = color;
    svg.append(line);
    for (const [point, index] of run) {
      const dot = draw("circle", { cx: x(index), cy: y(point.efficiency), r: 4.5 });
      dot.style.fill = point.fits ? color : "var(--sheet)";
      if (!point.fits) dot.setAttribute("class", "over");
      const fits = point.fits ? "fits" : "does not fit";
      svg.append(tipped(dot, `${point.kind} scaling, ${number(point.gpus)} GPUs\n${number(point.tokens_per_second_per_gpu)} tokens/s a GPU, ${percent(point.efficiency, 1)}\na step of ${seconds(point.seconds)}, ${number(point.micro_batches)} micro-batches\n${gib(point.memory, 1)} GiB: ${fits}`));
    }
    points.forEach((point, index) => {
      if (point.efficiency !== null) return;
      const cross = draw("text", { class: "limit-name", x: x(index), y: height - bottom - 6, "text-anchor": "middle" }, "×");
      svg.append(tipped(cross, `${point.kind} scaling, ${number(point.gpus)} GPUs: cannot run\n${point.why}`));
    });
    const [point, index] = run.at(-1);
    const early = index < last; // the other curve may go on: the name stands above it, not in it
    ends.push({ at: y(point.efficiency) - (early ? 13 : 0), x: x(index) + (early ? 4 : 12), color, text: `${points[0].kind} ${percent(point.efficiency)}` });
  }
  ends.sort((one, other) => one.at - other.at);
  if (ends.length > 1 && ends[0].x === ends[1].x && ends[1].at - ends[0].at < 15) ends[1].at = ends[0].at + 15;
  for (const end of ends) {
    const text = draw("text", { class: "strong clear", x: end.x, y: end.at + 4 }, end.text);
    text.style.fill = end.color;
    svg.append(text);
  }
  box.replaceChildren(svg);
}

// The simulated pipeline on a canvas: a row a rank, a block a pass, its lower part the share that waits for exchange.

const PASSES = { F: ["forward", "forward"], B: ["backward", "backward"], W: ["weight gradient", "weight"] };

class Timeline {
  constructor(canvas, data) {
    this.canvas = canvas;
    this.data = data;
    this.length = data.seconds * 1e6;
    this.from = 0;
    this.to = this.length;
    this.chunks = 1 + Math.max(...data.passes.flatMap((pass) => pass.chunks));
    this.ranks = data.ranks.map((flat) => this.decoded(flat));
    canvas.setAttribute("aria-label",
      `Passes of ${data.micro_batches} micro-batches through ${data.ranks.length} pipeline ranks, ${seconds(data.seconds)} long`);
    this.listen();
  }

  decoded(flat) {
    const out = [];
    let at = 0;
    for (let index = 0; index < flat.length;) {
      const pass = this.data.passes[flat[index + 1]];
      const start = at + flat[index];
      const width = pass.kinds.length;
      out.push({ start, end: start + pass.us, pass, batches: flat.slice(index + 2, index + 2 + width) });
      at = start + pass.us;
      index += 2 + width;
    }
    return out;
  }

  get row() {
    return Math.max(4, Math.min(24, Math.floor(420 / this.ranks.length)));
  }

  draw() {
    const { canvas, row } = this;
    const width = canvas.clientWidth;
    const height = this.ranks.length * row + 26;
    const scale = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const colors = Object.fromEntries(["forward", "backward", "weight", "exchange", "track", "soft", "sheet"].map((name) => [name, color(name)]));
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    this.left = this.ranks.length > 99 ? 30 : 24;
    this.across = (width - this.left) / (this.to - this.from);
    const x = (time) => this.left + (time - this.from) * this.across;
    const high = row > 8 ? row - 3 : row - 1;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.ranks.forEach((spans, rank) => {
      const y = rank * row;
      pen.fillStyle = colors.track;
      pen.fillRect(this.left, y, width - this.left, high);
      pen.fillStyle = colors.soft;
      pen.textAlign = "right";
      if (rank % Math.ceil(13 / row) === 0) pen.fillText(String(rank), this.left - 7, y + high / 2);
      pen.textAlign = "center";
      for (const span of spans.slice(first(spans, this.from))) {
        if (span.start > this.to) break;
        const begin = Math.max(this.left, x(span.start));
        const wide = Math.max(0.4, x(span.end) - begin);
        this.block(pen, colors, span, begin, y, wide > 4 ? wide - 1 : wide, high);
      }
    });
    pen.globalAlpha = 1;
    pen.fillStyle = colors.soft;
    const bottom = this.ranks.length * row + 12;
    const shown = (this.to - this.from) / 1e6;
    for (const tick of ticks(shown, width < 500 ? 4 : 8)) {
      const time = this.from / 1e6 + tick;
      const at = x(time * 1e6);
      pen.textAlign = tick === 0 ? "left" : at > width - 24 ? "right" : "center";
      pen.fillText(`${number(time, shown < 1 ? 3 : shown < 20 ? 2 : 0)} s`, at, bottom);
    }
  }

  block(pen, colors, { pass, batches }, x, y, wide, high) {
    const each = high / pass.kinds.length;
    [...pass.kinds].forEach((kind, index) => {
      pen.globalAlpha = 1 - (0.42 * pass.chunks[index]) / Math.max(1, this.chunks - 1);
      pen.fillStyle = colors[PASSES[kind][1]];
      pen.fillRect(x, y + index * each, wide, each);
    });
    pen.globalAlpha = 1;
    if (pass.exchange > 0) {
      pen.fillStyle = colors.exchange;
      pen.fillRect(x, y + high * (1 - pass.exchange), wide, high * pass.exchange);
    }
    if (wide > 22 && high > 12) {
      pen.fillStyle = colors.sheet;
      pen.fillText(batches.join(" "), x + wide / 2, y + high / 2 + 0.5);
    }
  }

  // What is at a point of the page, in words; null for idle time.
  said(event) {
    const box = this.canvas.getBoundingClientRect();
    const rank = Math.floor((event.clientY - box.top) / this.row);
    const time = this.from + (event.clientX - box.left - this.left) / this.across;
    const spans = this.ranks[rank];
    if (!spans || time < this.from) return null;
    const span = spans[first(spans, time)];
    if (!span || span.start > time) return `rank ${rank}: idle`;
    const tasks = [...span.pass.kinds].map((kind, index) => {
      const chunk = this.chunks > 1 ? `, chunk ${span.pass.chunks[index]}` : "";
      return `${PASSES[kind][0]} of micro-batch ${span.batches[index]}${chunk}`;
    });
    const exchange = span.pass.exchange > 0 ? `\ntoken exchange ${percent(span.pass.exchange)} of it` : "";
    return `rank ${rank}: ${tasks.join(" and ")}\n${seconds(span.pass.us / 1e6)}, from ${number(span.start / 1e6, 3)} s${exchange}`;
  }

  // Shows so much of the step, around a place in it.
  zoom(factor, around = (this.from + this.to) / 2) {
    const length = Math.min(this.length, Math.max((this.to - this.from) * factor, this.length / 2000));
    const share = (around - this.from) / (this.to - this.from);
    this.show(around - share * length, length);
  }

  pan(share) {
    const length = this.to - this.from;
    this.show(this.from + share * length, length);
  }

  show(from, length) {
    this.from = Math.max(0, Math.min(from, this.length - length));
    this.to = this.from + length;
    this.draw();
  }

  act(what) {
    if (what === "in") this.zoom(0.5);
    if (what === "out") this.zoom(2);
    if (what === "left") this.pan(-0.5);
    if (what === "right") this.pan(0.5);
    if (what === "all") this.show(0, this.length);
  }

  listen() {
    const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", Home: "all" };
    let held = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      held = event.clientX;
      this.canvas.setPointerCapture(event.pointerId);
      this.canvas.classList.add("held");
    });
    for (const end of ["pointerup", "pointercancel"]) {
      this.canvas.addEventListener(end, () => {
        held = null;
        this.canvas.classList.remove("held");
      });
    }
    this.canvas.addEventListener("pointermove", (event) => {
      if (held !== null) {
        this.show(this.from - (event.clientX - held) / this.across, this.to - this.from);
        held = event.clientX;
      }
      const text = this.said(event);
      if (text === null) hideTip();
      else showTip(event, text);
    });
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("dblclick", (event) => {
      const box = this.canvas.getBoundingClientRect();
      this.zoom(0.4, this.from + (event.clientX - box.left - this.left) / this.across);
    });
    this.canvas.addEventListener("keydown", (event) => {
      if (!(event.key in keys)) return;
      event.preventDefault();
      this.act(keys[event.key]);
    });
  }
}

// The first span that ends after a time.
function first(spans, time) {
  let [low, high] = [0, spans.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].end > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

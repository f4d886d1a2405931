// The page: which plan of the grid is shown, and all that follows from it.

const data = JSON.parse(document.getElementById("data").textContent);
const own = data.cells[data.own];
const at = data.axes.map((axis) => axis.own);
const $ = (id) => document.getElementById(id);
const GROUPS = {
  compute: "computation", exchange: "token exchange", recompute: "computed again", collectives: "tensor and context parallel",
  update: "gradients and optimizer", idle: "idle and gaps",
};
let shown = own; // the last plan that can run, which the charts show

const place = (positions) => positions.reduce((sum, position, axis) => sum * data.axes[axis].values.length + position, 0);
const current = () => data.cells[place(at)];

// --- what if ---------------------------------------------------------------------------------------------------------

const sliders = data.axes.map((axis, index) => {
  const id = `axis-${index}`;
  const output = make("output", { htmlFor: id });
  const input = make("input", { type: "range", id, min: 0, max: Math.max(1, axis.values.length - 1), step: 1, value: axis.own });
  input.disabled = axis.values.length < 2;
  const stops = axis.values.map(() => make("i"));
  const row = make("div", { className: "slider" }, make("label", { htmlFor: id }, axis.name, output), input,
    make("div", { className: "stops", "aria-hidden": "true" }, ...stops));
  input.addEventListener("input", () => {
    at[index] = Number(input.value);
    update();
  });
  return { axis, index, input, output, row, stops };
});
$("sliders").append(...sliders.map((slider) => slider.row));

const runs = data.cells.filter((cell) => !cell.why);
const fitting = runs.filter((cell) => cell.fits);
// a router's imbalance is nobody's choice: the fastest is looked for at the job's own
const imbalance = data.axes.findIndex((axis) => axis.name === "Router imbalance");
const chosen = fitting.filter((cell) => imbalance < 0 || positions(cell)[imbalance] === data.axes[imbalance].own);
const sure = chosen.filter((cell) => cell.certain);
const fastest = (sure.length ? sure : chosen).reduce((best, cell) => (best && best.seconds <= cell.seconds ? best : cell), null);
$("grid-size").textContent = `Every position is a plan of its own, made by the planner: ${number(data.cells.length)} of them, ` +
  `of which ${number(runs.length)} can run and ${number(fitting.length)} fit.`;
$("best").disabled = fastest === null;

function positions(cell) {
  let rest = data.cells.indexOf(cell);
  const found = data.axes.map(() => 0);
  for (let axis = data.axes.length - 1; axis >= 0; axis--) {
    const size = data.axes[axis].values.length;
    found[axis] = rest % size;
    rest = Math.floor(rest / size);
  }
  return found;
}

function goTo(cell) {
  positions(cell).forEach((position, axis) => { at[axis] = position; });
  update();
}
$("back").addEventListener("click", () => goTo(own));
$("best").addEventListener("click", () => goTo(fastest));

function update() {
  const cell = current();
  for (const { axis, index, input, output, row, stops } of sliders) {
    input.value = at[index];
    output.textContent = axis.values[at[index]];
    input.setAttribute("aria-valuetext", axis.values[at[index]]);
    row.classList.toggle("moved", at[index] !== axis.own);
    stops.forEach((stop, position) => {
      const there = data.cells[place(at.map((now, other) => (other === index ? position : now)))];
      stop.textContent = there.why ? "×" : !there.certain ? "◐" : there.fits ? "●" : "○";
      stop.className = there.why ? "refused" : position === axis.own ? "own" : "";
    });
  }
  $("back").disabled = cell === own;
  document.body.classList.toggle("moved", cell !== own);
  document.body.classList.toggle("refused", Boolean(cell.why));
  $("answer").classList.toggle("no", Boolean(cell.why) || !cell.fits);
  $("command").parentElement.hidden = Boolean(cell.why);
  $("answer").textContent = answer(cell);
  $("command").textContent = cell.why ? "" : cell.command;
  headline(cell);
  if (cell.why) return;
  shown = cell;
  tables();
  ofThePlan();
}

function answer(cell) {
  if (cell.why) return `Cannot run: ${cell.why}`;
  if (cell === own) {
    const given = "The job as it was given" + (cell.fits ? (cell.certain ? "." : ": whether it fits is not certain.") : ": it does not fit.");
    return [given, ...data.advice].join(" ");
  }
  const ratio = own.seconds / cell.seconds;
  const speed = Math.abs(ratio - 1) < 0.005 ? "as fast as the job"
    : ratio > 1 ? `${significant(ratio)} times as fast as the job` : `${percent(1 - ratio)} slower than the job`;
  return `A step of ${seconds(cell.seconds)}, ${speed}; ${fit(cell)} with ${gib(cell.total, 1)} GiB.`;
}

function fit(cell) {
  return !cell.certain ? "may or may not fit" : cell.fits ? "fits" : "does not fit";
}

// --- headline --------------------------------------------------------------------------------------------------------

function headline(cell) {
  const verdict = $("verdict");
  const bad = Boolean(cell.why) || !cell.fits;
  for (const element of [verdict, $("meter")]) {
    element.classList.toggle("no", bad);
    element.classList.toggle("maybe", !cell.why && !cell.certain);
  }
  if (cell.why) {
    verdict.replaceChildren(make("strong", {}, "Cannot run"), ": these sizes do not go together");
    $("layout").textContent = "The charts below are of the plan before.";
  } else {
    const [word, ...rest] = cell.verdict.split(":");
    const said = cell.certain ? word[0].toUpperCase() + word.slice(1) : "May or may not fit";
    verdict.replaceChildren(make("strong", {}, said), `:${rest.join(":")}`);
    $("layout").textContent = `${cell.layout} — ${number(cell.micro_batches)} micro-batches of ${cell.micro_batch} × ` +
      `${number(data.sequence)} tokens, ${number(data.batch)} sequences a step`;
  }
  const fill = make("div");
  fill.style.width = cell.why ? "0" : `${Math.min(100, (100 * cell.total) / data.capacity)}%`;
  $("meter").replaceChildren(fill);
  $("meter").setAttribute("aria-label", cell.why ? "No memory figure" : `${percent(cell.total / data.capacity)} of the GPU's memory`);
  $("tiles").replaceChildren(
    tile("Step time", cell, (one) => one.seconds, (value) => [significant(value), "s"], -1),
    tile("Tokens/s a GPU", cell, (one) => one.tgs, (value) => [number(value), ""], 1),
    tile("TFLOP/s a GPU", cell, (one) => one.tflops, (value) => [number(value), ""], 1),
    tile("MFU", cell, (one) => one.mfu, (value) => [number(100 * value, 1), "%"], 1),
    tile("Ranks idle", cell, (one) => Math.max(...one.bubbles), () => [span(cell.bubbles).slice(0, -1), "%"], 0),
  );
}

function tile(name, cell, value, words, better) {
  const [text, unit] = cell.why ? ["–", ""] : words(value(cell));
  const change = make("div", { className: "change" });
  if (!cell.why && cell !== own && better) {
    const by = value(cell) / value(own) - 1;
    change.textContent = `${by < 0 ? "−" : "+"}${percent(Math.abs(by))}`;
    if (Math.abs(by) >= 0.005) change.classList.add(by * better > 0 ? "better" : "worse");
  }
  return make("div", {}, make("dt", {}, name), make("dd", {}, text, unit ? make("small", {}, ` ${unit}`) : ""), make("dd", { className: "change-row" }, change));
}

// --- charts and tables -----------------------------------------------------------------------------------------------

const timeline = new Timeline($("pipeline-canvas"), data.timeline);

function ofThePlan() {
  const whole = document.querySelector("input[name=scale]:checked").value === "gpu";
  memoryChart($("memory-chart"), shown, data.capacity, data.gpu, whole);
  timeChart($("time-chart"), shown, shown === own ? null : own);
}

function charts() {
  ofThePlan();
  scalingChart($("scaling-chart"), data.scaling.points, data.scaling.bend);
  timeline.draw();
}

function tables() {
  const kinds = Object.keys(shown.ranks[0].bytes);
  $("memory-table").replaceChildren(table("Memory of every pipeline rank, in GiB",
    ["rank", "holds", "total GiB", "of GPU", ...kinds, "parameters"],
    shown.ranks.map((rank, index) => {
      const sizes = Object.values(rank.bytes);
      const total = sizes.reduce((sum, size) => sum + size, 0);
      return [`${index}`, rank.holds.join(" · "), gib(total), percent(total / data.capacity), ...sizes.map((size) => gib(size)),
        `${number(rank.parameters / 1e9, 2)}B`];
    }), { left: 2, marked: shown.tightest }));
  $("tight-title").textContent = `Rank ${shown.tightest}, the tightest, broken down`;
  $("tight-table").replaceChildren(table(`Memory of rank ${shown.tightest}, in GiB`, ["kind", "part", "GiB"],
    shown.components.map(([kind, name, size], index, all) => [index && all[index - 1][0] === kind ? "" : kind, name, gib(size)]), { left: 2 }));
  const used = new Set(shown.parts.map(([, , family]) => family));
  legend($("time-legend"), Object.entries(GROUPS).filter(([family]) => used.has(family)));
  $("time-hint").textContent = "The rank that computes longest; the lines add up to the step." +
    (shown === own ? "" : " Marks: the job as given.");
  const notes = [shown.band, ...shown.notes, ...Object.entries(data.assumed).map(([key, value]) => `assumed: ${key}=${value}`),
    "Plans beside the job keep its GPUs, its sequences a step and all else; another pipeline is cut as the job’s layout is, where that divides, else evenly or by work."];
  $("note-list").replaceChildren(...notes.map((note) => make("li", {}, note)));
}

function fixed() {
  legend($("memory-legend"), Object.keys(own.ranks[0].bytes).map((kind) => [kind, kind]));
  const line = data.timeline;
  const passes = new Set(line.passes.flatMap((pass) => [...pass.kinds]));
  legend($("pipeline-legend"), [
    ...Object.entries(PASSES).filter(([kind]) => passes.has(kind)).map(([, [name, color]]) => [color, name]),
    ...(line.passes.some((pass) => pass.exchange > 0) ? [["exchange", "share that waits for token exchange, not counting what is computed again"]] : []),
    ["track", "idle"],
  ]);
  const paler = timeline.chunks > 1 ? " Later chunks are paler." : "";
  const part = line.micro_batches < line.of
    ? `The first ${number(line.micro_batches)} of ${number(line.of)} micro-batches, simulated alone: more of them look alike.`
    : `All ${number(line.of)} micro-batches of a step.`;
  $("pipeline-hint").textContent = `Schedule ${line.schedule}. ${part}${paler} Point at a pass for its figures; drag to move, double-click to zoom.`;
  $("idle-table").replaceChildren(table("Idle time of every pipeline rank", ["rank", "idle", "idle share"],
    line.idle.map((share, rank) => [`${rank}`, seconds(share * line.seconds), percent(share, 1)])));
  legend($("scaling-legend"), [["weak", "weak: the batch grows"], ["strong", "strong: the same batch"]]);
  $("bends").replaceChildren(...data.scaling.bends.map((text) => make("li", {}, text)));
  $("scaling-table").replaceChildren(table("Every size", ["scaling", "GPUs", "sequences", "micro-batches", "step", "tokens/s a GPU", "efficiency", "idle", "GiB", "fits"],
    data.scaling.points.flat().map((point) => [point.kind, number(point.gpus), number(point.global_batch_size),
      ...(point.seconds === null ? [point.why] : [number(point.micro_batches), seconds(point.seconds), number(point.tokens_per_second_per_gpu),
        percent(point.efficiency, 1), percent(point.bubble), gib(point.memory, 1), point.fits ? "yes" : "no"])])));
  $("footer").textContent = `Planned by Maniple ${data.version}. Estimates by formula and simulation, before a GPU was used.`;
}

$("memory-scale").addEventListener("change", ofThePlan);
$("pipeline-tools").addEventListener("click", (event) => timeline.act(event.target.dataset.do));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts);
let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  charts();
}).observe(document.body);
fixed();
update();

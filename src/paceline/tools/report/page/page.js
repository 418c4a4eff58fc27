// The page: texts and tables at once, drawings when the numbers are decoded.

const state = { wrapper: 0, runs: null };

function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const parts = report.parts.map((_, part) => read(`part-${part}`));
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const context = tile.getContext("2d");
  context.fillStyle = parts[WAITING];
  context.fillRect(0, 0, 6, 6);
  context.strokeStyle = read("stripe");
  context.lineWidth = 1.4;
  for (const shift of [-6, 0, 6]) {
    context.beginPath();
    context.moveTo(shift, 6);
    context.lineTo(shift + 6, 0);
    context.stroke();
  }
  return {
    parts,
    stripes: context.createPattern(tile, "repeat"),
    inks: report.parts.map((_, part) => read(`ink-${part}`)),
    ranks: DASHES.map((_, place) => read(`rank-${place}`)),
    font: getComputedStyle(document.body).fontFamily,
    ink: read("ink"), muted: read("muted"), line: read("line"), alarm: read("alarm"), quiet: read("quiet"),
    veil: read("veil"), bucket: read("bucket"), bucketInk: read("bucket-ink"),
    lineStrong: read("line-strong"), healing: read("healing"), healingSoft: read("healing-soft"),
  };
}

const timeline = new Timeline($("timeline"), $("overview"), {
  parts: report.parts, colours: colours(), onMove: read,
});
let plots = [];

// Below the timeline: the parts of the step in the middle of the view, or what happened between two steps.
function read() {
  const [rank, row, time] = timeline.middle();
  if (time > rank.finish(row)) {
    const healed = timeline.run.healings.filter((each) => touches(each, { from: time, to: time }));
    const words = healed.map((each) => `healed: ${each.words}`);
    $("reading").textContent = [`rank ${rank.rank}, after step ${number(rank.steps[row])}`, ...words].join("; ");
    return;
  }
  const spent = new Array(PARTS).fill(0);
  const segments = timeline.run.segments(rank, row), causes = new Set();
  for (const [part, from, to, cause] of segments) {
    spent[part] += to - from;
    if (cause) causes.add(report.causes[cause - 1]);
  }
  const parts = report.parts.map((part, i) => [part, spent[i]]).filter(([, ms]) => ms > 0)
    .map(([part, ms]) => `${part} ${duration(ms)}`).join(", ");
  const step = `step ${number(rank.steps[row])}${kindNote(rank.kinds[row])}`;
  const why = causes.size ? ` (${[...causes].join(", ")})` : "";
  $("reading").textContent = `rank ${rank.rank}, ${step}: ${parts}${why}`;
}

// The first colours are those of few ranks; no two of 64 ranks have the same colour and the same dashes.
function lineStyle(place) {
  const { ranks } = timeline.colours;
  return { colour: ranks[place % ranks.length], dashes: DASHES[(place + Math.floor(place / 8)) % DASHES.length] };
}

function writeRankLines(wrapper, straggler) {
  const entries = wrapper.timelines.map(({ rank }) => {
    const isStraggler = rank === straggler?.rank;
    return make("li", isStraggler ? { class: "alarm" } : {}, make("canvas", { "aria-hidden": "true" }),
      `rank ${rank}${isStraggler ? ", straggler" : ""}`);
  });
  $("rank-lines").replaceChildren(...(entries.length > 1 ? entries : []));
  drawRankLines(straggler);
}

function drawRankLines(straggler) {
  document.querySelectorAll("#rank-lines canvas").forEach((canvas, place) => {
    const context = fit(canvas, 10), isMarked = report.wrappers[state.wrapper].timelines[place].rank === straggler?.rank;
    useStyle(context, lineStyle(place), isMarked);
    context.beginPath();
    context.moveTo(0, 5);
    context.lineTo(canvas.clientWidth, 5);
    context.stroke();
  });
}

const overlap = ({ waitAfterBackward, communication }, i) =>
  communication[i] ? Math.max(0, 1 - waitAfterBackward[i] / communication[i]) : NaN;
const countRate = ({ count, steps, step }, i) => count[i] / steps[i] / (step[i] / 1e6);

function makePlots(wrapper) {
  const kinds = [
    { title: "Step time", unit: duration, values: (sums, i) => sums.step[i] / 1000 },
    { title: "Waiting after backward", unit: duration, values: (sums, i) => sums.waitAfterBackward[i] / 1000 },
    { title: "Communication overlap", unit: percent, most: 1, values: overlap },
  ];
  if (wrapper.units_per_second !== null) {
    kinds.push({
      title: `${wrapper.unit} per second, all ranks`, key: "per second", unit: number, total: true, values: countRate,
    });
  }
  const figures = kinds.map(() => make("figure", {},
    make("figcaption", {}, make("span", { class: "title" }), make("span", { class: "value muted small" })),
    make("canvas", { height: HIGH, "aria-hidden": "true" })));
  $("plots").replaceChildren(...figures);
  plots = kinds.map((kind, i) => new Plot(figures[i], kind, timeline.colours, { lineStyle, onPick: goTo }));
}

function goTo(step) {
  const rank = timeline.run.ranks[timeline.chosen];
  const row = indexOf(rank.steps, step), view = timeline.around(row - 2, 6);
  timeline.move(view.from, view.to);
}

function showPause() {
  const pauses = timeline.run.ranks.map((rank) => rank.longestPause());
  timeline.chosen = pauses.reduce((best, { ms }, lane) => (ms > pauses[best].ms ? lane : best), timeline.chosen);
  const view = timeline.around(pauses[timeline.chosen].row - 1, 3);
  timeline.move(view.from, view.to);
}

function showHealing(index) {
  const { from, to } = timeline.run.healings[index];
  const margin = Math.max(to - from, 3 * report.wrappers[state.wrapper].step_ms[1]);
  timeline.move(from - margin, to + margin);
}

// Those that were before the first step in the timeline, or after the last one, cannot be shown.
function offerHealings(run) {
  const margin = (run.end - run.start) * 0.02, shown = { from: run.start - margin, to: run.end + margin };
  document.querySelectorAll("#healings li button").forEach((button, i) => {
    button.disabled = !touches(run.healings[i], shown);
    button.onclick = () => showHealing(i);
  });
}

function draw() {
  const wrapper = report.wrappers[state.wrapper], run = state.runs[state.wrapper];
  const straggler = wrapper.stragglers.find((each) => each.last_step === null) ?? wrapper.stragglers[0];
  const since = document.querySelector("[data-act=since]");
  since.hidden = !straggler || straggler.first_step <= run.ranks[0].steps[0];
  if (!since.hidden) since.textContent = `Since step ${number(straggler.first_step)}`;
  since.title = "The first step in which the straggler is late";
  state.straggler = straggler;
  document.querySelector("[data-act=pause]").hidden = !run.ranks.some((rank) => rank.longestPause().ms > 0);
  timeline.show(wrapper, run);
  offerHealings(run);
  writeRankLines(wrapper, straggler);
  for (const plot of plots) plot.show(run, straggler);
}

function choose(index) {
  state.wrapper = index;
  const buttons = document.querySelectorAll("#wrappers button");
  buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === index));
  writeTexts(report.wrappers[index]);
  makePlots(report.wrappers[index]);
  if (state.runs) draw();
}

function repaint() {
  timeline.colours = colours();
  if (!state.runs) return;
  timeline.redraw();
  drawRankLines(state.straggler);
  for (const plot of plots) {
    plot.colours = timeline.colours;
    plot.redraw();
  }
}

const ACTS = {
  left: () => timeline.pan(-0.25),
  right: () => timeline.pan(0.25),
  in: () => timeline.zoom(0.5),
  out: () => timeline.zoom(2),
  all: () => timeline.all(),
  reset: () => timeline.move(timeline.home.from, timeline.home.to),
  since: () => goTo(state.straggler.first_step),
  pause: showPause,
};
const KEYS = {
  ArrowLeft: ACTS.left, ArrowRight: ACTS.right, "+": ACTS.in, "=": ACTS.in, "-": ACTS.out, "−": ACTS.out,
  a: ACTS.all, Home: ACTS.all, 0: ACTS.reset,
  ArrowUp: () => chooseLane(-1), ArrowDown: () => chooseLane(1), ",": () => stepBy(-1), ".": () => stepBy(1),
};

function chooseLane(change) {
  const lanes = timeline.run.ranks.length;
  timeline.chosen = Math.max(0, Math.min(lanes - 1, timeline.chosen + change));
  timeline.redraw();
  read();
}

function stepBy(change) {
  const [rank, row] = timeline.middle(), next = Math.max(0, Math.min(rank.length - 1, row + change));
  const shift = (rank.begins[next] + rank.finish(next)) / 2 - (timeline.view.from + timeline.view.to) / 2;
  timeline.move(timeline.view.from + shift, timeline.view.to + shift);
}

function listen() {
  const canvas = timeline.canvas;
  for (const button of document.querySelectorAll("[data-act]")) {
    button.addEventListener("click", ACTS[button.dataset.act]);
  }
  canvas.addEventListener("keydown", (event) => {
    const isBrowsers = event.ctrlKey || event.metaKey || event.altKey;
    if (isBrowsers || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  canvas.addEventListener("wheel", (event) => {
    // A wheel that only passes over the timeline scrolls the page.
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    if (event.shiftKey) timeline.pan(Math.sign(event.deltaY || event.deltaX) * 0.1);
    else timeline.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), timeline.timeAt(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("dblclick", () => ACTS.reset());
  canvas.addEventListener("pointerleave", () => showTip(null));
  canvas.addEventListener("pointermove", (event) => {
    const lines = event.buttons ? null : timeline.describe(event.offsetX, event.offsetY);
    showTip(lines, event.clientX, event.clientY);
  });
  drag(canvas, (event) => timeline.pan(-event.movementX / (canvas.clientWidth - GUTTER)), false);
  drag(timeline.overview, (event) => {
    const { start, end } = timeline.run, half = (timeline.view.to - timeline.view.from) / 2;
    const time = start + (event.offsetX - GUTTER) / (timeline.overview.clientWidth - GUTTER) * (end - start);
    timeline.move(time - half, time + half);
  }, true);
  $("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", () => setTheme(system.matches ? "dark" : "light"));
  let waiting = false;
  new ResizeObserver(() => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      repaint();
    });
  }).observe(document.querySelector("main"));
}

function drag(canvas, act, atOnce) {
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    if (atOnce) act(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons && canvas.hasPointerCapture(event.pointerId)) act(event);
  });
}

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").setAttribute("aria-pressed", isDark());
  repaint();
}

function offerWrappers() {
  if (report.wrappers.length < 2) return;
  $("wrappers").hidden = false;
  $("wrappers").append(...report.wrappers.map((wrapper, i) => {
    const isUnique = report.wrappers.filter(({ module }) => module === wrapper.module).length === 1;
    const name = isUnique ? wrapper.module : `${wrapper.module} on ${plural(wrapper.group.length, "rank")}`;
    const button = make("button", { type: "button", "aria-pressed": i === 0 }, name);
    button.addEventListener("click", () => choose(i));
    return button;
  }));
}

async function start() {
  offerWrappers();
  writeTerms();
  choose(0);
  $("theme").setAttribute("aria-pressed", isDark());
  const columns = new Columns(await inflate($("numbers").textContent));
  $("numbers").remove();
  state.runs = report.wrappers.map((wrapper) => new DrawnRun(columns, wrapper));
  draw();
  listen();
  performance.mark("drawn");
  document.documentElement.dataset.drawn = performance.now().toFixed(0);
}

start();

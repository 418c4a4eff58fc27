// The page: words and tables from the findings at once, drawings when the numbers are there.

const state = { section: 0, recordings: null };

function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const parts = found.parts.map((_, part) => read(`part-${part}`));
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
    inks: found.parts.map((_, part) => read(`ink-${part}`)),
    font: getComputedStyle(document.body).fontFamily,
    ink: read("ink"), muted: read("muted"), line: read("line"), alarm: read("alarm"), quiet: read("quiet"),
    veil: read("veil"), bucket: read("bucket"), bucketInk: read("bucket-ink"), lineSoft: read("line-soft"),
    lineStrong: read("line-strong"),
  };
}

const timeline = new Timeline($("timeline"), $("overview"), {
  parts: found.parts, colours: colours(), onMove: read,
});
let plots = [];

// What the step in the middle of the view spent where, below the timeline.
function read() {
  const [track, row] = timeline.middle();
  const spent = new Array(PARTS).fill(0);
  for (const [part, from, to] of timeline.recording.segments(track, row)) spent[part] += to - from;
  const words = found.parts.map((part, i) => [part, spent[i]]).filter(([, ms]) => ms > 0)
    .map(([part, ms]) => `${part} ${duration(ms)}`).join(", ");
  const step = `step ${number(track.steps[row])}${kindWords(track.kinds[row])}`;
  $("reading").textContent = `rank ${track.rank}, ${step}: ${words}`;
}

const hiddenShare = ({ exposed, communication }, i) =>
  communication[i] ? Math.max(0, 1 - exposed[i] / communication[i]) : NaN;
const countRate = ({ count, steps, step }, i) => count[i] / steps[i] / (step[i] / 1e6);

function makePlots(section) {
  const kinds = [
    { title: "Step time", unit: duration, values: (sums, i) => sums.step[i] / 1000 },
    { title: "Waiting after backward", unit: duration, values: (sums, i) => sums.exposed[i] / 1000 },
    { title: "Communication hidden under backward", unit: percent, most: 1, values: hiddenShare },
  ];
  if (section.rate !== null) {
    kinds.push({ title: `${section.unit} a second, all ranks`, unit: number, total: true, values: countRate });
  }
  const figures = kinds.map(() => make("figure", {},
    make("figcaption", {}, make("span", { class: "title" }), make("span", { class: "value muted small" })),
    make("canvas", { height: HIGH, "aria-hidden": "true" })));
  $("plots").replaceChildren(...figures);
  plots = kinds.map((kind, i) => new Plot(figures[i], kind, timeline.colours, goTo));
}

function goTo(step) {
  const track = timeline.recording.tracks[timeline.chosen];
  const row = placeOf(track.steps, step), view = timeline.around(row - 2, 6);
  timeline.move(view.from, view.to);
}

function draw() {
  const section = found.sections[state.section], recording = state.recordings[state.section];
  const late = section.late.find((each) => each.until === null) ?? section.late[0];
  const since = document.querySelector("[data-act=since]");
  since.hidden = !late || late.since <= recording.tracks[0].steps[0];
  if (!since.hidden) since.textContent = `Since step ${number(late.since)}`;
  since.title = "Where the late rank begins to be late";
  state.late = late;
  timeline.show(section, recording);
  for (const plot of plots) plot.show(recording, late);
}

function choose(index) {
  state.section = index;
  const buttons = document.querySelectorAll("#sections button");
  buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === index));
  writeWords(found.sections[index]);
  makePlots(found.sections[index]);
  if (state.recordings) draw();
}

function repaint() {
  timeline.colours = colours();
  if (!state.recordings) return;
  timeline.redraw();
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
  since: () => goTo(state.late.since),
};
const KEYS = {
  ArrowLeft: ACTS.left, ArrowRight: ACTS.right, "+": ACTS.in, "=": ACTS.in, "-": ACTS.out, "−": ACTS.out,
  a: ACTS.all, Home: ACTS.all, 0: ACTS.reset,
  ArrowUp: () => chooseLane(-1), ArrowDown: () => chooseLane(1), ",": () => stepBy(-1), ".": () => stepBy(1),
};

function chooseLane(change) {
  const lanes = timeline.recording.tracks.length;
  timeline.chosen = Math.max(0, Math.min(lanes - 1, timeline.chosen + change));
  timeline.redraw();
  read();
}

function stepBy(change) {
  const [track, row] = timeline.middle(), next = Math.max(0, Math.min(track.length - 1, row + change));
  const shift = (track.begins[next] + track.finish(next)) / 2 - (timeline.view.from + timeline.view.to) / 2;
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
    // Who only scrolls past is not held up.
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    if (event.shiftKey) timeline.pan(Math.sign(event.deltaY || event.deltaX) * 0.1);
    else timeline.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), timeline.timeAt(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("dblclick", () => ACTS.reset());
  canvas.addEventListener("pointerleave", () => showTip(null));
  canvas.addEventListener("pointermove", (event) => {
    const words = event.buttons ? null : timeline.tell(event.offsetX, event.offsetY);
    showTip(words, event.clientX, event.clientY);
  });
  drag(canvas, (event) => timeline.pan(-event.movementX / (canvas.clientWidth - GUTTER)), false);
  drag(timeline.overview, (event) => {
    const { start, end } = timeline.recording, half = (timeline.view.to - timeline.view.from) / 2;
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

function offerSections() {
  if (found.sections.length < 2) return;
  $("sections").hidden = false;
  $("sections").append(...found.sections.map((section, i) => {
    const button = make("button", { type: "button", "aria-pressed": i === 0 }, section.module);
    button.addEventListener("click", () => choose(i));
    return button;
  }));
}

async function start() {
  offerSections();
  choose(0);
  $("theme").setAttribute("aria-pressed", isDark());
  const columns = new Columns(await inflate($("numbers").textContent));
  $("numbers").remove();
  state.recordings = found.sections.map((section) => new Recording(columns, section));
  draw();
  listen();
  performance.mark("drawn");
  document.documentElement.dataset.drawn = performance.now().toFixed(0);
}

start();

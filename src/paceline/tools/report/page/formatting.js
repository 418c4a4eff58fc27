// Numbers as paceline.tools.formatting writes them, elements, and the tooltip. What a recording contains becomes text, never markup.

const $ = (id) => document.getElementById(id);
const report = JSON.parse($("report").textContent);

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") element.style.cssText = value; else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function head(...names) {
  const cells = names.map((name) => make("th", { scope: "col" }, typeof name === "string" && name ? term(name) : name));
  return make("thead", {}, make("tr", {}, ...cells));
}

// A row of a table: its name and its cells, which are texts or elements.
function line(name, ...cells) {
  const filled = cells.map((cell) => (cell instanceof Element ? cell : make("td", {}, cell)));
  return make("tr", {}, make("th", { scope: "row" }, name), ...filled);
}

const textCell = (text) => make("td", { class: "text" }, text);

// A time, given in milliseconds. On an axis all marks have the same unit and number of digits, which the distance
// of the marks and the highest value decide.
function duration(ms, distance = null, most = 0) {
  const isMark = distance !== null;
  const [unit, name] = unitOf(isMark ? Math.max(most, distance) : Math.abs(ms), isMark ? 1000 : 10000);
  if (!isMark && !ms) return "0 ms";
  const value = ms / unit, high = Math.abs(value);
  if (isMark) {
    const digits = -Math.floor(Math.log10(distance / unit) + 1e-9);
    return `${value.toFixed(Math.max(0, Math.min(6, digits)))} ${name}`;
  }
  const digits = name === "s" ? 1 : name === "µs" || high >= 100 ? 0 : high >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${name}`;
}

function unitOf(ms, seconds) {
  if (ms >= seconds) return [1000, "s"];
  return ms >= 0.1 || ms === 0 ? [1, "ms"] : [0.001, "µs"];
}

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (count < 1024) return `${count.toFixed(unit === "B" || count >= 100 ? 0 : 1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} GiB`;
}

const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
const number = (count) => count.toLocaleString("en",
  Math.abs(count) < 99.5 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 });
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

function median(values) {
  const sorted = values.slice().sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

const isLost = (kind) => Boolean(kind & 2);

function kindNote(kind) {
  return isLost(kind) ? " (lost)" : kind & 1 ? " (no inputs left)" : "";
}

// Below a point of the window, or above it if there is no room.
function showTip(lines, x, y) {
  const tip = $("tip");
  tip.hidden = !lines;
  if (!lines) return;
  tip.textContent = lines.join("\n");
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
}

function withTip(element, lines) {
  element.addEventListener("pointermove", (event) => showTip(lines, event.clientX, event.clientY));
  element.addEventListener("pointerleave", () => showTip(null));
  return element;
}

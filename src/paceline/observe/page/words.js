// Words and tables, from the findings. Whatever a recording holds becomes text, never markup.

const $ = (id) => document.getElementById(id);
const found = JSON.parse($("findings").textContent);

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") element.style.cssText = value; else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Milliseconds in words; on an axis, whose marks are so far apart and which goes so far, all alike.
function duration(ms, apart = null, most = 0) {
  const size = apart === null ? Math.abs(ms) : Math.max(most, apart);
  const [unit, name] = size >= (apart === null ? 10000 : 1000) ? [1000, "s"] : size >= 0.1 || size === 0 ? [1, "ms"] : [0.001, "µs"];
  const value = ms / unit, high = Math.abs(value);
  if (apart !== null) return `${value.toFixed(Math.max(0, Math.min(6, -Math.floor(Math.log10(apart / unit) + 1e-9))))} ${name}`;
  return `${value.toFixed(high >= 100 || name === "µs" && high >= 10 ? 0 : high >= 10 ? 1 : 2)} ${name}`;
}

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (count < 1024) return `${unit === "B" || count >= 100 ? count.toFixed(0) : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} GiB`;
}

const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
const number = (count) => count.toLocaleString("en", { maximumFractionDigits: count < 100 ? 1 : 0 });

function showTip(lines, x, y) {
  const tip = $("tip");
  tip.hidden = !lines;
  if (!lines) return;
  tip.textContent = lines.join("\n");
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
}

function tipped(element, words) {
  element.addEventListener("pointermove", (event) => showTip(words, event.clientX, event.clientY));
  element.addEventListener("pointerleave", () => showTip(null));
  return element;
}

function writeWhere(section) {
  const used = found.parts.map((part, i) => [part, i]).filter(([part]) => section.ranks.some((each) => each.parts[part] > 0));
  $("legend").replaceChildren(...used.map(([part, i]) => make("li", {}, make("i", { class: `swatch part-${i}` }), part)));
  const total = (each) => Object.values(each.parts).reduce((sum, part) => sum + part, 0);
  const most = Math.max(...section.ranks.map(total), 1e-9);
  const late = section.late.filter((each) => each.until === null).map((each) => each.rank);
  // Many ranks do not fit: those that are late come first.
  const order = section.ranks.length <= 12 ? section.ranks : section.ranks.slice().sort((a, b) => late.includes(b.rank) - late.includes(a.rank));
  $("where").replaceChildren(...order.map((each) => {
    const spent = used.filter(([part]) => each.parts[part] > 0).map(([part, i]) => tipped(
      make("span", { class: `part-${i}`, style: `width:${each.parts[part] / most * 100}%` }),
      [`rank ${each.rank}: ${part}`, `${duration(each.parts[part])}, ${percent(each.parts[part] / total(each))} of a step`]));
    const words = used.map(([part]) => `${part} ${duration(each.parts[part])}`).join(", ");
    return make("div", { class: late.includes(each.rank) ? "bar late" : "bar" },
      make("span", { class: "name" }, `rank ${each.rank}`),
      make("span", { class: "stack", role: "img", "aria-label": `rank ${each.rank}: ${words}` }, ...spent),
      make("span", { class: "value" }, duration(each.step[1])));
  }));
}

function writeFigures(section) {
  const parts = section.parts, exposed = parts[found.parts[6]], waiting = parts[found.parts[5]];
  const [low, middle, high] = section.step_ms;
  const figures = [
    ["step", duration(middle), `half of them ${duration(low)} to ${duration(high)}; ${duration(section.mean_ms)} on average in the run`],
    ["communication hidden", section.hidden === null ? "none" : percent(section.hidden),
      `of ${duration(section.under_way_ms)} a step that buckets are under way`],
    ["exposed communication", duration(exposed), `${percent(exposed / (middle || 1))} of a step, after the last rank's backward`],
    ["waiting for the last rank", duration(waiting), `on average; ${percent(waiting / (middle || 1))} of a step`],
    section.rate === null ? null : [`${section.unit} a second`, number(section.rate), "all ranks together, over the run"],
    ["steps", number(section.steps), stepWords(section)],
  ];
  $("figures").replaceChildren(...figures.filter(Boolean).map(([name, value, note]) =>
    make("div", {}, make("dt", {}, name), make("dd", { class: "big" }, value), make("dd", { class: "note" }, note))));
}

function stepWords(section) {
  const words = [`${number(section.recorded)} of them recorded whole`];
  if (section.lost) words.push(`${number(section.lost)} lost`);
  if (section.shadowed) words.push(`in ${number(section.shadowed)} a rank had no inputs left`);
  return words.join("; ");
}

function lateWords(late) {
  const about = late.give ? `about step ${number(late.since)} (give or take ${number(late.give)})` : `step ${number(late.since)}`;
  const when = late.until === null ? `since ${about}` : `from ${about} to ${number(late.until)}`;
  const slow = late.part ? ` It is slow in ${late.part}: ${duration(late.part_ms)} longer than the others.` : "";
  const steps = late.other_ms === null ? "" : ` Steps take ${duration(late.step_ms)}, and ${duration(late.other_ms)} when it is not late.`;
  return `late by ${duration(late.late_ms)} a step ${when}; the last to come to ${late.where} in ${percent(late.last)} of these steps.${slow}${steps}`;
}

function writeLate(section) {
  const words = section.late.map((late) =>
    make("p", { class: "finding" }, make("strong", { class: "alarm" }, `Rank ${late.rank}`), ` ${late.until === null ? "is" : "was"} ${lateWords(late)}`));
  if (!words.length) words.push(make("p", { class: "finding" }, section.ranks.length > 1 ? "No rank is late: none comes after the others by enough to matter." : "There is one rank only."));
  const order = section.arrivals.length <= 6 ? section.arrivals : section.arrivals.slice().sort((a, b) => b.late_ms - a.late_ms);
  const rows = order.map((each) => make("tr", {}, make("th", { scope: "row" }, `rank ${each.rank}`),
    make("td", {}, `${each.late_ms > 0 ? "+" : each.late_ms < 0 ? "−" : ""}${duration(Math.abs(each.late_ms))}`), make("td", {}, percent(each.last))));
  const table = make("table", {}, head("", `${section.arrivals[0].where}, against the others`, "came last"), make("tbody", {}, ...rows));
  $("late").replaceChildren(...words, ...(rows.length > 1 ? [make("div", { class: "scroller short" }, table)] : []));
}

function head(...names) {
  return make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name))));
}

function writeAdvice(section) {
  const items = section.suggestions.map((each) => make("li", {}, make("strong", {}, each.change), make("p", {}, each.figure),
    each.saves_ms > 0 ? make("p", { class: "muted small" }, `at most ${duration(each.saves_ms)} a step to gain`) : null));
  const nothing = `${section.hidden === null ? "There is no communication to hide" : `${percent(section.hidden)} of the communication is hidden`}, `
    + `${duration(section.parts[found.parts[6]])} of ${duration(section.step_ms[1])} is exposed, and no rank is late.`;
  $("advice").replaceChildren(...(items.length ? items : [make("li", { class: "none" }, make("strong", {}, "Nothing in the record asks for a change."), make("p", {}, nothing))]));
}

function writeBuckets(section) {
  const choice = $("bucket-rank");
  const options = [make("option", { value: "all" }, "all ranks (medians)"), ...section.ranks.map((each, i) => make("option", { value: i }, `rank ${each.rank}`))];
  choice.replaceChildren(...options);
  choice.onchange = () => fillBuckets(section, choice.value);
  fillBuckets(section, "all");
}

function middleOf(values) {
  const sorted = values.slice().sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

function fillBuckets(section, choice) {
  const pickOne = (bucket, key) => choice === "all" ? middleOf(bucket.ranks.map((each) => each[key])) : bucket.ranks[choice][key];
  const backwards = section.ranks.map((each) => each.parts[found.parts[4]]);
  const backward = choice === "all" ? middleOf(backwards) : backwards[choice];
  const most = Math.max(backward, ...section.buckets.map((bucket) => pickOne(bucket, "done")), 1e-9);
  const place = (ms) => Math.max(0, Math.min(100, ms / most * 100));
  $("buckets-note").textContent = `Since backward began, which takes ${duration(backward)} (shaded): | full, — held back, ■ under way.`;
  const rows = section.buckets.map((bucket) => {
    const [ready, launch, done] = ["ready", "launch", "done"].map((key) => pickOne(bucket, key));
    const picture = make("span", { class: "flight", "aria-hidden": "true" },
      make("i", { class: "during", style: `width:${place(backward)}%` }),
      make("i", { class: "held", style: `left:${place(ready)}%;width:${place(launch) - place(ready)}%` }),
      make("i", { class: "full", style: `left:${place(ready)}%` }),
      make("i", { class: "under-way", style: `left:${place(launch)}%;width:${Math.max(0.4, place(done) - place(launch))}%` }));
    const waits = make("td", { class: "waits" }, make("code", {}, bucket.last), bucket.last_share < 0.995 ? ` in ${percent(bucket.last_share)} of steps` : "");
    if (bucket.behind !== null) waits.append(make("span", { class: "held-words" }, `then ${duration(bucket.held_ms)} for bucket ${bucket.behind}, which waits for `, make("code", {}, bucket.behind_last)));
    return make("tr", {}, make("th", { scope: "row" }, String(bucket.bucket)), make("td", {}, bytes(bucket.nbytes)), make("td", {}, number(bucket.slots)),
      make("td", {}, duration(ready)), make("td", {}, duration(launch)), make("td", {}, duration(done)), make("td", { class: "wide" }, picture), waits);
  });
  $("buckets").replaceChildren(head("bucket", "size", "parameters", "full", "left", "seen back", "in backward", "waits for"), make("tbody", {}, ...rows));
}

function writeRun(section) {
  const run = section.run;
  const plans = section.plans.map((plan) => `plan ${plan.number}: ${number(plan.steps)} step${plan.steps === 1 ? "" : "s"}, ${plan.buckets} bucket${plan.buckets === 1 ? "" : "s"} (${plan.exchange})`);
  const clock = run.hosts < 2 ? "one clock" : section.clock_us === null ? "by wall clocks only" : `aligned to ± ${duration(section.clock_us / 1000)}`;
  const facts = [["module", section.module], ["parameters", `${number(run.parameters)}, ${bytes(run.nbytes)}`], ["ranks", `${section.group.length} of ${run.world}, on ${run.hosts} host${run.hosts === 1 ? "" : "s"}`],
    ["device", run.device], ["backend", run.backend], ["transport", run.transport], ["averaged by", run.exchange],
    ["bucket caps", `first ${bytes(run.first_cap)}, others ${bytes(run.cap)}`], ["plans", plans.join("; ")], ["clocks", clock], ["recording's version", String(run.version)]];
  if (section.missing.length) facts.push(["no recording of", `rank${section.missing.length > 1 ? "s" : ""} ${section.missing.join(", ")}`]);
  $("run").replaceChildren(make("tbody", {}, ...facts.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", { class: "words" }, value)))));
  const rows = section.ranks.map((each) => make("tr", {}, make("th", { scope: "row" }, `rank ${each.rank}`), make("td", { class: "words" }, each.host),
    make("td", {}, duration(each.step[1])), make("td", {}, duration(each.longest)), make("td", {}, each.under_way ? percent(each.hidden / each.under_way) : "none")));
  $("ranks").replaceChildren(head("", "host", "step", "longest", "hidden"), make("tbody", {}, ...rows));
}

function writeWords(section) {
  $("verdict").textContent = section.verdict;
  const shown = section.tracks.length < section.ranks.length ? `; drawn are ${section.tracks.length} of the ${section.ranks.length} ranks` : "";
  const rows = Math.max(...section.tracks.map((track) => track.rows));
  $("scope").textContent = `${section.module} on ${section.group.length} rank${section.group.length === 1 ? "" : "s"}, ${number(section.steps)} steps; the timeline has the last ${number(rows)}${shown}.${section.since > section.first ? ` Figures are of the steps since ${number(section.since)}, when a rank became late.` : ""}`;
  writeWhere(section);
  writeFigures(section);
  writeLate(section);
  writeAdvice(section);
  writeBuckets(section);
  writeRun(section);
  $("timeline").style.height = `${AXIS + section.tracks.length * (laneHeight(section.tracks.length) + GAP) + 4}px`;
}

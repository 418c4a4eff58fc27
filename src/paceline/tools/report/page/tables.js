// The results of the analysis, as texts, bars and tables.

// If the ranks do not fit on the screen, those that matter most come first.
function ordered(ranks, room, compare) {
  return ranks.length <= room ? ranks : ranks.slice().sort(compare);
}

function writeWhere(wrapper) {
  const isUsed = (part) => wrapper.ranks.some((each) => each.parts[part] > 0);
  const used = report.parts.map((part, i) => [part, i]).filter(([part]) => isUsed(part));
  const swatch = (i) => make("i", { class: `swatch part-${i}` });
  $("legend").replaceChildren(...used.map(([part, i]) => make("li", {}, swatch(i), term(part))));
  const total = (each) => Object.values(each.parts).reduce((sum, part) => sum + part, 0);
  const most = Math.max(...wrapper.ranks.map(total), 1e-9);
  const stragglers = wrapper.stragglers.filter((each) => each.last_step === null).map((each) => each.rank);
  const isStraggler = ({ rank }) => stragglers.includes(rank);
  const order = ordered(wrapper.ranks, 12, (a, b) => isStraggler(b) - isStraggler(a));
  $("where").replaceChildren(...order.map((each) => {
    const stack = used.filter(([part]) => each.parts[part] > 0).map(([part, i]) => {
      const spent = each.parts[part];
      return withTip(make("span", { class: `part-${i}`, style: `width:${spent / most * 100}%` }),
        [`rank ${each.rank}: ${part}`, `${duration(spent)} per step, ${percent(spent / total(each))} of the wall time`,
          report.terms[part.toLowerCase()]]);
    });
    const parts = used.map(([part]) => `${part} ${duration(each.parts[part])}`).join(", ");
    return make("div", { class: isStraggler(each) ? "bar straggler" : "bar" },
      make("span", { class: "name" }, `rank ${each.rank}`),
      make("span", { class: "stack", role: "img", "aria-label": `rank ${each.rank}: ${parts}` }, ...stack),
      make("span", { class: "value" }, duration(each.mean_step_ms)));
  }));
}

function writeFigures(wrapper) {
  const [low, middle, high] = wrapper.step_ms;
  const exposed = wrapper.parts[report.parts[EXPOSED_COMMUNICATION]], waiting = wrapper.parts[report.parts[WAITING]];
  const share = (ms) => `${percent(ms / (middle || 1))} of a step`;
  const figures = [
    ["usual step", duration(middle), `the mean, without pauses; half of the steps: ${duration(low)} to ${duration(high)}`],
    ["steps per second", number(wrapper.steps_per_second),
      `with pauses: a step takes ${duration(wrapper.mean_step_ms)} of wall time`],
    ["pauses", percent(wrapper.parts[report.parts[PAUSE]] / (wrapper.mean_step_ms || 1)), pauseNote(wrapper)],
    ["communication overlap", wrapper.overlap === null ? "none" : percent(wrapper.overlap),
      [`during backward, of ${duration(wrapper.communication_ms)} per step in which a bucket is in flight`,
        wrapper.why_no_overlap].filter(Boolean).join("; ")],
    ["exposed communication", duration(exposed), `${share(exposed)}, after backward has ended on every rank`],
    ["waiting for the slowest rank", duration(waiting), `on the average rank; ${share(waiting)}`],
    ["steps", number(wrapper.steps), stepNote(wrapper)],
  ];
  if (wrapper.units_per_second !== null) {
    figures.splice(2, 0, [`${wrapper.unit} per second`, number(wrapper.units_per_second),
      "all ranks together, with pauses", "per second"]);
  }
  $("figures").replaceChildren(...figures.map(([name, value, note, key]) => make("div", {},
    make("dt", {}, term(name, key)), make("dd", { class: "big" }, value), make("dd", { class: "note" }, note))));
}

function pauseNote({ pauses }) {
  const seconds = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : duration(ms));
  const texts = pauses.map(({ cause, ranks, count, total_ms: total, longest_ms: longest, ...each }) => {
    const where = ranks.length < each.all_ranks ? ` on ${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")}` : "";
    const together = count > 1 ? `${seconds(total)} together, the longest ` : "";
    return `${cause}${where}: ${plural(count, "pause")}, ${together}${seconds(longest)} after step ${
      number(each.longest_step)}`;
  });
  return texts.length ? `of the wall time; ${texts.join("; ")}` : "of the wall time";
}

function stepNote(wrapper) {
  const notes = [`${number(wrapper.detailed_steps)} of them recorded in detail`];
  const lost = wrapper.lost_steps - wrapper.steps_done_again;
  if (lost) notes.push(`${number(lost)} lost, without averages`);
  if (wrapper.steps_done_again) notes.push(`${number(wrapper.steps_done_again)} lost and done again`);
  if (wrapper.steps_without_inputs) notes.push(`in ${number(wrapper.steps_without_inputs)} a rank had no inputs left`);
  return notes.join("; ");
}

// The figures of the page may be of the same steps; then they say how long these take.
function otherSteps({ first_step: first, last_step: last, step_ms: then, other_step_ms: other }, figuresFrom) {
  if (last === null && first === figuresFrom) return `Steps took ${duration(other)} before.`;
  return `Steps take ${duration(then)} then, and otherwise ${duration(other)}.`;
}

// Where in a step a part is, for a sentence.
function place(part) {
  if (/^(before|after) optimizer$/.test(part)) return part.replace(" ", " the ");
  return part === "loss" || part === "DataLoader" ? `in the ${part}` : `in ${part}`;
}

function stragglerText(straggler, figuresFrom) {
  const error = straggler.first_step_error ? ` (± ${number(straggler.first_step_error)})` : "";
  const first = `step ${number(straggler.first_step)}${error}`, isOver = straggler.last_step !== null;
  const when = isOver ? `from ${first} to ${number(straggler.last_step)}` : `since ${first}`;
  const texts = [`${isOver ? "was" : "has been"} ${duration(straggler.late_ms)} behind the other ranks ${when}. In `
    + `${percent(straggler.last_share)} of these steps it was the last to reach ${straggler.sync_point}.`];
  if (straggler.slow_part) {
    texts.push(`It is slow ${place(straggler.slow_part)}: ${duration(straggler.slow_part_ms)} more than the others.`);
  }
  if (straggler.other_step_ms !== null) texts.push(otherSteps(straggler, figuresFrom));
  return texts.join(" ");
}

function writeStragglers(wrapper) {
  const texts = wrapper.stragglers.map((straggler) => make("p", { class: "result" },
    make("strong", { class: "alarm" }, `Rank ${straggler.rank}`), ` ${stragglerText(straggler, wrapper.figures_from_step)}`));
  const none = wrapper.ranks.length > 1
    ? "No rank is a straggler: none is behind the others by enough to matter." : "There is only one rank.";
  if (!texts.length) texts.push(make("p", { class: "result" }, none));
  const sign = (ms) => (ms > 0 ? "+" : ms < 0 ? "−" : "");
  const rows = ordered(wrapper.delays, 6, (a, b) => b.late_ms - a.late_ms).map((each) =>
    line(`rank ${each.rank}`, `${sign(each.late_ms)}${duration(Math.abs(each.late_ms))}`, percent(each.last_share)));
  if (rows.length > 1) {
    const title = head("", term(`delay at ${wrapper.delays[0].sync_point}`, "delay"), "came last");
    texts.push(make("div", { class: "scroller short" }, make("table", {}, title, make("tbody", {}, ...rows))));
  }
  $("stragglers").replaceChildren(...texts);
}

function writeSuggestions(wrapper) {
  const items = wrapper.suggestions.map((each) => {
    const saving = each.saves_at_most_ms > 0 ? `saves at most ${duration(each.saves_at_most_ms)} per step` : null;
    return make("li", {}, make("strong", {}, each.change), make("p", {}, each.evidence),
      saving && make("p", { class: "muted small" }, saving));
  });
  if (!items.length) {
    const exposed = duration(wrapper.parts[report.parts[EXPOSED_COMMUNICATION]]);
    const overlap = wrapper.overlap === null ? "There is no communication" : `${percent(wrapper.overlap)} of the `
      + `communication overlaps with backward, ${exposed} of ${duration(wrapper.step_ms[1])} is exposed`;
    items.push(make("li", { class: "none" }, make("strong", {}, "No change is suggested."),
      make("p", {}, `${overlap}, and no rank is a straggler.`)));
  }
  $("suggestions").replaceChildren(...items);
}

function writeBuckets(wrapper) {
  const choice = $("bucket-rank");
  const ranks = wrapper.ranks.map((each, i) => make("option", { value: i }, `rank ${each.rank}`));
  choice.replaceChildren(make("option", { value: "all" }, "all ranks (medians)"), ...ranks);
  choice.onchange = () => fillBuckets(wrapper, choice.value);
  fillBuckets(wrapper, "all");
}

function fillBuckets(wrapper, choice) {
  const pick = (values) => (choice === "all" ? median(values) : values[choice]);
  const { parts } = choice === "all" ? wrapper : wrapper.ranks[choice];
  const backward = parts[report.parts[BACKWARD]];
  const times = wrapper.buckets.map(({ ranks }) =>
    ["ready", "launch", "reduced"].map((key) => pick(ranks.map((each) => each[key]))));
  const most = Math.max(backward, ...times.map(([, , reduced]) => reduced), 1e-9);
  $("buckets-note").replaceChildren(`Times since the start of backward, which takes ${duration(backward)} (shaded). | `,
    term("ready"), "; — ", term("queued"), "; ■ ", term("in flight"), ".");
  const rows = wrapper.buckets.map((bucket, i) => line(String(bucket.bucket), bytes(bucket.nbytes),
    number(bucket.parameters), ...times[i].map((ms) => duration(ms)), picture(times[i], backward, most),
    waits(bucket)));
  const title = head("bucket", "size", "parameters", "ready", "launched", "reduced", "in backward", "waits for");
  $("buckets").replaceChildren(title, make("tbody", {}, ...rows));
}

function picture([ready, launch, reduced], backward, most) {
  const position = (ms) => Math.max(0, Math.min(100, ms / most * 100));
  const span = (from, to) => `left:${position(from)}%;width:${Math.max(0, position(to) - position(from))}%`;
  return make("td", { class: "wide" }, make("span", { class: "bucket-times", "aria-hidden": "true" },
    make("i", { class: "during", style: span(0, backward) }),
    make("i", { class: "queued", style: span(ready, launch) }),
    make("i", { class: "ready", style: `left:${position(ready)}%` }),
    make("i", { class: "in-flight", style: span(launch, reduced) })));
}

function waits(bucket) {
  const often = bucket.last_share < 0.995 ? ` in ${percent(bucket.last_share)} of steps` : "";
  const cell = make("td", { class: "waits" }, make("code", {}, bucket.last_parameter), often);
  if (bucket.queued_behind !== null) {
    const note = `then ${duration(bucket.queued_ms)} for bucket ${bucket.queued_behind}, which waits for `;
    cell.append(make("span", { class: "queued-note" }, note, make("code", {}, bucket.queued_behind_parameter)));
  }
  return cell;
}

// Nothing for the plain average, which is what everybody expects.
function averagedBy(exchange) {
  return {
    "the average": "",
    "the average of parts": "parts: each rank gets the average of its own part only",
    "the average of shards": "shards: in an order that is the same for every number of ranks",
  }[exchange] ?? exchange;
}

function writeRun(wrapper) {
  const { run } = wrapper;
  const plans = wrapper.plans.map((plan) =>
    [`plan ${plan.number}: ${plural(plan.steps, "step")}`, plural(plan.buckets, "bucket"),
      averagedBy(plan.exchange)].filter(Boolean).join(", "));
  const aligned = wrapper.clock_uncertainty_us === null ? "aligned by the wall clocks only"
    : `aligned to ± ${duration(wrapper.clock_uncertainty_us / 1000)}`;
  const facts = [
    ["module", wrapper.module],
    ["parameters", `${number(run.parameters)}, ${bytes(run.nbytes)}`],
    ["ranks", `${wrapper.group.length} of ${run.world}, on ${plural(run.hosts, "host")}`],
    ["device", run.device],
    ["backend", run.backend],
    ["transport", run.transport],
    ["averaged by", averagedBy(run.exchange)],
    ["bucket caps", `first bucket ${bytes(run.first_cap)}, others ${bytes(run.cap)}`],
    ["bucket plans", plans.join("; ")],
    ["clocks", run.hosts < 2 ? "one clock" : aligned],
    ["version of the recording", String(run.version)],
  ];
  if (wrapper.missing_ranks.length) facts.push(["ranks without a recording", wrapper.missing_ranks.join(", ")]);
  const known = facts.filter(([, value]) => value);
  $("run").replaceChildren(make("tbody", {}, ...known.map(([name, value]) => line(term(name), textCell(value)))));
  const rows = wrapper.ranks.map((each) => line(`rank ${each.rank}`, textCell(each.host), duration(each.step_ms[1]),
    duration(each.longest_step_ms), each.communication_ms ? percent(each.overlap_ms / each.communication_ms) : "none"));
  const title = head("", "host", "usual step", "longest step", term("overlap", "communication overlap"));
  $("ranks").replaceChildren(title, make("tbody", {}, ...rows));
}

function scopeText(wrapper) {
  const rows = Math.max(...wrapper.timelines.map((timeline) => timeline.rows));
  const drawn = wrapper.timelines.length, all = wrapper.ranks.length;
  const texts = [`${wrapper.module} on ${plural(wrapper.group.length, "rank")}, ${plural(wrapper.steps, "step")}; `
    + `the timeline shows the last ${number(rows)}${drawn < all ? `, of ${drawn} of the ${all} ranks` : ""}.`];
  if (wrapper.figures_steps < wrapper.steps) {
    const { figures_from_step: from, figures_to_step: to } = wrapper;
    const since = from > wrapper.first_detailed_step ? ", since a rank became a straggler" : "";
    texts.push(`Figures are of steps ${number(from)} to ${number(to)}${since}.`);
  }
  return texts.join(" ");
}

function writeHistory({ healed, samples, is_right: isRight, healings }) {
  const texts = [];
  if (healed) texts.push(make("p", {}, healed));
  if (samples) texts.push(make("p", { class: isRight ? "" : "alarm" }, samples));
  $("history").replaceChildren(...texts);
  $("healings").hidden = !healings.length;
  const buttons = healings.map(({ words }) => make("li", {}, make("button", { type: "button" }, words)));
  $("healings").querySelector("ul").replaceChildren(...buttons);
}

function writeTexts(wrapper) {
  $("summary").textContent = wrapper.summary;
  $("scope").textContent = scopeText(wrapper);
  writeHistory(wrapper.history);
  writeWhere(wrapper);
  writeFigures(wrapper);
  writeStragglers(wrapper);
  writeSuggestions(wrapper);
  writeBuckets(wrapper);
  writeRun(wrapper);
  // Now, so that nothing moves when the timeline is drawn.
  $("timeline").style.height = `${timelineHeight(wrapper.timelines.length)}px`;
}

// What the findings say, in words, bars and tables.

// Many ranks do not fit on the screen: those that matter come first then.
function ordered(ranks, room, before) {
  return ranks.length <= room ? ranks : ranks.slice().sort(before);
}

function writeWhere(section) {
  const isUsed = (part) => section.ranks.some((each) => each.parts[part] > 0);
  const used = found.parts.map((part, i) => [part, i]).filter(([part]) => isUsed(part));
  const swatch = (i) => make("i", { class: `swatch part-${i}` });
  $("legend").replaceChildren(...used.map(([part, i]) => make("li", {}, swatch(i), part)));
  const total = (each) => Object.values(each.parts).reduce((sum, part) => sum + part, 0);
  const most = Math.max(...section.ranks.map(total), 1e-9);
  const late = section.late.filter((each) => each.until === null).map((each) => each.rank);
  const order = ordered(section.ranks, 12, (a, b) => late.includes(b.rank) - late.includes(a.rank));
  $("where").replaceChildren(...order.map((each) => {
    const stack = used.filter(([part]) => each.parts[part] > 0).map(([part, i]) => {
      const spent = each.parts[part];
      return tipped(make("span", { class: `part-${i}`, style: `width:${spent / most * 100}%` }),
        [`rank ${each.rank}: ${part}`, `${duration(spent)}, ${percent(spent / total(each))} of a step`]);
    });
    const words = used.map(([part]) => `${part} ${duration(each.parts[part])}`).join(", ");
    return make("div", { class: late.includes(each.rank) ? "bar late" : "bar" },
      make("span", { class: "name" }, `rank ${each.rank}`),
      make("span", { class: "stack", role: "img", "aria-label": `rank ${each.rank}: ${words}` }, ...stack),
      make("span", { class: "value" }, duration(each.step[1])));
  }));
}

function writeFigures(section) {
  const [low, middle, high] = section.step_ms;
  const exposed = section.parts[found.parts[EXPOSED]], waiting = section.parts[found.parts[WAITING]];
  const share = (ms) => `${percent(ms / (middle || 1))} of a step`;
  const figures = [
    ["step", duration(middle),
      `half of them ${duration(low)} to ${duration(high)}; ${duration(section.mean_ms)} on average in the run`],
    ["communication hidden", section.hidden === null ? "none" : percent(section.hidden),
      `of ${duration(section.under_way_ms)} a step that buckets are under way`],
    ["exposed communication", duration(exposed), `${share(exposed)}, after the last rank's backward`],
    ["waiting for the last rank", duration(waiting), `on average; ${share(waiting)}`],
    ["steps", number(section.steps), stepWords(section)],
  ];
  if (section.rate !== null) {
    figures.splice(4, 0, [`${section.unit} a second`, number(section.rate), "all ranks together, over the run"]);
  }
  $("figures").replaceChildren(...figures.map(([name, value, note]) => make("div", {}, make("dt", {}, name),
    make("dd", { class: "big" }, value), make("dd", { class: "note" }, note))));
}

function stepWords(section) {
  const words = [`${number(section.recorded)} of them recorded whole`];
  if (section.lost) words.push(`${number(section.lost)} lost`);
  if (section.shadowed) words.push(`in ${number(section.shadowed)} a rank had no inputs left`);
  return words.join("; ");
}

function lateWords(late) {
  const give = late.give ? ` (give or take ${number(late.give)})` : "";
  const begin = `step ${number(late.since)}${give}`;
  const when = late.until === null ? `since ${begin}` : `from ${begin} to ${number(late.until)}`;
  const words = [`late by ${duration(late.late_ms)} a step ${when}; `
    + `the last to come to ${late.where} in ${percent(late.last)} of these steps.`];
  if (late.part) words.push(`It is slow in ${late.part}: ${duration(late.part_ms)} longer than the others.`);
  if (late.other_ms !== null) {
    words.push(`Steps take ${duration(late.step_ms)}, and ${duration(late.other_ms)} when it is not late.`);
  }
  return `${late.until === null ? "is" : "was"} ${words.join(" ")}`;
}

function writeLate(section) {
  const words = section.late.map((late) => make("p", { class: "finding" },
    make("strong", { class: "alarm" }, `Rank ${late.rank}`), ` ${lateWords(late)}`));
  const none = section.ranks.length > 1
    ? "No rank is late: none comes after the others by enough to matter." : "There is one rank only.";
  if (!words.length) words.push(make("p", { class: "finding" }, none));
  const sign = (ms) => (ms > 0 ? "+" : ms < 0 ? "−" : "");
  const rows = ordered(section.arrivals, 6, (a, b) => b.late_ms - a.late_ms).map((each) =>
    line(`rank ${each.rank}`, `${sign(each.late_ms)}${duration(Math.abs(each.late_ms))}`, percent(each.last)));
  if (rows.length > 1) {
    const title = head("", `${section.arrivals[0].where}, against the others`, "came last");
    words.push(make("div", { class: "scroller short" }, make("table", {}, title, make("tbody", {}, ...rows))));
  }
  $("late").replaceChildren(...words);
}

function writeAdvice(section) {
  const items = section.suggestions.map((each) => {
    const gain = each.saves_ms > 0 ? `at most ${duration(each.saves_ms)} a step to gain` : null;
    return make("li", {}, make("strong", {}, each.change), make("p", {}, each.figure),
      gain && make("p", { class: "muted small" }, gain));
  });
  if (!items.length) {
    const exposed = `${duration(section.parts[found.parts[EXPOSED]])} of ${duration(section.step_ms[1])} is exposed`;
    const hidden = section.hidden === null ? "There is no communication to hide"
      : `${percent(section.hidden)} of the communication is hidden, ${exposed}`;
    items.push(make("li", { class: "none" }, make("strong", {}, "Nothing in the record asks for a change."),
      make("p", {}, `${hidden}, and no rank is late.`)));
  }
  $("advice").replaceChildren(...items);
}

function writeBuckets(section) {
  const choice = $("bucket-rank");
  const ranks = section.ranks.map((each, i) => make("option", { value: i }, `rank ${each.rank}`));
  choice.replaceChildren(make("option", { value: "all" }, "all ranks (medians)"), ...ranks);
  choice.onchange = () => fillBuckets(section, choice.value);
  fillBuckets(section, "all");
}

function fillBuckets(section, choice) {
  const pick = (values) => (choice === "all" ? middleOf(values) : values[choice]);
  const backward = pick(section.ranks.map((each) => each.parts[found.parts[BACKWARD]]));
  const times = section.buckets.map(({ ranks }) =>
    ["ready", "launch", "done"].map((key) => pick(ranks.map((each) => each[key]))));
  const most = Math.max(backward, ...times.map(([, , done]) => done), 1e-9);
  $("buckets-note").textContent =
    `Since backward began, which takes ${duration(backward)} (shaded): | full, — held back, ■ under way.`;
  const rows = section.buckets.map((bucket, i) => line(String(bucket.bucket), bytes(bucket.nbytes),
    number(bucket.slots), ...times[i].map((ms) => duration(ms)), picture(times[i], backward, most), waits(bucket)));
  const title = head("bucket", "size", "parameters", "full", "left", "seen back", "in backward", "waits for");
  $("buckets").replaceChildren(title, make("tbody", {}, ...rows));
}

function picture([ready, launch, done], backward, most) {
  const place = (ms) => Math.max(0, Math.min(100, ms / most * 100));
  const span = (from, to) => `left:${place(from)}%;width:${Math.max(0, place(to) - place(from))}%`;
  return make("td", { class: "wide" }, make("span", { class: "flight", "aria-hidden": "true" },
    make("i", { class: "during", style: span(0, backward) }),
    make("i", { class: "held", style: span(ready, launch) }),
    make("i", { class: "full", style: `left:${place(ready)}%` }),
    make("i", { class: "under-way", style: span(launch, done) })));
}

function waits(bucket) {
  const often = bucket.last_share < 0.995 ? ` in ${percent(bucket.last_share)} of steps` : "";
  const cell = make("td", { class: "waits" }, make("code", {}, bucket.last), often);
  if (bucket.behind !== null) {
    const words = `then ${duration(bucket.held_ms)} for bucket ${bucket.behind}, which waits for `;
    cell.append(make("span", { class: "held-words" }, words, make("code", {}, bucket.behind_last)));
  }
  return cell;
}

function writeRun(section) {
  const { run } = section;
  const plans = section.plans.map((plan) =>
    `plan ${plan.number}: ${plural(plan.steps, "step")}, ${plural(plan.buckets, "bucket")} (${plan.exchange})`);
  const aligned = section.clock_us === null ? "by wall clocks only"
    : `aligned to ± ${duration(section.clock_us / 1000)}`;
  const facts = [
    ["module", section.module],
    ["parameters", `${number(run.parameters)}, ${bytes(run.nbytes)}`],
    ["ranks", `${section.group.length} of ${run.world}, on ${plural(run.hosts, "host")}`],
    ["device", run.device],
    ["backend", run.backend],
    ["transport", run.transport],
    ["averaged by", run.exchange],
    ["bucket caps", `first ${bytes(run.first_cap)}, others ${bytes(run.cap)}`],
    ["plans", plans.join("; ")],
    ["clocks", run.hosts < 2 ? "one clock" : aligned],
    ["recording's version", String(run.version)],
  ];
  if (section.missing.length) facts.push(["no recording of ranks", section.missing.join(", ")]);
  $("run").replaceChildren(make("tbody", {}, ...facts.map(([name, value]) => line(name, wordy(value)))));
  const rows = section.ranks.map((each) => line(`rank ${each.rank}`, wordy(each.host), duration(each.step[1]),
    duration(each.longest), each.under_way ? percent(each.hidden / each.under_way) : "none"));
  $("ranks").replaceChildren(head("", "host", "step", "longest", "hidden"), make("tbody", {}, ...rows));
}

function scopeWords(section) {
  const rows = Math.max(...section.tracks.map((track) => track.rows));
  const drawn = section.tracks.length, all = section.ranks.length;
  const words = [`${section.module} on ${plural(section.group.length, "rank")}, ${plural(section.steps, "step")}; `
    + `the timeline has the last ${number(rows)}${drawn < all ? `, of ${drawn} of the ${all} ranks` : ""}.`];
  if (section.since > section.first) {
    words.push(`Figures are of the steps since ${number(section.since)}, when a rank became late.`);
  }
  return words.join(" ");
}

function writeWords(section) {
  $("verdict").textContent = section.verdict;
  $("scope").textContent = scopeWords(section);
  writeWhere(section);
  writeFigures(section);
  writeLate(section);
  writeAdvice(section);
  writeBuckets(section);
  writeRun(section);
  // Now, so that nothing moves when the drawing comes.
  $("timeline").style.height = `${timelineHeight(section.tracks.length)}px`;
}

// The timeline: one lane per rank, with its own work above and its buckets in flight below.

const GUTTER = 62, AXIS = 20, GAP = 5;

function laneHeight(ranks) {
  return Math.max(12, Math.min(46, Math.floor(400 / ranks)));
}

function timelineHeight(ranks) {
  return AXIS + ranks * (laneHeight(ranks) + GAP) + 4;
}

function fit(canvas, height) {
  const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// Whether a period is in another one, if only in part.
const touches = ({ from, to }, other) => from <= other.to && to >= other.from;

// The distance of an axis's marks: a round number.
function spacing(span, most) {
  const rough = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}

const partName = (part, cause) => (cause ? `pause: ${report.causes[cause - 1]}` : report.parts[part]);

class Timeline {
  constructor(canvas, overview, { parts, colours, onMove }) {
    Object.assign(this, { canvas, overview, parts, colours, onMove });
    this.view = { from: 0, to: 1 };
    this.chosen = 0;
  }

  show(wrapper, run) {
    Object.assign(this, { wrapper, run });
    this.lane = laneHeight(run.ranks.length);
    this.height = timelineHeight(run.ranks.length);
    this.canvas.style.height = `${this.height}px`;
    const straggler = wrapper.stragglers.find((each) => each.last_step === null);
    this.chosen = Math.max(0, run.ranks.findIndex(({ rank }) => rank === straggler?.rank));
    this.home = this.around(run.ranks[this.chosen].length - 4, 4);
    this.move(this.home.from, this.home.to);
  }

  // The view that shows some steps of the chosen rank.
  around(row, rows) {
    const rank = this.run.ranks[this.chosen];
    const first = Math.max(0, Math.min(row, rank.length - 1));
    const last = Math.min(rank.length - 1, first + rows - 1);
    const from = rank.begins[first], to = rank.finish(last), margin = (to - from) * 0.02;
    return { from: from - margin, to: to + margin };
  }

  move(from, to) {
    const { start, end } = this.run, whole = Math.max(end - start, 1e-3);
    const span = Math.min(Math.max(to - from, 1e-3), whole * 1.04);
    const least = start - whole * 0.02, most = end + whole * 0.02;
    from = Math.max(least, Math.min(from, most - span));
    this.view = { from, to: from + span };
    this.redraw();
    this.onMove();
  }

  zoom(factor, at = (this.view.from + this.view.to) / 2) {
    const { from, to } = this.view;
    this.move(at - (at - from) * factor, at + (to - at) * factor);
  }

  pan(share) {
    const { from, to } = this.view;
    this.move(from + (to - from) * share, to + (to - from) * share);
  }

  all() {
    this.move(this.run.start, this.run.end);
  }

  x(time) {
    const { from, to } = this.view;
    return GUTTER + (time - from) / (to - from) * (this.canvas.clientWidth - GUTTER);
  }

  timeAt(x) {
    const { from, to } = this.view;
    return from + (x - GUTTER) / (this.canvas.clientWidth - GUTTER) * (to - from);
  }

  middle() {
    const rank = this.run.ranks[this.chosen], time = (this.view.from + this.view.to) / 2;
    return [rank, rank.rowAt(time), time];
  }

  redraw() {
    const context = fit(this.canvas, this.height), { from, to } = this.view;
    const { ranks } = this.run, width = this.canvas.clientWidth;
    const [first] = ranks, rows = first.rowAt(to) - first.rowAt(from) + 1;
    const fine = (width - GUTTER) / rows >= 24;
    this.canvas.dataset.from = from.toFixed(4);
    this.canvas.dataset.to = to.toFixed(4);
    this.canvas.dataset.detail = fine ? "steps" : "shares";
    const [fromStep, toStep] = [first.steps[first.rowAt(from)], first.steps[first.rowAt(to)]];
    const healed = this.run.healings.filter((each) => touches(each, this.view)).map(({ words }) => words);
    const note = healed.length ? `, healed here: ${healed.slice(0, 3).join("; ")}` : "";
    this.canvas.setAttribute("aria-label",
      `Timeline of ${plural(ranks.length, "rank")}, ${duration(to - from)} wide, steps ${fromStep} to ${toStep}${note}`);
    this.drawAxis(context, width);
    this.drawHealings(context);
    ranks.forEach((each, lane) => {
      const top = AXIS + lane * (this.lane + GAP);
      this.drawLabel(context, each, lane, top);
      context.save();
      context.beginPath();
      context.rect(GUTTER, top, width - GUTTER, this.lane);
      context.clip();
      if (fine) this.drawSteps(context, each, top); else this.drawShares(context, each, top, width);
      context.restore();
    });
    this.drawOverview();
  }

  drawAxis(context, width) {
    const { from, to } = this.view, distance = spacing(to - from, (width - GUTTER) / 110);
    context.font = `11px ${this.colours.font}`;
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (let time = Math.ceil(from / distance) * distance; time <= to; time += distance) {
      const x = Math.round(this.x(time)) + 0.5;
      context.fillStyle = this.colours.line;
      context.fillRect(x, 0, 1, this.height);
      const label = duration(time, distance, Math.abs(to));
      if (x + context.measureText(label).width + 6 < width) {
        context.fillStyle = this.colours.muted;
        context.fillText(label, x + 4, AXIS / 2);
      }
    }
  }

  // A band from when a loss was seen until training went on, with a mark on the axis.
  drawHealings(context) {
    for (const each of this.run.healings.filter((healing) => touches(healing, this.view))) {
      const left = Math.max(GUTTER, this.x(each.from)), wide = Math.max(2, this.x(each.to) - left);
      context.fillStyle = this.colours.healingSoft;
      context.fillRect(left, AXIS, wide, this.height - AXIS);
      context.fillStyle = this.colours.healing;
      context.fillRect(left, 0, 2, this.height);
      context.fillRect(left, AXIS - 5, wide, 5);
    }
  }

  drawLabel(context, rank, lane, top) {
    const isStraggler = this.wrapper.stragglers.some((each) => each.rank === rank.rank && each.last_step === null);
    context.fillStyle = isStraggler ? this.colours.alarm : this.colours.ink;
    context.font = `${lane === this.chosen || isStraggler ? 600 : 400} 12px ${this.colours.font}`;
    context.textBaseline = "middle";
    context.fillText(`rank ${rank.rank}`, 8, top + this.lane / 2);
    if (lane === this.chosen) context.fillRect(0, top, 2, this.lane);
  }

  paint(context, part, x, y, width, height) {
    // Waiting is striped, so that it can be told apart without colours.
    context.fillStyle = part === WAITING ? this.colours.stripes : this.colours.parts[part];
    context.fillRect(x, y, width, height);
  }

  drawSteps(context, rank, top) {
    const { from, to } = this.view, upper = Math.round(this.lane * 0.6), lower = top + upper + 1;
    const buckets = rank.buckets.length, low = this.lane - upper - 1;
    for (let row = rank.rowAt(from); row < rank.length && rank.begins[row] <= to; row++) {
      const left = this.x(rank.begins[row]), right = this.x(rank.finish(row));
      for (const [part, start, end, cause] of this.run.segments(rank, row)) {
        const x = this.x(start), wide = this.x(end) - x;
        this.paint(context, part, x, top, Math.max(wide - (wide > 3 ? 0.5 : 0), 0.5), upper);
        this.inscribe(context, partName(part, cause), part, x, wide, top + upper / 2, upper);
      }
      context.fillStyle = this.colours.ink;
      context.fillRect(left, top, 1, this.lane);
      if (right - left > 3 * buckets) {
        for (let bucket = 0; bucket < buckets; bucket++) {
          this.drawBucket(context, rank, row, bucket, lower, low);
        }
      } else {
        this.drawSpan(context, rank, row, lower, low);
      }
    }
  }

  inscribe(context, text, part, x, wide, y, height) {
    const left = Math.max(x, GUTTER), room = x + wide - left;
    if (height < 14 || room < 34) return;
    context.font = `11px ${this.colours.font}`;
    if (context.measureText(text).width + 10 > room) return;
    context.fillStyle = this.colours.inks[part];
    context.textBaseline = "middle";
    context.fillText(text, left + 5, y);
  }

  drawBucket(context, rank, row, bucket, top, height) {
    const at = (column) => this.x(rank.at(rank.buckets[bucket][column], row));
    const ready = at("ready"), launch = at("launch"), reduced = at("reduced");
    // In two rows, because buckets may be in flight at the same time.
    const half = height > 11 ? (height - 1) / 2 : height, y = height > 11 && bucket % 2 ? top + half + 1 : top;
    context.fillStyle = this.colours.bucket;
    if (reduced > launch) context.fillRect(launch, y, Math.max(1, reduced - launch - 0.5), half);
    if (launch > ready) {
      context.fillStyle = this.colours.muted;
      context.fillRect(ready, y + half / 2 - 0.5, launch - ready, 1);
    }
    context.fillStyle = this.colours.ink;
    if (!Number.isNaN(ready)) context.fillRect(ready, y, 1, half);
    if (reduced - Math.max(launch, GUTTER) > 20 && half >= 8) {
      context.fillStyle = this.colours.bucketInk;
      context.font = `${Math.min(10, half + 1)}px ${this.colours.font}`;
      context.textBaseline = "middle";
      context.fillText(String(bucket), Math.max(launch, GUTTER) + 3, y + half / 2 + 0.5);
    }
  }

  drawSpan(context, rank, row, top, height) {
    let first = Infinity, last = -Infinity;
    for (const bucket of rank.buckets) {
      const launch = rank.at(bucket.launch, row), reduced = rank.at(bucket.reduced, row);
      if (launch < first) first = launch;
      if (reduced > last) last = reduced;
    }
    context.fillStyle = this.colours.bucket;
    if (last > first) context.fillRect(this.x(first), top, Math.max(0.5, this.x(last) - this.x(first)), height);
  }

  // Too many steps to draw each: the share of time that each part has.
  drawShares(context, rank, top, width) {
    const totals = this.run.totals(rank), wide = 2;
    for (let x = GUTTER; x < width; x += wide) {
      const start = this.timeAt(x), end = this.timeAt(x + wide);
      if (end < rank.begins[0] || start > this.run.end) continue;
      const first = rank.rowAt(start), last = Math.max(first + 1, rank.rowAt(end));
      if (start > rank.finish(first) && last === first + 1) continue;
      let whole = 0;
      for (const total of totals) whole += total[last] - total[first];
      let y = top;
      for (let part = 0; part < totals.length && whole > 0; part++) {
        const high = (totals[part][last] - totals[part][first]) / whole * this.lane;
        if (high > 0) this.paint(context, part, x, y, wide, high);
        y += high;
      }
    }
  }

  drawOverview() {
    const height = 34, context = fit(this.overview, height), width = this.overview.clientWidth;
    const { start, end, ranks: [rank] } = this.run, scale = (width - GUTTER) / (end - start);
    if (!this.longest || this.longest.of !== this.run || this.longest.width !== width) {
      const values = new Float64Array(Math.max(1, Math.ceil(width - GUTTER)));
      for (let row = 0; row < rank.length; row++) {
        const index = Math.min(values.length - 1, Math.floor((rank.begins[row] - start) * scale));
        values[index] = Math.max(values[index], rank.finish(row) - rank.begins[row]);
      }
      for (let i = 1; i < values.length; i++) values[i] = values[i] || values[i - 1];
      const sorted = values.slice().sort();
      const top = sorted[Math.floor(sorted.length * 0.98)] * 1.15 || 1;
      this.longest = { of: this.run, width, values, top };
    }
    context.fillStyle = this.colours.quiet;
    this.longest.values.forEach((value, x) => {
      const high = Math.min(1, value / this.longest.top) * (height - 4);
      context.fillRect(GUTTER + x, height - high, 1, high);
    });
    context.fillStyle = this.colours.healing;
    for (const { from } of this.run.healings.filter((each) => touches(each, { from: start, to: end }))) {
      context.fillRect(GUTTER + Math.max(0, from - start) * scale, 0, 2, height);
    }
    const left = Math.max(GUTTER, GUTTER + (this.view.from - start) * scale);
    const wide = Math.max(3, Math.min(width, GUTTER + (this.view.to - start) * scale) - left);
    context.fillStyle = this.colours.veil;
    context.fillRect(left, 0, wide, height);
    context.fillStyle = this.colours.ink;
    context.fillRect(left, 0, 1, height);
    context.fillRect(left + wide - 1, 0, 1, height);
    context.fillStyle = this.colours.muted;
    context.font = `11px ${this.colours.font}`;
    context.textBaseline = "middle";
    context.fillText("step time", 8, height / 2);
  }

  // What is at a point, as lines of text.
  describe(x, y) {
    if (x < GUTTER) return null;
    const lines = [...this.describeStep(x, y), ...this.describeHealings(x)];
    return lines.length ? lines : null;
  }

  describeHealings(x) {
    const near = { from: this.timeAt(x - 4), to: this.timeAt(x + 4) };
    return this.run.healings.filter((each) => touches(each, near)).map(({ words }) => `healed: ${words}`);
  }

  describeStep(x, y) {
    const lane = Math.floor((y - AXIS) / (this.lane + GAP)), rank = this.run.ranks[lane];
    if (!rank || y < AXIS) return [];
    const time = this.timeAt(x), row = rank.rowAt(time);
    if (time < rank.begins[0] || time > rank.finish(row)) return [];
    const lines = [`rank ${rank.rank}, step ${number(rank.steps[row])}${kindNote(rank.kinds[row])}`];
    const isBelow = y - AXIS - lane * (this.lane + GAP) > this.lane * 0.6;
    if (isBelow) lines.push(...this.describeBuckets(rank, row, time));
    const segment = this.run.segments(rank, row).find(([, from, to]) => from <= time && time <= to);
    if (lines.length === 1 && segment) {
      const [part, start, end, cause] = segment;
      lines.push(`${partName(part, cause)}: ${duration(end - start)}`, report.terms[this.parts[part].toLowerCase()]);
    }
    lines.push(`step: ${duration(rank.finish(row) - rank.begins[row])}`);
    return lines;
  }

  describeBuckets(rank, row, time) {
    const lines = [];
    rank.buckets.forEach((times, index) => {
      const at = (column) => rank.at(times[column], row);
      const ready = at("ready"), launch = at("launch"), reduced = at("reduced");
      if (lines.length < 8 && time >= Math.min(ready, launch) && time <= reduced) {
        const queued = Math.max(0, launch - ready);
        lines.push(`bucket ${index}: queued ${duration(queued)}, in flight ${duration(reduced - launch)}`,
          `  last gradient: ${this.wrapper.parameter_names[times.lastSlot[row]] ?? "?"}`);
      }
    });
    return lines;
  }
}

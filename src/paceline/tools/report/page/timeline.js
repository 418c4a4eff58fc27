// The timeline: a lane a rank; its own work above, its buckets under way below.

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

// Round distances for an axis's marks.
function spacing(span, most) {
  const rough = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}

class Timeline {
  constructor(canvas, overview, { parts, colours, onMove }) {
    Object.assign(this, { canvas, overview, parts, colours, onMove });
    this.view = { from: 0, to: 1 };
    this.chosen = 0;
  }

  show(section, recording) {
    Object.assign(this, { section, recording });
    this.lane = laneHeight(recording.tracks.length);
    this.height = timelineHeight(recording.tracks.length);
    this.canvas.style.height = `${this.height}px`;
    const late = section.late.find((each) => each.until === null);
    this.chosen = Math.max(0, recording.tracks.findIndex((track) => late && track.rank === late.rank));
    this.home = this.around(recording.tracks[this.chosen].length - 4, 4);
    this.move(this.home.from, this.home.to);
  }

  // The view of some steps of the chosen rank.
  around(row, rows) {
    const track = this.recording.tracks[this.chosen];
    const first = Math.max(0, Math.min(row, track.length - 1));
    const last = Math.min(track.length - 1, first + rows - 1);
    const from = track.begins[first], to = track.finish(last), margin = (to - from) * 0.02;
    return { from: from - margin, to: to + margin };
  }

  move(from, to) {
    const { start, end } = this.recording, whole = Math.max(end - start, 1e-3);
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
    this.move(this.recording.start, this.recording.end);
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
    const track = this.recording.tracks[this.chosen];
    return [track, track.rowAt((this.view.from + this.view.to) / 2)];
  }

  redraw() {
    const context = fit(this.canvas, this.height), { from, to } = this.view;
    const tracks = this.recording.tracks, width = this.canvas.clientWidth;
    const [track] = tracks, rows = track.rowAt(to) - track.rowAt(from) + 1;
    const fine = (width - GUTTER) / rows >= 24;
    this.canvas.dataset.from = from.toFixed(4);
    this.canvas.dataset.to = to.toFixed(4);
    this.canvas.dataset.detail = fine ? "steps" : "shares";
    const [first, last] = [track.steps[track.rowAt(from)], track.steps[track.rowAt(to)]];
    this.canvas.setAttribute("aria-label",
      `Timeline of ${tracks.length} ranks, ${duration(to - from)} wide, steps ${first} to ${last}`);
    this.drawAxis(context, width);
    tracks.forEach((each, lane) => {
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

  drawLabel(context, track, lane, top) {
    const late = this.section.late.some((each) => each.rank === track.rank && each.until === null);
    context.fillStyle = late ? this.colours.alarm : this.colours.ink;
    context.font = `${lane === this.chosen || late ? 600 : 400} 12px ${this.colours.font}`;
    context.textBaseline = "middle";
    context.fillText(`rank ${track.rank}`, 8, top + this.lane / 2);
    if (lane === this.chosen) context.fillRect(0, top, 2, this.lane);
  }

  paint(context, part, x, y, width, height) {
    // Waiting is striped, so that it is told apart without colour.
    context.fillStyle = part === WAITING ? this.colours.stripes : this.colours.parts[part];
    context.fillRect(x, y, width, height);
  }

  drawSteps(context, track, top) {
    const { from, to } = this.view, upper = Math.round(this.lane * 0.6), lower = top + upper + 1;
    const buckets = track.buckets.length, low = this.lane - upper - 1;
    for (let row = track.rowAt(from); row < track.length && track.begins[row] <= to; row++) {
      const left = this.x(track.begins[row]), right = this.x(track.finish(row));
      for (const [part, start, end] of this.recording.segments(track, row)) {
        const x = this.x(start), wide = this.x(end) - x;
        this.paint(context, part, x, top, Math.max(wide - (wide > 3 ? 0.5 : 0), 0.5), upper);
        this.inscribe(context, this.parts[part], part, x, wide, top + upper / 2, upper);
      }
      context.fillStyle = this.colours.ink;
      context.fillRect(left, top, 1, this.lane);
      if (right - left > 3 * buckets) {
        for (let bucket = 0; bucket < buckets; bucket++) {
          this.drawBucket(context, track, row, bucket, lower, low);
        }
      } else {
        this.drawSpan(context, track, row, lower, low);
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

  drawBucket(context, track, row, bucket, top, height) {
    const { ready, launch, done } = track.buckets[bucket];
    const [full, left, back] = [ready, launch, done].map((column) => this.x(track.at(column, row)));
    // Buckets that are under way at once lie below each other, in two rows.
    const half = height > 11 ? (height - 1) / 2 : height, y = height > 11 && bucket % 2 ? top + half + 1 : top;
    context.fillStyle = this.colours.bucket;
    if (back > left) context.fillRect(left, y, Math.max(1, back - left - 0.5), half);
    if (left > full) {
      context.fillStyle = this.colours.muted;
      context.fillRect(full, y + half / 2 - 0.5, left - full, 1);
    }
    context.fillStyle = this.colours.ink;
    if (!Number.isNaN(full)) context.fillRect(full, y, 1, half);
    if (back - Math.max(left, GUTTER) > 20 && half >= 8) {
      context.fillStyle = this.colours.bucketInk;
      context.font = `${Math.min(10, half + 1)}px ${this.colours.font}`;
      context.textBaseline = "middle";
      context.fillText(String(bucket), Math.max(left, GUTTER) + 3, y + half / 2 + 0.5);
    }
  }

  drawSpan(context, track, row, top, height) {
    let first = Infinity, last = -Infinity;
    for (const bucket of track.buckets) {
      const launch = track.at(bucket.launch, row), done = track.at(bucket.done, row);
      if (launch < first) first = launch;
      if (done > last) last = done;
    }
    context.fillStyle = this.colours.bucket;
    if (last > first) context.fillRect(this.x(first), top, Math.max(0.5, this.x(last) - this.x(first)), height);
  }

  // Too many steps to draw: what shares of the time went where.
  drawShares(context, track, top, width) {
    const totals = this.recording.totals(track), wide = 2;
    for (let x = GUTTER; x < width; x += wide) {
      const start = this.timeAt(x), end = this.timeAt(x + wide);
      if (end < track.begins[0] || start > this.recording.end) continue;
      const first = track.rowAt(start), last = Math.max(first + 1, track.rowAt(end));
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
    const { start, end, tracks: [track] } = this.recording, scale = (width - GUTTER) / (end - start);
    if (!this.longest || this.longest.of !== this.recording || this.longest.width !== width) {
      const values = new Float64Array(Math.max(1, Math.ceil(width - GUTTER)));
      for (let row = 0; row < track.length; row++) {
        const place = Math.min(values.length - 1, Math.floor((track.begins[row] - start) * scale));
        values[place] = Math.max(values[place], track.finish(row) - track.begins[row]);
      }
      for (let i = 1; i < values.length; i++) values[i] = values[i] || values[i - 1];
      const sorted = values.slice().sort();
      const top = sorted[Math.floor(sorted.length * 0.98)] * 1.15 || 1;
      this.longest = { of: this.recording, width, values, top };
    }
    context.fillStyle = this.colours.quiet;
    this.longest.values.forEach((value, x) => {
      const high = Math.min(1, value / this.longest.top) * (height - 4);
      context.fillRect(GUTTER + x, height - high, 1, high);
    });
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

  // What is at a point, in words.
  tell(x, y) {
    const lane = Math.floor((y - AXIS) / (this.lane + GAP)), track = this.recording.tracks[lane];
    if (!track || x < GUTTER || y < AXIS) return null;
    const time = this.timeAt(x), row = track.rowAt(time);
    if (time < track.begins[0] || time > this.recording.end) return null;
    const lines = [`rank ${track.rank}, step ${number(track.steps[row])}${kindWords(track.kinds[row])}`];
    const isBelow = y - AXIS - lane * (this.lane + GAP) > this.lane * 0.6;
    if (isBelow) lines.push(...this.tellBuckets(track, row, time));
    const found = this.recording.segments(track, row).find(([, from, to]) => from <= time && time <= to);
    if (lines.length === 1 && found) lines.push(`${this.parts[found[0]]}: ${duration(found[2] - found[1])}`);
    lines.push(`step: ${duration(track.finish(row) - track.begins[row])}`);
    return lines;
  }

  tellBuckets(track, row, time) {
    const lines = [];
    track.buckets.forEach(({ ready, launch, done, last }, index) => {
      const [full, left, back] = [ready, launch, done].map((column) => track.at(column, row));
      if (lines.length < 8 && time >= Math.min(full, left) && time <= back) {
        const held = Math.max(0, left - full);
        lines.push(`bucket ${index}: under way ${duration(back - left)}, held back ${duration(held)}`,
          `  last gradient: ${this.section.slots[last[row]] ?? "?"}`);
      }
    });
    return lines;
  }
}

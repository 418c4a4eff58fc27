"use strict";

// The numbers: columns, as paceline.tools.report.packing writes them.

const TIMES = ["forwardStart", "buffersEnd", "forwardEnd", "backwardStart", "backwardEnd", "landed", "end",
  "optimizerStart", "optimizerEnd"];
// Parts of a step, by their places in the findings.
const PASSES = 0, BUFFERS = 1, FORWARD = 2, LOSS = 3, BACKWARD = 4, WAITING = 5, EXPOSED = 6, HANDING_OUT = 7,
  AFTER = 8, OPTIMIZER = 9, BETWEEN = 10, PARTS = 11;

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Columns {
  constructor(bytes) {
    this.bytes = bytes;
    this.place = 0;
  }

  next(length) {
    const { bytes, place } = this;
    const column = new Int32Array(length);
    let value = 0;
    for (let i = 0, at = place; i < length; i++, at++) {
      const low = bytes[at] | bytes[at + length] << 8;
      const cell = low | bytes[at + 2 * length] << 16 | bytes[at + 3 * length] << 24;
      value += (cell >>> 1) ^ -(cell & 1);
      column[i] = value;
    }
    this.place = place + 4 * length;
    return column;
  }
}

// One rank's steps: times in milliseconds since the first of all, NaN for what has not happened.
class Track {
  constructor(columns, about, buckets, tick) {
    const rows = about.rows;
    this.rank = about.rank;
    this.length = rows;
    this.tick = tick;
    this.steps = columns.next(rows);
    this.kinds = columns.next(rows);
    const high = columns.next(rows), low = columns.next(rows);
    this.begins = Float64Array.from(high, (each, i) => (each * 1048576 + low[i]) * tick);
    this.times = Object.fromEntries(TIMES.map((name) => [name, columns.next(rows)]));
    this.buckets = Array.from({ length: buckets }, () => ({
      ready: columns.next(rows), launch: columns.next(rows), done: columns.next(rows), last: columns.next(rows),
    }));
    const sums = ["steps", "first", "step", "exposed", "communication", "count"];
    this.sums = Object.fromEntries(sums.map((name) => [name, columns.next(about.sums)]));
  }

  at(column, row) {
    return column[row] ? this.begins[row] + (column[row] - 1) * this.tick : NaN;
  }

  time(name, row) {
    return this.at(this.times[name], row);
  }

  // Where a step ends: at the next one's begin, or where its last part does.
  finish(row) {
    if (row + 1 < this.length) return this.begins[row + 1];
    const ends = [this.begins[row], this.time("end", row), this.time("optimizerEnd", row)];
    return Math.max(...ends.filter((each) => !Number.isNaN(each)));
  }

  // The step that is going on at a time: the last one that has begun.
  rowAt(time) {
    let low = 0, high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.begins[middle] <= time) low = middle + 1; else high = middle;
    }
    return Math.max(0, low - 1);
  }
}

class Recording {
  constructor(columns, section) {
    const buckets = section.buckets.length;
    this.tracks = section.tracks.map((about) => new Track(columns, about, buckets, section.tick_ms));
    this.arrivals = new Map();
    for (const track of this.tracks) {
      for (let row = 0; row < track.length; row++) {
        const step = track.steps[row], arrival = track.time("backwardEnd", row);
        if (!(this.arrivals.get(step) >= arrival)) this.arrivals.set(step, arrival);
      }
    }
    this.start = Math.min(...this.tracks.map((track) => track.begins[0]));
    this.end = Math.max(...this.tracks.map((track) => track.finish(track.length - 1)));
  }

  // A step's parts as [which part, from, to]; parts are numbered as the findings list them.
  segments(track, row) {
    const at = (name) => track.time(name, row);
    const begin = track.begins[row], start = at("forwardStart"), buffers = at("buffersEnd");
    const synced = buffers > start ? buffers : start, forward = at("forwardEnd");
    const backward = at("backwardStart"), arrival = at("backwardEnd"), landed = at("landed"), end = at("end");
    const last = Math.min(landed, Math.max(arrival, this.arrivals.get(track.steps[row])));
    const optimizer = at("optimizerEnd"), over = Number.isNaN(optimizer) ? end : optimizer;
    return [
      [PASSES, begin, start], [BUFFERS, start, buffers], [FORWARD, synced, forward], [LOSS, forward, backward],
      [BACKWARD, backward, arrival], [WAITING, arrival, last], [EXPOSED, last, landed], [HANDING_OUT, landed, end],
      [AFTER, end, at("optimizerStart")], [OPTIMIZER, at("optimizerStart"), optimizer],
      [BETWEEN, over, track.finish(row)],
    ].filter(([, from, to]) => to > from);
  }

  // Of each track and part, milliseconds up to each row: what many steps spent is a difference of two.
  totals(track) {
    if (!track.totals) {
      track.totals = Array.from({ length: PARTS }, () => new Float64Array(track.length + 1));
      for (let row = 0; row < track.length; row++) {
        for (const total of track.totals) total[row + 1] = total[row];
        for (const [part, from, to] of this.segments(track, row)) track.totals[part][row + 1] += to - from;
      }
    }
    return track.totals;
  }
}

"use strict";

// Decodes the numbers that paceline.tools.report.page_numbers has encoded.

const TIMES = ["forwardStart", "buffersEnd", "forwardEnd", "backwardStart", "backwardEnd", "allReduced", "end",
  "optimizerStart", "optimizerEnd"];
// The parts of a step, by their indices in report.parts.
const ACCUMULATION = 0, BUFFERS = 1, FORWARD = 2, LOSS = 3, BACKWARD = 4, WAITING = 5, EXPOSED_COMMUNICATION = 6,
  GRAD_ASSIGNMENT = 7, BEFORE_OPTIMIZER = 8, OPTIMIZER = 9, DATA = 10, PAUSE = 17, PARTS = 18;

async function inflate(text) {
  const compressed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Columns {
  constructor(bytes) {
    this.bytes = bytes;
    this.position = 0;
  }

  next(length) {
    const { bytes, position } = this;
    const column = new Int32Array(length);
    let value = 0;
    for (let i = 0, at = position; i < length; i++, at++) {
      const low = bytes[at] | bytes[at + length] << 8;
      const cell = low | bytes[at + 2 * length] << 16 | bytes[at + 3 * length] << 24;
      value += (cell >>> 1) ^ -(cell & 1);
      column[i] = value;
    }
    this.position = position + 4 * length;
    return column;
  }
}

// The steps of one rank. Times are milliseconds since the first step of all ranks, NaN for what did not happen.
class DrawnRank {
  constructor(columns, { rank, rows, sums, overlays, last_rows: lastRows }, buckets, tick) {
    this.rank = rank;
    this.length = rows;
    this.lastRows = new Set(lastRows);
    this.tick = tick;
    this.steps = columns.next(rows);
    this.kinds = columns.next(rows);
    const high = columns.next(rows), low = columns.next(rows);
    this.begins = Float64Array.from(high, (each, i) => (each * 1048576 + low[i]) * tick);
    this.times = Object.fromEntries(TIMES.map((name) => [name, columns.next(rows)]));
    this.buckets = Array.from({ length: buckets }, () => ({
      ready: columns.next(rows), launch: columns.next(rows), reduced: columns.next(rows), lastSlot: columns.next(rows),
    }));
    const names = ["steps", "first", "step", "waitAfterBackward", "communication", "count"];
    this.sums = Object.fromEntries(names.map((name) => [name, columns.next(sums)]));
    this.readOverlays(columns, rows, overlays);
  }

  // Of each step, what is drawn over its parts, as [index of the part, from, to, cause of a pause].
  readOverlays(columns, rows, overlays) {
    const counts = columns.next(rows);
    const [parts, starts, lengths, causes] = Array.from({ length: 4 }, () => columns.next(overlays));
    this.overlays = [];
    for (let row = 0, at = 0; row < rows; row++) {
      const own = [];
      for (const end = at + counts[row]; at < end; at++) {
        const from = this.begins[row] + starts[at] * this.tick;
        own.push([parts[at], from, from + lengths[at] * this.tick, causes[at]]);
      }
      this.overlays.push(own);
    }
  }

  // The longest pause: its row, which is -1 if there is none, and its length, for comparisons.
  longestPause() {
    const longest = { row: -1, ms: 0 };
    this.overlays.forEach((own, row) => {
      for (const [part, from, to, cause] of own) {
        // A rank that waits for a pause has one of the same length, which does not tell what it is for.
        const ms = (to - from) * (report.causes[cause - 1] === "a pause of another rank" ? 0.99 : 1);
        if (part === PAUSE && ms > longest.ms) Object.assign(longest, { row, ms });
      }
    });
    return longest;
  }

  at(column, row) {
    return column[row] ? this.begins[row] + (column[row] - 1) * this.tick : NaN;
  }

  time(name, row) {
    return this.at(this.times[name], row);
  }

  // When a step ends: when the next one begins; for the last step of a generation, when its last part ends.
  finish(row) {
    if (!this.lastRows.has(row)) return this.begins[row + 1];
    const ends = [this.begins[row], this.time("end", row), this.time("optimizerEnd", row)];
    return Math.max(...ends.filter((each) => !Number.isNaN(each)));
  }

  // The row of the step that runs at a time: the last one that has begun.
  rowAt(time) {
    let low = 0, high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.begins[middle] <= time) low = middle + 1; else high = middle;
    }
    return Math.max(0, low - 1);
  }
}

// The pieces of segments that another one does not cover.
function uncovered(segments, [, start, end]) {
  return segments.flatMap(([part, from, to, cause]) => [
    [part, from, Math.min(to, start), cause], [part, Math.max(from, end), to, cause],
  ].filter(([, left, right]) => right > left));
}

// The steps of one wrapper on all ranks that are drawn.
class DrawnRun {
  constructor(columns, wrapper) {
    const buckets = wrapper.buckets.length;
    this.ranks = wrapper.timelines.map((about) => new DrawnRank(columns, about, buckets, wrapper.tick_ms));
    this.lastBackwardEnds = new Map();
    for (const rank of this.ranks) {
      for (let row = 0; row < rank.length; row++) {
        const step = rank.steps[row], end = rank.time("backwardEnd", row);
        if (isLost(rank.kinds[row])) continue;
        if (!(this.lastBackwardEnds.get(step) >= end)) this.lastBackwardEnds.set(step, end);
      }
    }
    this.start = Math.min(...this.ranks.map((rank) => rank.begins[0]));
    this.end = Math.max(...this.ranks.map((rank) => rank.finish(rank.length - 1)));
    this.healings = wrapper.history.healings.map(({ words, from_ms: from, ms }) => ({ words, from, to: from + ms }));
  }

  // The parts of a step, as [index of the part, from, to]; of a pause also the place of its cause, plus one.
  segments(rank, row) {
    const at = (name) => rank.time(name, row);
    const begin = rank.begins[row], forwardStart = at("forwardStart"), buffersEnd = at("buffersEnd");
    const computeStart = buffersEnd > forwardStart ? buffersEnd : forwardStart, forwardEnd = at("forwardEnd");
    const backwardStart = at("backwardStart"), backwardEnd = at("backwardEnd");
    const allReduced = at("allReduced"), end = at("end");
    const lastBackwardEnd = isLost(rank.kinds[row]) ? backwardEnd : this.lastBackwardEnds.get(rank.steps[row]);
    const waitEnd = Math.min(allReduced, Math.max(backwardEnd, lastBackwardEnd));
    const optimizerStart = at("optimizerStart"), optimizerEnd = at("optimizerEnd");
    const parts = [
      [ACCUMULATION, begin, forwardStart], [BUFFERS, forwardStart, buffersEnd], [FORWARD, computeStart, forwardEnd],
      [LOSS, forwardEnd, backwardStart], [BACKWARD, backwardStart, backwardEnd], [WAITING, backwardEnd, waitEnd],
      [EXPOSED_COMMUNICATION, waitEnd, allReduced], [GRAD_ASSIGNMENT, allReduced, end],
      [BEFORE_OPTIMIZER, end, optimizerStart], [OPTIMIZER, optimizerStart, optimizerEnd],
      [DATA, Number.isNaN(optimizerEnd) ? end : optimizerEnd, rank.finish(row)],
    ].filter(([, from, to]) => to > from);
    return rank.overlays[row].reduce((drawn, each) => [...uncovered(drawn, each), each], parts);
  }

  // Of each part, milliseconds up to each row: the time that many steps spent in it is a difference of two.
  totals(rank) {
    if (!rank.totals) {
      rank.totals = Array.from({ length: PARTS }, () => new Float64Array(rank.length + 1));
      for (let row = 0; row < rank.length; row++) {
        for (const total of rank.totals) total[row + 1] = total[row];
        for (const [part, from, to] of this.segments(rank, row)) rank.totals[part][row + 1] += to - from;
      }
    }
    return rank.totals;
  }
}

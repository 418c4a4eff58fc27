// Plots over all steps, from the sums: one line per rank, with its own colour and dashes; the straggler's is thick.

const LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 20, HIGH = 168;
const DASHES = [[], [7, 3], [2, 3], [10, 3, 2, 3], [4, 2], [12, 4], [1, 2], [6, 2, 1, 2, 1, 2]];

function useStyle(context, { colour, dashes }, isMarked) {
  context.strokeStyle = colour;
  context.lineWidth = isMarked ? 3 : 1.5;
  context.setLineDash(dashes);
}

class Plot {
  constructor(figure, { title, key, unit, values, total = false, most = null }, colours, { lineStyle, onPick }) {
    Object.assign(this, { unit, values, total, most, colours, lineStyle });
    this.canvas = figure.querySelector("canvas");
    this.caption = figure.querySelector(".value");
    figure.querySelector(".title").replaceChildren(term(title, key));
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", (event) => onPick(this.stepAt(event.offsetX)));
  }

  show(run, straggler) {
    const lines = run.ranks.map(({ rank, sums }, place) => ({
      rank,
      place,
      steps: sums.first,
      counts: sums.steps,
      values: Float64Array.from(sums.first, (_, i) => this.values(sums, i)),
    }));
    this.straggler = straggler;
    this.lines = this.total ? [total(lines)] : lines;
    this.first = Math.min(...lines.map((line) => line.steps[0] ?? 0));
    this.last = Math.max(...lines.map(lastStep));
    const every = [];
    for (const { values } of this.lines) every.push(...values.filter(Number.isFinite));
    every.sort((a, b) => a - b);
    // A few very long steps, such as the first, leave the picture at the top, so that the others are not flat.
    const usual = every[Math.floor((every.length - 1) * 0.99)] || 0;
    this.top = this.most ?? ((every.at(-1) > usual * 1.5 ? usual : every.at(-1)) * 1.12 || 1);
    this.redraw();
    this.point(null);
  }

  x(step) {
    const share = (step - this.first) / Math.max(1, this.last - this.first);
    return LEFT + share * (this.canvas.clientWidth - LEFT - RIGHT);
  }

  y(value) {
    return TOP + (1 - value / this.top) * (HIGH - TOP - BOTTOM);
  }

  stepAt(x) {
    const share = (x - LEFT) / (this.canvas.clientWidth - LEFT - RIGHT);
    return Math.round(this.first + Math.min(1, Math.max(0, share)) * (this.last - this.first));
  }

  redraw() {
    const context = fit(this.canvas, HIGH), width = this.canvas.clientWidth;
    this.drawGrid(context, width);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP - 2, width - LEFT - RIGHT, HIGH - TOP - BOTTOM + 4);
    context.clip();
    for (const line of this.lines) if (line.rank !== this.straggler?.rank) this.drawLine(context, line, false);
    for (const line of this.lines) if (line.rank === this.straggler?.rank) this.drawLine(context, line, true);
    context.restore();
    if (this.straggler && this.straggler.first_step > this.first) {
      context.fillStyle = this.colours.alarm;
      const x = Math.round(this.x(this.straggler.first_step));
      for (let y = TOP; y < HIGH - BOTTOM; y += 5) context.fillRect(x, y, 1, 3);
    }
  }

  drawGrid(context, width) {
    context.font = `11px ${this.colours.font}`;
    context.textBaseline = "middle";
    const distance = spacing(this.top, 4);
    for (let value = 0; value <= this.top * 1.001; value += distance) {
      const y = Math.round(this.y(value)) + 0.5;
      context.fillStyle = this.colours.line;
      context.fillRect(LEFT, y, width - LEFT - RIGHT, 1);
      context.fillStyle = this.colours.muted;
      context.textAlign = "right";
      context.fillText(this.unit(value, distance, this.top), LEFT - 6, y);
    }
    const far = Math.max(1, spacing(this.last - this.first || 1, (width - LEFT) / 90));
    context.textAlign = "center";
    for (let step = Math.ceil(this.first / far) * far; step <= this.last; step += far) {
      const label = step.toLocaleString("en"), half = context.measureText(label).width / 2;
      context.fillText(label, Math.min(this.x(step), width - half), HIGH - BOTTOM / 2 + 2);
    }
    context.textAlign = "left";
  }

  // The least and the most value of each pixel, because there may be more steps than pixels.
  drawLine(context, line, marked) {
    const plain = { colour: this.colours.lineStrong, dashes: [] };
    useStyle(context, this.total ? plain : this.lineStyle(line.place), marked);
    context.beginPath();
    let column = null, low = 0, high = 0, open = false;
    const flush = () => {
      if (column === null) return;
      if (open) context.lineTo(column, this.y(low)); else context.moveTo(column, this.y(low));
      if (high !== low) context.lineTo(column, this.y(high));
      open = true;
    };
    for (let i = 0; i < line.values.length; i++) {
      const value = line.values[i];
      if (!Number.isFinite(value)) continue;
      const x = Math.round(this.x(line.steps[i] + (line.counts[i] - 1) / 2));
      if (x === column) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      } else {
        flush();
        [column, low, high] = [x, value, value];
      }
    }
    flush();
    context.stroke();
  }

  point(x) {
    if (x === null) {
      this.caption.textContent = this.straggler && !this.total ? `thick line: rank ${this.straggler.rank}` : "";
      return;
    }
    const step = this.stepAt(x), values = [];
    for (const line of this.lines) {
      const i = indexOf(line.steps, step), value = line.values[i];
      if (Number.isFinite(value)) values.push([line.rank, value]);
    }
    if (!values.length) return;
    values.sort((a, b) => b[1] - a[1]);
    const text = ([rank, value]) => (this.total ? this.unit(value) : `rank ${rank} ${this.unit(value)}`);
    const extremes = values.length > 1 ? [values[0], values.at(-1)] : values;
    this.caption.textContent = `step ${step.toLocaleString("en")}: ${extremes.map(text).join(" … ")}`;
  }
}

function lastStep(line) {
  const last = line.steps.length - 1;
  return last < 0 ? 0 : line.steps[last] + line.counts[last] - 1;
}

function indexOf(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1; else high = middle;
  }
  return Math.max(0, low - 1);
}

// One line with the sums of all ranks' values, where ranks have the same blocks of steps.
function total(lines) {
  const [first, ...rest] = lines;
  const values = first.values.slice();
  for (const line of rest) {
    const indices = new Map(Array.from(line.steps, (step, i) => [step, i]));
    for (let i = 0; i < values.length; i++) values[i] += line.values[indices.get(first.steps[i])] ?? NaN;
  }
  return { rank: null, steps: first.steps, counts: first.counts, values };
}

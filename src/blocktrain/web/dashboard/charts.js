// Curves with a legend that is also their table. Drawn by uPlot, which lies beside this file.

import { bytes, elapsed, nats, short } from "./format.js";

const HEIGHT = 236;
const FEW = 40; // points below which each is marked
const STEEP = 0.05; // of the axis: the values above it are cut off, so that the rest stays readable
const ENOUGH = 12; // points after that
// Six colours and five dashes: thirty blocks before a pair repeats.
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2, 1, 2]];
const TICKS = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2419200];

export const AXES = {
  time: { unit: "time since the start", words: elapsed, steps: SECONDS },
  bytes: { unit: "bytes moved, in and out", words: (value) => (value ? bytes(value) : "0"), steps: decades(0, 15) },
  steps: { unit: "steps of a block", words: short, steps: decades(0, 9) },
};

function decades(from, to) {
  return Array.from({ length: to - from }, (_, n) => [1, 2, 5].map((digit) => digit * 10 ** (from + n))).flat();
}

// How a block is drawn everywhere: its colour by name, and its dash.
export function look(index) {
  return { colour: `--block-${((index - 1) % 6) + 1}`, dash: DASHES[(index - 1) % DASHES.length], width: 1.5 };
}

export const POOLED = { colour: "--ink", dash: [], width: 2 };
export const FUSED = { colour: "--accent", dash: [], width: 2.5 };

// A colour of the page as the canvas understands it.
function cssColour(name) {
  const probe = document.getElementById("probe");
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

// Curves of different places on one axis: sorted places, and a column of values (or null) for each curve.
export function alignCurves(curves, axis) {
  const places = [...new Set(curves.flatMap((curve) => curve[axis]))].sort((a, b) => a - b);
  const at = new Map(places.map((place, n) => [place, n]));
  const columns = curves.map((curve) => {
    const column = new Array(places.length).fill(null);
    curve[axis].forEach((place, n) => (column[at.get(place)] = curve.value[n] > 0 ? curve.value[n] : null));
    return column;
  });
  return [places, ...columns];
}

// A curve of many points as the means of neighbours (a twelfth of it), so that the trend shows, not the noise.
export function smooth(curve) {
  const { value } = curve;
  const reach = Math.floor(value.length / 24);
  if (!reach) return curve;
  const sums = [0];
  for (const one of value) sums.push(sums.at(-1) + one);
  const means = value.map((_, n) => {
    const [before, after] = [Math.min(reach, n), Math.min(reach, n, value.length - 1 - n)]; // the steep start is not bent
    return (sums[n + after + 1] - sums[n - before]) / (before + after + 1);
  });
  return { ...curve, value: means };
}

// The largest value of aligned columns from a place on; null if that is too little to judge by.
function highest([places, ...columns], from) {
  const first = places.findIndex((place) => place >= from);
  const values = columns.flatMap((column) => (first < 0 ? [] : column.slice(first))).filter((value) => value != null);
  return values.length < ENOUGH ? null : values.reduce((most, value) => Math.max(most, value), 0);
}

// Round numbers between two values of a logarithmic axis, not more than fit.
export function ticks(low, high, most) {
  const values = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const digit of TICKS) {
      const value = digit * 10 ** power;
      if (value >= low && value <= high) values.push(value);
    }
  }
  if (values.length >= 3) return values.filter((_, n) => n % Math.ceil(values.length / most) === 0);
  const rough = (high - low) / most; // a narrow range looks linear
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((digit) => digit * size >= rough) * size;
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.max(0, Math.floor(high / step) - first + 1) }, (_, n) => (first + n) * step);
}

export class Chart {
  // `legend.point(values)` gets the values under the cursor, or null without a cursor.
  constructor(box, sync, legend) {
    Object.assign(this, { box, sync, legend, plot: null, shape: "", series: [], axis: "time", recent: false, off: new Set() });
    new ResizeObserver(() => this.resize()).observe(box);
  }

  // series: [{key, curve, colour, dash, width}].
  // `end` is the place up to which the axis goes, so that charts side by side have the same one.
  show(series, axis, recent, end) {
    const shape = JSON.stringify([axis, series.map((s) => s.key)]);
    const moved = recent !== this.recent;
    Object.assign(this, { series, axis, recent, end });
    this.data = alignCurves(
      series.map((s) => s.curve),
      axis,
    );
    this.top = highest(this.data, STEEP * end) ?? Infinity;
    if (shape !== this.shape) {
      this.shape = shape;
      this.build();
    } else {
      this.plot?.setData(this.data, moved || !this.zoomed);
    }
  }

  get zoomed() {
    return this.drawn === true;
  }

  toggle(key) {
    if (!this.off.delete(key)) this.off.add(key);
    const index = this.series.findIndex((s) => s.key === key);
    this.plot?.setSeries(index + 1, { show: !this.off.has(key) });
    return !this.off.has(key);
  }

  unzoom() {
    this.drawn = false;
    this.plot?.setData(this.data, true);
  }

  // Also after the theme has changed.
  build() {
    this.plot?.destroy();
    this.drawn = false;
    if (!this.data) return;
    this.plot = new uPlot(this.options(), this.data, this.box);
  }

  resize() {
    const width = Math.floor(this.box.clientWidth);
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  options() {
    const { words, steps } = AXES[this.axis];
    const [ink, rule] = [cssColour("--muted"), cssColour("--rule")];
    const font = `12px ${getComputedStyle(this.box).fontFamily}`;
    const common = { stroke: ink, font, ticks: { show: false }, grid: { stroke: rule, width: 1 } };
    return {
      width: Math.max(200, Math.floor(this.box.clientWidth)),
      height: HEIGHT,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: (_, low, high) => this.span(low, high) },
        y: { distr: 3, range: (_, low, high) => [low * 0.985, Math.max(Math.min(high, this.top) * 1.03, low * 1.05)] },
      },
      axes: [
        { ...common, size: 30, gap: 6, space: 64, incrs: steps, grid: { show: false }, values: (_, values) => values.map(words) },
        {
          ...common,
          size: 44,
          gap: 6,
          splits: (_u, _axis, low, high) => ticks(low, high, 6),
          filter: (_, values) => values,
          values: (_, values) => values.map((value) => Number(value.toPrecision(4)).toString()),
        },
      ],
      series: [{}, ...this.series.map((s) => this.stroke(s))],
      cursor: {
        sync: { key: this.sync },
        points: { size: 7 },
        drag: { x: true, y: false, dist: 8 },
        dataIdx: (plot, series, index) => nearest(plot.data[series], index),
      },
      hooks: {
        setCursor: [(plot) => this.point(plot)],
        setSelect: [(plot) => plot.select.width > 0 && this.hold()],
      },
    };
  }

  hold() {
    this.drawn = true;
    this.legend.zoomed?.();
  }

  // The whole run from 0 on, or its last third; never a point without a width.
  span(low, high) {
    if (low == null) return [0, 1];
    if (this.drawn) return [low, high];
    const to = Math.max(high, this.end);
    const from = this.recent ? (2 * to) / 3 : 0;
    return to > from ? [from, to] : [0, 1];
  }

  stroke(s) {
    const colour = cssColour(s.colour);
    return {
      show: !this.off.has(s.key),
      stroke: colour,
      width: s.width,
      dash: s.dash,
      spanGaps: true,
      points: { show: () => s.curve.value.length < FEW, size: 4.5, fill: colour, stroke: colour, width: 0 },
    };
  }

  point(plot) {
    const { left, idxs, idx } = plot.cursor;
    if (left == null || left < 0 || idx == null) return this.legend.point(null);
    const values = new Map(this.series.map((s, n) => [s.key, plot.data[n + 1][idxs[n + 1]]]));
    this.legend.point({ at: AXES[this.axis].words(plot.data[0][idx]), values });
  }

  // In words, for screen readers.
  describe(title) {
    const parts = this.series.map((s) => `${s.label} ${nats(s.curve.value.at(-1))}`);
    return `Chart: ${title} over ${AXES[this.axis].unit}. ${parts.length ? `Newest: ${parts.join(", ")}.` : "No points yet."}`;
  }
}

function nearest(column, index) {
  for (let away = 0; away < column.length; away++) {
    if (column[index - away] != null) return index - away;
    if (column[index + away] != null) return index + away;
  }
  return index;
}

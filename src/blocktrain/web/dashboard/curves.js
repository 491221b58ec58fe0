// The two charts, what they share, and their legends.

import { curveGain } from "./fold.js";
import { Chart, FUSED, POOLED, look, smooth } from "./charts.js";
import { make, setAttribute, setHidden, setText } from "./elements.js";
import { Keyed, swatch } from "./tables.js";
import { NONE, blockTitle, change, nats, perByte, scoreTitle, unitOf } from "./format.js";

const LONG = 12; // rows of a legend before it scrolls
const ORDER = { pool: 1000, fused: 1001 };

export class Curves {
  constructor(onZoom) {
    Object.assign(this, { axis: "time", recent: false, onZoom });
    this.figures = [new Figure("ce", "cross entropy on text never seen", this), new Figure("loss", "training loss", this)];
  }

  update(state) {
    const [ce, loss] = this.figures;
    const moved = state.bytesIn + state.bytesOut;
    this.end = [...state.loss.values(), ...state.scores.values()].reduce((far, curve) => Math.max(far, ...curve[this.axis].slice(-1)), 0);
    setText(ce.table.querySelector("th:last-child"), `per ${unitOf(moved)}`);
    ce.update(scoreSeries(state), (curve) => [change(curveGain(curve).gain), perByte(curveGain(curve).perByte, moved)]);
    loss.update(lossSeries(state), (curve, item) => [change(curveGain(curve).gain), String(state.blocks.get(item.block)?.version ?? NONE)]);
  }

  // Colours are drawn into the canvas: a new theme needs a new one.
  restyle() {
    for (const figure of this.figures) figure.chart.build();
  }

  unzoom() {
    for (const figure of this.figures) figure.chart.unzoom();
  }
}

function scoreSeries(state) {
  const rank = (name) => ORDER[name] ?? Number(name.slice(6)) ?? 0;
  const names = [...state.scores.keys()].sort((a, b) => rank(a) - rank(b));
  return names.map((name) => {
    const drawn = { pool: POOLED, fused: FUSED }[name] ?? look(Number(name.slice(6)) || 1);
    return { key: name, label: scoreTitle(state.run, name), curve: state.scores.get(name), strong: name in ORDER, ...drawn };
  });
}

function lossSeries(state) {
  const blocks = [...state.loss.keys()].sort((a, b) => a - b);
  return blocks.map((block) => {
    const drawn = state.run?.fusion === block ? { ...FUSED, width: 2 } : look(block);
    return { key: `block-${block}`, block, label: blockTitle(state.run, block), curve: smooth(state.loss.get(block)), ...drawn };
  });
}

class Figure {
  constructor(id, title, shared) {
    const root = document.getElementById(id);
    Object.assign(this, { root, title, shared, series: [], words: () => [], pointed: null });
    this.plot = root.querySelector(".plot");
    this.blank = root.querySelector(".blank");
    this.table = root.querySelector(".legend");
    this.nowHead = this.table.querySelector("th:nth-child(2)");
    this.chart = new Chart(this.plot, "run", { point: (values) => this.point(values), zoomed: () => shared.onZoom() });
    this.legend = new Keyed(
      this.table.tBodies[0],
      (item) => item.key,
      (item) => this.row(item),
      (parts, item) => this.put(parts, item),
    );
  }

  row(item) {
    const button = make("button", "", swatch(item), item.label);
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => button.setAttribute("aria-pressed", String(this.chart.toggle(item.key))));
    const head = make("th", "", button);
    head.scope = "row";
    const cells = [make("td"), make("td"), make("td")];
    return { root: make("tr", item.strong ? "strong" : "", head, ...cells), cells };
  }

  put({ cells }, item) {
    const at = this.pointed?.values.get(item.key);
    setText(cells[0], nats(this.pointed ? at : item.curve.value.at(-1)));
    this.words(item.curve, item).forEach((text, n) => setText(cells[n + 1], text));
  }

  point(cursor) {
    if (!cursor && !this.pointed) return;
    this.pointed = cursor;
    setText(this.nowHead, cursor ? `at ${cursor.at}` : "now");
    this.legend.update(this.series);
  }

  update(series, words) {
    Object.assign(this, { series, words });
    const empty = series.length === 0;
    for (const element of [this.plot, this.table]) setHidden(element, empty);
    setHidden(this.blank, !empty);
    this.table.classList.toggle("long", series.length > LONG);
    this.legend.update(series);
    if (empty) return;
    this.chart.show(series, this.shared.axis, this.shared.recent, this.shared.end);
    setAttribute(
      this.plot,
      "data-points",
      series.reduce((sum, item) => sum + item.curve.value.length, 0),
    );
    setAttribute(this.plot, "aria-label", this.chart.describe(this.title));
  }
}

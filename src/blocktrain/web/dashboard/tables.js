// Lists and tables that change in place: rows keep their elements, and with them focus, selection and place.

import { make, setAttribute } from "./elements.js";

// A bar from 0 to 1.
export function meter(label) {
  const bar = make("div", "meter", make("i"));
  bar.setAttribute("role", "progressbar");
  bar.setAttribute("aria-label", label);
  bar.setAttribute("aria-valuemin", "0");
  bar.setAttribute("aria-valuemax", "100");
  return bar;
}

export function setMeter(bar, value) {
  const share = Math.min(1, Math.max(0, value || 0));
  setAttribute(bar, "aria-valuenow", Math.round(100 * share));
  bar.firstChild.style.transform = `scaleX(${share.toFixed(4)})`;
}

// A line as a curve is drawn, for legends.
export function swatch({ colour, dash, width }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({ width: 26, height: 10, "aria-hidden": "true", class: "swatch" }))
    svg.setAttribute(name, value);
  for (const [name, value] of Object.entries({ x1: 1, y1: 5, x2: 25, y2: 5, "stroke-width": Math.max(2, width) }))
    line.setAttribute(name, value);
  if (dash.length) line.setAttribute("stroke-dasharray", dash.join(" "));
  line.style.stroke = `var(${colour})`;
  svg.append(line);
  return svg;
}

// Children of `parent` by key: built once by `build(item)`, updated by `put(parts, item)`, in the order of the items.
export class Keyed {
  constructor(parent, key, build, put) {
    Object.assign(this, { parent, key, build, put, known: new Map() });
  }

  update(items) {
    const keys = new Set(items.map(this.key));
    for (const [key, parts] of this.known) {
      if (keys.has(key)) continue;
      parts.root.remove();
      this.known.delete(key);
    }
    let place = this.parent.firstElementChild;
    for (const item of items) {
      const key = this.key(item);
      let parts = this.known.get(key);
      if (!parts) this.known.set(key, (parts = this.build(item)));
      this.put(parts, item);
      if (parts.root === place) place = place.nextElementSibling;
      else this.parent.insertBefore(parts.root, place);
    }
  }

  clear() {
    for (const parts of this.known.values()) parts.root.remove();
    this.known.clear();
  }
}

// A body of a table: columns are [{name, label, cell?: () => parts, put: (cell, item, parts)}]; the first one names the row.
export function tableOf(body, key, columns) {
  const build = () => {
    const root = make("tr");
    const cells = columns.map((column, n) => {
      const cell = make(n ? "td" : "th", column.name);
      if (!n) cell.scope = "row";
      cell.dataset.label = column.label;
      root.append(cell);
      return [cell, column.cell?.(cell)];
    });
    return { root, cells };
  };
  const put = (parts, item) => columns.forEach((column, n) => column.put(parts.cells[n][0], item, parts.cells[n][1]));
  return new Keyed(body, key, build, put);
}

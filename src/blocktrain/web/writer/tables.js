// Elements that change in place: rows keep their elements, and with them focus, selection and place.

import { make } from "./elements.js";

// Rows of a table by key: columns are [{name, label, put: (cell, item)}]; the first one names the row.
export class Rows {
  constructor(body, key, columns) {
    Object.assign(this, { body, key, columns, known: new Map() });
  }

  update(items) {
    const keys = new Set(items.map(this.key));
    for (const [key, row] of this.known) {
      if (keys.has(key)) continue;
      row.remove();
      this.known.delete(key);
    }
    let place = this.body.firstElementChild;
    for (const item of items) {
      const row = this.known.get(this.key(item)) ?? this.build(item);
      this.columns.forEach((column, n) => column.put(row.children[n], item));
      if (row === place) place = place.nextElementSibling;
      else this.body.insertBefore(row, place);
    }
  }

  build(item) {
    const row = make("tr");
    this.columns.forEach((column, n) => {
      const cell = make(n ? "td" : "th", column.name);
      if (!n) cell.scope = "row";
      cell.dataset.label = column.label;
      row.append(cell);
    });
    this.known.set(this.key(item), row);
    return row;
  }
}

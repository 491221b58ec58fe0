// The table of workers: sorted, filtered, and changed in place.

import { make, setAttribute, setHidden, setText } from "./elements.js";
import { meter, setMeter, tableOf } from "./tables.js";
import { NONE, ago, bytes, count, many, speed } from "./format.js";

const AT_FIRST = 25; // rows; a button shows the rest
const RANK = { training: 0, waiting: 0, lost: 1, left: 2, kicked: 3 }; // equal, so that rows keep their place between tasks
const here = (worker) => worker.state === "training" || worker.state === "waiting";
const GROUPS = { all: () => true, here, gone: (worker) => !here(worker), refused: (worker) => worker.refused > 0 };

// by: what is sorted by; down: the largest first.
const COLUMNS = [
  { name: "name", label: "worker", by: (w) => (w.name || w.id).toLowerCase(), cell: twoLines, put: putName },
  { name: "device", label: "device", by: (w) => w.device, put: (cell, w) => setText(cell, w.device || NONE) },
  { name: "block n", label: "block", by: (w) => w.block ?? 1e9, put: (cell, w) => setText(cell, w.block ?? NONE) },
  { name: "condition", label: "state", by: (w) => RANK[w.state] ?? 9, cell: (cell) => within(cell, "span"), put: putState },
  { name: "task", label: "task", by: taskProgress, down: true, cell: taskCell, put: putTask },
  { name: "speed n", label: "tokens/s", by: (w) => w.speed, down: true, put: (cell, w) => setText(cell, speed(w.speed)) },
  { name: "behind n", label: "behind", by: (w) => w.staleness ?? -1, down: true, put: putBehind },
  { name: "accepted n", label: "accepted", by: (w) => w.accepted, down: true, put: (cell, w) => setText(cell, count(w.accepted)) },
  { name: "standing", label: "standing", by: (w) => w.barred ?? 0, down: true, cell: twoLines, put: putStanding },
  { name: "refused n", label: "refused", by: (w) => w.refused, down: true, cell: twoLines, put: putRefused },
  { name: "moved n", label: "in / out", by: (w) => w.bytesIn + w.bytesOut, down: true, cell: twoLines, put: putMoved },
  { name: "seen n", label: "seen", by: (w) => -(w.seen ?? 0), put: (cell, w) => setText(cell, w.seen == null ? NONE : ago(w.ago)) },
];

export class Workers {
  constructor(onChange) {
    const byId = (id) => document.getElementById(id);
    Object.assign(this, { onChange, sort: 3, down: false, words: "", group: "all", limit: AT_FIRST });
    Object.assign(this, { table: byId("workers"), blank: byId("no-workers"), more: byId("more-workers"), select: byId("sort") });
    this.rows = tableOf(this.table.tBodies[0], (worker) => worker.id, COLUMNS);
    this.heads = COLUMNS.map((column, n) => this.head(column, n));
    this.counts = [...document.querySelectorAll("#group input")].map((input) => [input.value, input.parentNode.querySelector("b")]);
    this.select.append(...COLUMNS.map((column, n) => Object.assign(make("option", "", column.label), { value: n })));
    this.select.addEventListener("change", () => this.sortBy(Number(this.select.value), true));
    byId("filter").addEventListener("input", (event) => this.change({ words: event.target.value.trim().toLowerCase(), limit: AT_FIRST }));
    byId("group").addEventListener("change", (event) => this.change({ group: event.target.value, limit: AT_FIRST }));
    this.more.addEventListener("click", () => this.change({ limit: Infinity }));
    this.mark();
  }

  head(column, n) {
    const button = make("button", "", column.label);
    button.type = "button";
    button.addEventListener("click", () => this.sortBy(n));
    const head = make("th", column.name, button);
    head.scope = "col";
    this.table.tHead.rows[0].append(head);
    return head;
  }

  sortBy(n, fresh = false) {
    const again = n === this.sort && !fresh;
    this.change({ sort: n, down: again ? !this.down : COLUMNS[n].down === true });
    this.mark();
  }

  mark() {
    this.heads.forEach((head, n) => setAttribute(head, "aria-sort", n === this.sort ? (this.down ? "descending" : "ascending") : null));
    this.select.value = this.sort;
  }

  change(what) {
    Object.assign(this, what);
    this.onChange();
  }

  update(state, now) {
    const all = [...state.workers.values()];
    for (const worker of all) worker.ago = worker.seen == null ? 0 : now - worker.seen;
    for (const [group, label] of this.counts) setText(label, all.filter(GROUPS[group]).length);
    const rows = all.filter((worker) => GROUPS[this.group](worker) && (!this.words || matches(worker, this.words)));
    const { by } = COLUMNS[this.sort];
    const sign = this.down ? -1 : 1;
    const name = COLUMNS[0].by;
    rows.sort((a, b) => sign * compare(by(a), by(b)) || compare(a.block ?? 1e9, b.block ?? 1e9) || compare(name(a), name(b)));
    this.rows.update(rows.slice(0, this.limit));
    setHidden(this.table, rows.length === 0);
    setHidden(this.blank, rows.length > 0);
    setText(
      this.blank,
      all.length ? "No worker matches." : "Nobody has joined yet. Run the join command on any machine that should help.",
    );
    setHidden(this.more, rows.length <= this.limit);
    if (rows.length > this.limit) setText(this.more, `Show all ${many(rows.length, "worker")}`);
  }
}

function compare(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}

function matches(worker, words) {
  const text =
    `${worker.name} ${worker.id} ${worker.device} ${worker.state} block ${worker.block ?? ""} ${worker.why?.code ?? ""}`.toLowerCase();
  return words.split(/\s+/).every((word) => text.includes(word));
}

function within(cell, tag) {
  const child = make(tag);
  cell.append(child);
  return child;
}

function twoLines(cell) {
  return { top: within(cell, "span"), small: within(cell, "small") };
}

function putName(_, worker, { top, small }) {
  setText(top, worker.name || worker.id.slice(0, 8));
  setText(small, worker.name ? worker.id.slice(0, 8) : "");
}

function putState(cell, worker, label) {
  setAttribute(label, "class", `state ${Object.hasOwn(RANK, worker.state) ? worker.state : ""}`);
  setText(label, worker.state);
  setAttribute(cell, "title", worker.reason || null);
}

function taskProgress(worker) {
  return worker.task?.steps ? worker.task.step / worker.task.steps : -1;
}

function taskCell(cell) {
  return { text: within(cell, "span"), bar: cell.appendChild(meter("steps of the task")) };
}

function putTask(_, worker, { text, bar }) {
  const { task } = worker;
  setText(text, task ? (task.steps ? `${task.step} / ${task.steps}` : `task ${task.task}`) : NONE);
  setHidden(bar, !task?.steps);
  if (task?.steps) setMeter(bar, task.step / task.steps);
}

function putBehind(cell, worker) {
  setText(cell, worker.staleness ?? NONE);
  setAttribute(cell, "title", worker.late ? `${many(worker.late, "update")} came from an older version` : null);
}

function putStanding(cell, worker, { top, small }) {
  setText(top, worker.standing ?? NONE); // a log does not say
  setText(small, worker.barred ? `${many(worker.barred, "round")} left` : worker.share ? `share ${worker.share.toFixed(2)}` : "");
  setAttribute(cell, "title", worker.checked == null ? null : `${many(worker.checked, "update")} trained again and right`);
}

function putRefused(cell, worker, { top, small }) {
  setText(top, count(worker.refused));
  setText(small, worker.why?.code ?? "");
  setAttribute(cell, "title", worker.why?.sentence || null);
}

function putMoved(_, worker, { top, small }) {
  setText(top, bytes(worker.bytesIn));
  setText(small, worker.bytesOut ? bytes(worker.bytesOut) : ""); // a log does not say
}

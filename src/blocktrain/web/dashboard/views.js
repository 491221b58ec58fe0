// Everything that is neither a chart nor the table of workers: written into the elements of index.html, in place.

import { atWork, curveGain, runGain, isTooEarly, progress, remaining, share, stepBudget, tail } from "./fold.js";
import { FUSED, look } from "./charts.js";
import { make, setAttribute, setHidden, setText } from "./elements.js";
import { Keyed, meter, setMeter, swatch, tableOf } from "./tables.js";
import {
  ago,
  blockTitle,
  bytes,
  change,
  clock,
  count,
  duration,
  entryWords,
  joinNames,
  many,
  nats,
  perByte,
  percent,
  runTitle,
  sentence,
  short,
  describeEvent,
  unitOf,
  who,
} from "./format.js";

const FEED_LINES = 80; // lines of the feed
const SEGMENTS = 24; // blocks that have a bar of their own in the head
const SOON = 5; // seconds before a deadline
const byId = (id) => document.getElementById(id);

export function curveStyle(run, index) {
  return run?.fusion === index ? { ...FUSED, width: 2 } : look(index);
}

export class Head {
  constructor() {
    const build = (block) => {
      const bar = meter(`block ${block.index}`);
      return { root: bar };
    };
    const put = ({ root }, block) => {
      root.style.setProperty("--tint", `var(${block.colour})`);
      setMeter(root, block.share);
    };
    this.segments = new Keyed(byId("segments"), (block) => block.index, build, put);
    this.figures = new Keyed(byId("figures"), (figure) => figure.name, figureParts, putFigure);
  }

  update(state, now) {
    const { run } = state;
    const spent = state.finished ? 1 : progress(state);
    setText(byId("run-name"), runTitle(run));
    setText(byId("kicker"), kicker(run));
    setText(byId("why"), state.finished ? "" : why(state));
    setText(byId("share"), percent(spent));
    const secondsLeft = remaining(state, now);
    const ran = `${duration((state.finished?.time ?? now) - state.first)} so far`;
    setText(
      byId("eta"),
      state.finished ? `took ${duration(state.finished.time - state.first)}` : secondsLeft == null ? ran : `about ${duration(secondsLeft)} left · ${ran}`,
    );
    const blocks = [...state.blocks.values()].map((block) => ({
      index: block.index,
      share: share(state, block),
      colour: curveStyle(run, block.index).colour,
    }));
    this.segments.update(blocks.length <= SEGMENTS ? blocks : [{ index: "all blocks", share: spent, colour: "--accent" }]);
    setText(byId("budget"), budget(state));
    this.figures.update(figures(state, now));
  }
}

// What the run does, and what keeps it from doing more.
function why(state) {
  if (state.phase === "stopping") return `Stopping: ${nameWorkers(state, state.reason)}`;
  const workers = [...state.workers.values()];
  if (!workers.length) return "Waiting for its first worker.";
  if (!workers.some(isHere)) return "All workers have left. The run waits for one.";
  const open = [...state.blocks.values()].filter((block) => share(state, block) < 1 && !isTooEarly(state, block));
  const idle = open.filter((block) => !atWork(state, block.index).length).map((block) => `${block.index}`);
  if (idle.length === open.length) return "Running. No block is being trained now.";
  return idle.length ? `Running. Blocks without a worker: ${joinNames(idle, 4)}.` : "Running. Every open block is being trained.";
}

function isHere(worker) {
  return worker.state === "training" || worker.state === "waiting";
}

function kicker(run) {
  const parts = [
    run.run && `run ${String(run.run).slice(0, 8)}`,
    many(run.blocks ?? 0, "block") + (run.fusion ? `, the last one fuses` : ""),
    run.steps && `${count(run.steps)} steps each` + (run.fusion_steps && run.fusion_steps !== run.steps ? `, fusion ${count(run.fusion_steps)}` : ""),
    run.compression && (run.compression === "none" ? "updates uncompressed" : `${run.compression} updates`),
    run.task_seconds && `tasks of about ${duration(run.task_seconds)}`,
  ];
  return parts.filter(Boolean).join(" · ");
}

function budget(state) {
  const blocks = [...state.blocks.values()];
  const total = (list, number) => list.reduce((sum, item) => sum + number(item), 0);
  const parts = [
    state.run.steps && `${short(total(blocks, (block) => block.steps))} of ${short(total(blocks, (block) => stepBudget(state.run, block)))} steps`,
  ];
  if (state.budget.rounds) parts.push(`ends after ${many(state.budget.rounds, "round")} of each block`);
  if (state.budget.tokens) parts.push(`ends after ${short(state.budget.tokens)} tokens`);
  if (state.restarts) parts.push(`coordinator started again ${state.restarts === 1 ? "once" : `${state.restarts} times`}`);
  return parts.filter(Boolean).join(" · ");
}

function figures(state, now) {
  const workers = [...state.workers.values()];
  const working = workers.filter((worker) => worker.state === "training").length;
  const here = workers.filter(isHere).length;
  const pace = workers.reduce((sum, w) => sum + (w.state === "training" ? w.speed : 0), 0);
  const tokens = [...state.blocks.values()].reduce((sum, block) => sum + block.tokens, 0);
  const moved = state.bytesIn + state.bytesOut;
  const score = (name) => (state.scores.has(name) ? curveGain(state.scores.get(name)) : null);
  const [pool, fused] = [score("pool"), score("fused")];
  const scoredAgo = state.scored == null ? "" : ` · scored ${ago(now - state.scored)}`;
  const note = (score) => (score ? `${nats(score.now / Math.LN2 / state.bytesPerToken)} bits per byte${scoredAgo}` : "not scored yet");
  const best = runGain(state);
  const refused = [...state.refusals.values()].reduce((sum, refusal) => sum + refusal.count, 0);
  const accepted = [...state.blocks.values()].reduce((sum, block) => sum + block.accepted, 0);
  return [
    {
      name: "Pooled CE",
      value: nats(pool?.now),
      note: note(pool),
      lead: !fused,
    },
    ...(state.run.fusion
      ? [
          {
            name: "Fused CE",
            value: nats(fused?.now),
            note: note(fused),
            lead: true,
          },
        ]
      : []),
    {
      name: `CE per ${unitOf(moved)} moved`,
      value: perByte(best?.perByte, moved),
      note: best?.gain == null ? "needs two scores" : `${change(best.gain)} since the first score`,
    },
    { name: "Moved", value: bytes(moved), note: `${bytes(state.bytesIn)} in · ${bytes(state.bytesOut)} out${state.float32Share === null ? "" : ` · ${state.float32Share.toFixed(2)} of float32`}` },
    { name: "Tokens trained on", value: short(tokens), note: "by all blocks together" },
    {
      name: "Workers",
      value: count(here),
      note: `${working} training${pace > 0 ? ` · ${short(pace)}\u00a0tokens/s` : ""} · ${workers.length} known`,
    },
    {
      name: "Rounds closed",
      value: count(state.rounds),
      note: `${many(accepted, "update")} accepted, ${many(refused, "request")} refused`,
    },
  ];
}

function figureParts() {
  const parts = { name: make("dt"), value: make("dd"), note: make("dd") };
  return { ...parts, root: make("div", "", parts.name, parts.value, parts.note) };
}

function putFigure(parts, figure) {
  for (const part of ["name", "value", "note"]) setText(parts[part], figure[part]);
  parts.root.classList.toggle("lead", figure.lead === true);
}

export function blockTable() {
  const text = (name, label, put) => ({ name, label, put: (cell, view) => setText(cell, put(view.block)) });
  return tableOf(byId("blocks").tBodies[0], (view) => view.block.index, [
    { name: "name", label: "block", cell: blockName, put: putBlockName },
    text("version n", "version", (block) => block.version),
    {
      name: "steps n",
      label: "steps",
      cell: (cell) => ({ text: cell.appendChild(make("span")), bar: cell.appendChild(meter("steps of the budget")) }),
      put: putSteps,
    },
    text("loss n", "loss", (block) => nats(block.loss)),
    {
      name: "updates n",
      label: "updates",
      cell: (cell) => ({ top: cell.appendChild(make("span")), small: cell.appendChild(make("small")) }),
      put: putUpdates,
    },
    {
      name: "moved n",
      label: "in / out",
      cell: (cell) => ({ top: cell.appendChild(make("span")), small: cell.appendChild(make("small")) }),
      put: putTraffic,
    },
    { name: "round", label: "open round", cell: roundCell, put: putRound },
  ]);
}

// What the table of blocks shows of a state at a moment.
export function blockViews(state, now) {
  return [...state.blocks.values()]
    .sort((a, b) => a.index - b.index)
    .map((block) => ({ block, now, run: state.run, share: share(state, block), over: state.finished !== null, state }));
}

function blockName(cell) {
  return { line: null, label: cell.appendChild(make("span")) };
}

function putBlockName(cell, view, parts) {
  const drawn = curveStyle(view.run, view.block.index);
  if (parts.line !== drawn.colour) {
    cell.querySelector("svg")?.remove();
    cell.prepend(swatch(drawn));
    parts.line = drawn.colour;
  }
  setText(parts.label, blockTitle(view.run, view.block.index));
}

function putSteps(_, { block, run, share: part }, { text, bar }) {
  const end = stepBudget(run, block);
  setText(text, end ? `${count(block.steps)} / ${count(end)}` : count(block.steps));
  setMeter(bar, part);
}

const LATE =
  "Late updates were trained from an older version of the block. They are used: one version behind counts in full, each further version behind counts less.";

function putUpdates(cell, { block }, { top, small }) {
  const later = block.late - block.lateByOne;
  const parts = [
    block.lateByOne && `${block.lateByOne} one version behind`,
    later > 0 && `${later} later`,
    block.refused && `${block.refused} refused`,
  ];
  setText(top, count(block.accepted));
  setText(small, parts.filter(Boolean).join(", "));
  setAttribute(cell, "title", block.late ? LATE : null);
}

function putTraffic(_, { block }, { top, small }) {
  setText(top, bytes(block.bytesIn));
  setText(small, block.bytesOut ? bytes(block.bytesOut) : "");
}

function roundCell(cell) {
  const parts = { have: make("span"), left: make("span"), bar: meter("time of the round"), why: make("small") };
  cell.append(make("div", "line", parts.have, parts.left), parts.bar, parts.why);
  return parts;
}

function putRound(_, view, parts) {
  const { block, now, state } = view;
  const { round } = block;
  const over = view.over || view.share >= 1;
  const came = Math.max(round.count ?? 0, round.updates.size);
  const working = round.working ?? round.leased.size;
  const target = Math.max(round.target ?? 0, round.minimum);
  const left = round.deadline == null ? null : round.deadline - now;
  setText(parts.have, over ? "Done" : `${came} of ${many(target, "replica")}${working ? ` · ${working} at work` : ""}`);
  setText(parts.left, over ? "" : left == null ? "no deadline yet" : left > 0 ? `${duration(left)} left` : "deadline has passed");
  setAttribute(parts.left, "class", left != null && left < SOON && !over ? "soon" : "");
  setHidden(parts.bar, over || left == null);
  const length = round.length ?? (round.opened != null && round.deadline != null ? round.deadline - round.opened : null);
  if (left != null && length > 0) setMeter(parts.bar, left / length);
  setText(parts.why, over ? "It has spent its budget." : whyOpen(state, block));
}

// The coordinator's own reason, unless it only counts what stands above it.
function whyOpen(state, block) {
  if (isTooEarly(state, block)) return "Begins when the other blocks have spent half of their budget.";
  const { reason } = block.round;
  if (reason && !/ has \d+ of \d+ replicas and |waits for its first worker$/.test(reason)) return sentence(nameWorkers(state, reason));
  const names = atWork(state, block.index).map((worker) => who(state, worker.id));
  return names.length ? `Waits for ${joinNames(names, 3)}.` : "Waits for a worker.";
}

// Reasons name workers by id; people know them by name.
function nameWorkers(state, text) {
  return text.replace(/\b[0-9a-f]{32}\b/g, (id) => who(state, id));
}

export class Feed {
  constructor() {
    this.tone = "news";
    const build = () => {
      const parts = { time: make("time"), text: make("span") };
      return { ...parts, root: make("li", "", parts.time, parts.text) };
    };
    const put = (parts, line) => {
      setText(parts.time, line.at);
      setText(parts.text, line.text);
      setAttribute(parts.root, "class", line.tone);
    };
    this.lines = new Keyed(byId("feed"), (line) => line.key, build, put);
  }

  update(state) {
    const inputs = [state, state.feedCount, this.tone];
    if (this.inputs?.every((part, n) => part === inputs[n])) return;
    this.inputs = inputs;
    const lines = [];
    for (let n = state.feed.length - 1; n >= 0 && lines.length < FEED_LINES; n--) {
      const event = state.feed[n];
      const { text, tone } = describeEvent(state, event);
      if (this.tone === "trouble" ? tone !== "trouble" : this.tone === "news" && tone === "quiet") continue;
      lines.push({ key: event.seq ?? `n${n}`, at: clock(event.time), text: nameWorkers(state, text), tone });
    }
    this.lines.update(lines);
  }
}

export class Refusals {
  constructor() {
    const build = () => {
      const parts = { code: make("code"), times: make("span"), text: make("p"), by: make("p") };
      return { ...parts, root: make("li", "", make("div", "top", parts.code, parts.times), parts.text, parts.by) };
    };
    const put = (parts, refusal) => {
      setText(parts.code, refusal.code);
      setText(parts.times, refusal.time ? `${count(refusal.count)} × · ${clock(refusal.time)}` : `${count(refusal.count)} ×`);
      setText(parts.text, sentence(refusal.sentence));
      setText(parts.by, refusal.by);
      setHidden(parts.by, !refusal.by);
    };
    this.list = new Keyed(byId("refusals"), (refusal) => refusal.code, build, put);
  }

  update(state) {
    const refusals = [...state.refusals.values()].sort((a, b) => b.count - a.count || (a.code < b.code ? -1 : 1));
    this.list.update(refusals.map((item) => ({ ...item, by: by(state, item.workers) })));
    setHidden(byId("no-refusals"), refusals.length > 0);
    setText(byId("refusals-sum"), refusals.length ? `${count(refusals.reduce((sum, item) => sum + item.count, 0))} in all` : "");
  }
}

function by(state, workers) {
  const names = [...workers]
    .sort((a, b) => b[1] - a[1])
    .slice(0, 3)
    .map(([id, times]) => `${who(state, id)} ${times} ×`);
  const more = workers.size - names.length;
  return names.length ? `${names.join(", ")}${more > 0 ? ` and ${more} more` : ""}` : "";
}

export class Ledger {
  constructor() {
    this.entries = []; // newest last
    const build = () => {
      const parts = { number: make("i"), kind: make("b"), text: make("span"), hash: make("code") };
      const words = make("div", "", parts.kind, parts.text);
      return { ...parts, root: make("li", "", parts.number, words, parts.hash) };
    };
    const put = (parts, line) => {
      for (const part of ["number", "kind", "text", "hash"]) setText(parts[part], line[part]);
    };
    this.list = new Keyed(byId("ledger"), (line) => line.number, build, put);
  }

  update(state, live) {
    const lines = live
      ? this.entries.map((entry) => ({
          number: `#${entry.seq}`,
          kind: entry.kind,
          text: entryWords(state, entry),
          hash: entry.hash.slice(0, 8),
        }))
      : tail(state).map((event) => ({ number: `#${event.seq ?? ""}`, kind: event.kind, text: describeEvent(state, event).text, hash: "" }));
    this.list.update(lines.reverse());
    setText(byId("ledger-title"), live ? "Ledger" : "Last events of the log");
    setText(byId("ledger-sum"), live && this.entries.length ? `hash-chained, ${many(this.entries.at(-1).seq, "entry", "entries")}` : "");
    setHidden(byId("no-ledger"), lines.length > 0);
  }
}

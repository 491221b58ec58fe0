// What is shown of the model, its hosts and its answers.

import { make, setAttribute, setHidden, setText } from "./elements.js";
import { Rows } from "./tables.js";
import { NONE, bytes, count, digits, duration, joinNames, many, milliseconds, percent } from "./format.js";

const COLOURS = 6;
const BARS = 160; // sweeps that the strip has room for
const LEAST_SCALE = 8; // tokens per sweep that fill the strip, unless there are more
const byId = (id) => document.getElementById(id);

export function modelWords(status) {
  const { model } = status;
  const parts = [many(model.blocks, "block"), model.compose && `composed by ${model.compose}`, model.width && `width ${model.width}`];
  return [...parts, model.context && `context ${many(model.context, "token")}`].filter(Boolean).join(" · ");
}

export function serverWords(status) {
  const { running, waiting, most } = status.requests;
  return `Up for ${duration(status.up_seconds)}. ${many(running, "request")} of at most ${most} being answered, ${waiting} waiting, ${many(status.sessions, "session")} open.`;
}

// Figures of an answer, also while it grows.
export class Figures {
  constructor() {
    this.cells = {};
    const labels = { speed: "tokens per second", sweeps: "sweeps", each: "tokens per sweep", accepted: "drafts accepted", wire: "on the wire", first: "first text" };
    for (const [name, label] of Object.entries(labels)) {
      const [value, note] = [make("dd", "", NONE), make("dd")];
      this.cells[name] = { value, note };
      byId("figures").append(make("div", name === "speed" ? "lead" : "", make("dt", "", label), value, note));
    }
  }

  put(name, value, note = "") {
    setText(this.cells[name].value, value);
    setText(this.cells[name].note, note);
  }

  update(answer) {
    if (!answer) return;
    const { facts, size, sweeps } = answer;
    this.put("speed", size ? digits(size / answer.seconds) : NONE, `${many(size, "token")} in ${digits(answer.seconds)} s`);
    this.put("sweeps", count(sweeps), facts.failovers ? many(facts.failovers, "failover") + (answer.degraded ? "" : ", same text") : "over all blocks");
    this.put("each", sweeps ? digits(size / sweeps) : NONE, facts.near_ties ? many(facts.near_ties, "near tie") : "");
    this.put("accepted", facts.drafted ? percent(facts.accepted / facts.drafted) : NONE, facts.drafted ? `${count(facts.accepted)} of ${count(facts.drafted)} tokens` : "nothing was drafted");
    this.put("wire", bytes(facts.wire_bytes ?? 0), size && facts.wire_bytes ? `${bytes(facts.wire_bytes / size)} per token` : "all in one process");
    this.put("first", answer.first === null ? NONE : milliseconds(answer.first), "from the request on");
  }
}

// A bar for each sweep, as high as the tokens that it added.
export class Strip {
  constructor() {
    [this.strip, this.text, this.count] = [byId("strip"), byId("strip-text"), 0];
  }

  update(answer) {
    if (!answer) return;
    const gains = answer.gains;
    if (gains.length < this.count) this.clear();
    const scale = Math.max(LEAST_SCALE, ...gains.slice(-BARS));
    for (; this.count < gains.length; this.count++) this.strip.append(make("i", this.count % 2 ? "" : "odd"));
    while (this.strip.children.length > BARS) this.strip.firstChild.remove();
    const visible = gains.slice(-this.strip.children.length || gains.length);
    [...this.strip.children].forEach((bar, n) => (bar.style.height = `${Math.max(3, (100 * visible[n]) / scale)}%`));
    setText(this.text, gains.length ? `Tokens that each sweep added, newest on the right: ${Math.min(...gains)} to ${Math.max(...gains)}, the last one ${gains.at(-1)}.` : "The first sweep is under way.");
  }

  clear() {
    this.strip.replaceChildren();
    this.count = 0;
  }
}

// Hosts with what they hold; the speed of a line comes from two looks at it.
export class Hosts {
  constructor() {
    this.before = new Map();
    const n = (name, label, put) => ({ name: `n ${name}`, label, put });
    this.rows = new Rows(byId("hosts").tBodies[0], (host) => host.name, [
      { name: "name", label: "host", put: (cell, host) => setText(cell, host.name) },
      { name: "line", label: "line", put: (cell, host) => putState(cell, host) },
      { name: "blocks", label: "blocks", put: (cell, host) => putBlocks(cell, host.blocks) },
      n("trip", "round trip", (cell, host) => setText(cell, host.alive && host.rtt_ms > 0 ? milliseconds(host.rtt_ms) : NONE)),
      n("queue", "queue", (cell, host) => setText(cell, host.alive ? count(host.queue) : NONE)),
      n("moved", "in / out", (cell, host) => (host.here ? setText(cell, NONE) : putPair(cell, `${bytes(host.bytes_in)} / ${bytes(host.bytes_out)}`, host.rate ? `${bytes(host.rate)}/s now` : ""))),
      n("failures", "failures", (cell, host) => setText(cell, host.here ? NONE : count(host.failures))),
    ]);
  }

  update(status, time) {
    const hosts = status.hosts.map((host) => {
      const moved = host.bytes_in + host.bytes_out;
      const before = this.before.get(host.name) ?? { moved, time: time - 1 };
      this.before.set(host.name, { moved, time });
      return { ...host, rate: Math.max(0, moved - before.moved) / Math.max(0.2, time - before.time) };
    });
    this.rows.update([here(status), ...hosts]);
    const up = hosts.filter((host) => host.alive).length;
    setText(byId("hosts-sum"), hosts.length ? `${count(up)} of ${count(hosts.length)} up` : "the whole model is here; hosts come in with --route");
  }
}

// This server as a row: what it holds itself, the fusion block among it.
function here({ hosts, model }) {
  const all = Array.from({ length: model.blocks }, (_, n) => n + 1);
  const fusion = model.compose === "fuse" ? [model.blocks] : [];
  return { name: "this server", here: true, blocks: hosts.length ? [...(model.local_blocks ?? []), ...fusion] : all };
}

function putState(cell, host) {
  const state = host.here ? "here" : !host.alive ? "lost" : host.trouble ? "suspect" : "up";
  if (!cell.firstChild) cell.append(make("span"));
  setAttribute(cell.firstChild, "class", `state ${state === "suspect" ? "lost" : state}`);
  setAttribute(cell.firstChild, "title", host.trouble ?? "");
  setText(cell.firstChild, state);
}

function putBlocks(cell, blocks) {
  const key = blocks.join();
  if (cell.dataset.blocks === key) return;
  cell.dataset.blocks = key;
  cell.replaceChildren(...blocks.map((block) => make("span", `block block-${((block - 1) % COLOURS) + 1}`, String(block))), ...(blocks.length ? [] : [NONE]));
}

function putPair(cell, text, note) {
  if (!cell.firstChild) cell.append(make("span"), make("small"));
  setText(cell.firstChild, text);
  setText(cell.lastChild, note);
}

// A line for each answer, newest first.
export class Answers {
  constructor() {
    this.answers = [];
    const n = (label, put) => ({ name: "n", label, put });
    this.rows = new Rows(byId("answers").tBodies[0], (answer) => answer.number, [
      { name: "mode", label: "mode", put: (cell, answer) => putPair(cell, modeName(answer), answer.degraded ? "degraded" : `seed ${answer.facts.seed ?? NONE}`) },
      n("tokens", (cell, answer) => setText(cell, count(answer.size))),
      n("sweeps", (cell, answer) => setText(cell, count(answer.sweeps))),
      n("per sweep", (cell, answer) => setText(cell, answer.sweeps ? digits(answer.size / answer.sweeps) : NONE)),
      n("tokens/s", (cell, answer) => setText(cell, digits(answer.size / answer.seconds))),
    ]);
  }

  add(answer) {
    this.answers = [answer, ...this.answers].slice(0, 8);
    this.rows.update(this.answers);
    setHidden(byId("answers"), false);
    setHidden(byId("no-answers"), true);
  }
}

function modeName(answer) {
  const name = { autoregressive: "one by one" }[answer.facts.mode] ?? answer.facts.mode ?? NONE;
  return answer.facts.mode === "sweep" && answer.options.sweeps > 1 ? `${name} × ${answer.options.sweeps}` : name;
}

export function degradedWords(blocks) {
  if (!blocks.length) return "";
  const named = `${blocks.length === 1 ? "Block" : "Blocks"} ${joinNames(blocks.map(String))}`;
  return `Degraded: ${named} did not take part in this answer, because no host that holds ${blocks.length === 1 ? "it" : "them"} answered. The text continues without it.`;
}

// The state of the server while blocks have no holder: "degraded: block 3".
export function missingWords(blocks) {
  return blocks.length ? `degraded: ${blocks.length === 1 ? "block" : "blocks"} ${joinNames(blocks.map(String))}` : "";
}

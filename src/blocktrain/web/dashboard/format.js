// Numbers and events as text.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const LARGE = ["", " k", " M", " G", " T"];
const WHOLE = new Intl.NumberFormat("en"); // created once, because this is slow
export const NONE = "–";

// Three digits and a unit: 1.23 MB.
export function bytes(count) {
  const [value, unit] = scale(count, UNITS);
  return `${unit === "B" ? Math.round(value) : digits(value)} ${unit}`;
}

export function count(number) {
  return WHOLE.format(Math.round(number));
}

// 12,345 as it is, 1,234,567 as 1.23 M.
export function short(number) {
  if (Math.abs(number) < 1e5) return count(number);
  const [value, unit] = scale(number, LARGE);
  return digits(value) + unit;
}

function scale(number, units) {
  let [value, n] = [number, 0];
  while (Math.abs(value) >= 999.5 && n < units.length - 1) [value, n] = [value / 1000, n + 1];
  return [value, units[n]];
}

function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

export function nats(value) {
  return typeof value === "number" ? value.toFixed(value < 10 ? 3 : 1) : NONE;
}

// With its sign; a minus, not a hyphen.
export function change(value, places = 3) {
  if (value == null) return NONE;
  const text = Math.abs(value).toFixed(places);
  return Number(text) === 0 ? text : (value < 0 ? "−" : "+") + text;
}

// The unit of a gain: per GB, or per MB in a run of little traffic.
export function unitOf(moved) {
  return moved >= 1e8 ? "GB" : "MB";
}

export function perByte(value, moved) {
  if (value == null) return NONE;
  const gain = value * (unitOf(moved) === "GB" ? 1e9 : 1e6);
  const size = Math.abs(gain);
  return change(gain, size < 0.1 ? 4 : size < 1 ? 3 : size < 10 ? 2 : 1);
}

export function speed(tokensPerSecond) {
  return tokensPerSecond > 0 ? short(tokensPerSecond) : NONE;
}

export function percent(value) {
  const hundredths = 100 * value;
  return `${hundredths > 0 && hundredths < 10 ? hundredths.toFixed(1) : Math.floor(hundredths)} %`;
}

// The two largest units: 42 s, 3 min 05 s, 2 h 10 min, 3 d 4 h.
export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${pad(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${pad(Math.floor((s % 3600) / 60))} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

// As on a stopwatch: 4:05, 1:04:05; after some days 3 d, 3 d 4 h.
export function elapsed(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s >= 172800) return s % 86400 < 3600 ? `${Math.floor(s / 86400)} d` : duration(s);
  const rest = `${pad(Math.floor(s / 60) % 60)}:${pad(s % 60)}`;
  return s < 3600 ? rest.replace(/^0/, "") : `${Math.floor(s / 3600)}:${rest}`;
}

export function clock(time) {
  const date = new Date(time * 1000);
  return Number.isNaN(date.getTime()) ? NONE : [date.getHours(), date.getMinutes(), date.getSeconds()].map(pad).join(":");
}

// In one unit: 42 s ago, 3 min ago.
export function ago(seconds) {
  if (seconds < 2) return "now";
  const [size, unit] = seconds < 60 ? [1, "s"] : seconds < 3600 ? [60, "min"] : seconds < 86400 ? [3600, "h"] : [86400, "d"];
  return `${Math.floor(seconds / size)} ${unit} ago`;
}

function pad(number) {
  return String(number).padStart(2, "0");
}

export function many(number, one, more = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : more}`;
}

// a, b and c; of more than `most` the rest is counted.
export function joinNames(names, most) {
  const parts = names.length > most ? [...names.slice(0, most - 1), many(names.length - most + 1, "other")] : names;
  return parts.length > 1 ? `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}` : parts.join("");
}

// A corpus may be named by a path; its last part says enough.
export function runTitle(run) {
  return (
    run.name ||
    String(run.corpus ?? "")
      .split("/")
      .filter(Boolean)
      .pop() ||
    "a run"
  );
}

export function blockTitle(run, index) {
  return `Block ${index}${run?.fusion === index ? " (fusion)" : ""}`;
}

export function scoreTitle(run, name) {
  if (name.startsWith("block-")) return blockTitle({ ...run, fusion: null }, Number(name.slice(6)));
  return { pool: "Pooled", fused: "Fused" }[name] ?? name;
}

export function who(state, id) {
  return state.workers.get(id)?.name || (id ? String(id).slice(0, 8) : "a worker");
}

// One event in a sentence: {text, tone}. Tones: plain, good, trouble, quiet.
export function describeEvent(state, e) {
  return Object.hasOwn(SENTENCES, e.kind) ? SENTENCES[e.kind](state, e) : { text: e.kind, tone: "quiet" };
}

const ENDS = { left: "left", lost: "is lost", kicked: "was removed", back: "is back", joined: "joined" };

const SENTENCES = {
  run: (_, e) =>
    e.restart
      ? { text: "The coordinator was started again; the run goes on.", tone: "plain" }
      : { text: `The run began: ${many(e.blocks ?? 0, "block")} of ${count(e.steps ?? 0)} steps each.`, tone: "plain" },
  worker: (state, e) => {
    const reason = e.reason ? `: ${e.reason}` : e.state === "joined" && e.device ? ` (${e.device})` : "";
    const tone = e.state === "lost" || e.state === "kicked" ? "trouble" : "plain";
    return { text: `${e.name || who(state, e.worker)} ${ENDS[e.state] ?? e.state}${reason}`, tone };
  },
  task: (state, e) => {
    const text = `${who(state, e.worker)} trains block ${e.block} from version ${e.base}: task ${e.task}, ${many(e.steps ?? 0, "step")}`;
    return { text, tone: "quiet" };
  },
  update: (state, e) => {
    const late = e.staleness > 0 ? `, ${many(e.staleness, "version")} behind` : "";
    const loss = `loss ${nats(e.loss_before)} to ${nats(e.loss_after)}`;
    return { text: `${who(state, e.worker)} sent an update for block ${e.block}: ${loss}, ${bytes(e.bytes ?? 0)}${late}`, tone: "quiet" };
  },
  refused: (state, e) => {
    const times = e.count > 1 ? ` ${count(e.count)} times` : "";
    return { text: `${e.worker ? who(state, e.worker) : "A request"} was refused${times} (${e.code}): ${e.sentence}`, tone: "trouble" };
  },
  standing: (state, e) => {
    const quarantined = e.standing === "quarantined";
    return { text: `${who(state, e.worker)} is ${quarantined ? "quarantined" : "back"}: ${e.reason}`, tone: quarantined ? "trouble" : "good" };
  },
  notice: (_, e) => ({ text: sentence(e.sentence), tone: "trouble" }),
  round: (_, e) => {
    const text = e.reason || `round ${e.version} of block ${e.block}: ${e.outcome}`;
    return { text: sentence(text), tone: "trouble" };
  },
  version: (_, e) => {
    const dropped = Object.values(e.dropped ?? {});
    const omitted = dropped.length ? `; ${many(dropped.length, "update")} left out: ${dropped[0]}` : "";
    const loss = e.loss == null ? "" : `, loss ${nats(e.loss)}`;
    const merged = e.updates == null ? "" : ` from ${many(e.updates, "update")}`;
    return { text: `Block ${e.block} is at version ${e.version}${merged}${loss}${omitted}`, tone: dropped.length ? "trouble" : "good" };
  },
  score: (state, e) => {
    const named = Object.entries(e.scores ?? {}).filter(([name]) => !name.startsWith("block-"));
    const parts = (named.length ? named : Object.entries(e.scores ?? {})).map(
      ([name, value]) => `${scoreTitle(state.run, name).toLowerCase()} ${nats(value)}`,
    );
    return { text: `Scored on text never seen: ${parts.join(", ")}`, tone: "good" };
  },
  finish: (_, e) => ({ text: sentence(e.reason || "the run is finished"), tone: "good" }),
};

export function sentence(text) {
  const words = String(text ?? "");
  return words && words[0].toUpperCase() + words.slice(1);
}

// A ledger entry in a few words.
export function entryWords(state, entry) {
  let body;
  try {
    body = JSON.parse(entry.body);
  } catch {
    return "";
  }
  const order = body.order ?? {};
  const submission = body.submission ?? {};
  const block = body.block ?? order.block ?? submission.block;
  const parts = [
    block != null && `block ${block}`,
    body.version != null && `version ${body.version}`,
    (order.task ?? body.task) != null && `task ${order.task ?? body.task}`,
    (body.worker ?? submission.worker) && who(state, body.worker ?? submission.worker),
    body.epoch != null && `start ${body.epoch}`,
    (entry.kind === "kick" || entry.kind === "finish") && body.reason,
  ];
  return parts.filter(Boolean).join(" · ");
}

// Reduces events to the state that the page shows. Live and replay use the same code, without a clock.
// `fold` changes its argument; `begin()` makes a new state.

const FEED = 600; // events kept for the feed
const TAIL = 12; // newest stored events
const PACE = 500; // points of progress, for the estimate of the end
const MOST_BLOCKS = 256;

export function begin() {
  return {
    seq: 0, // of the last stored event
    first: null, // unix seconds of the first event
    time: null, // of the newest one
    run: null, // the run event
    restarts: 0,
    finished: null, // {reason, time}
    phase: "", // running, stopping, finished, as the coordinator says
    reason: "", // what it waits for
    budget: { rounds: null, tokens: null },
    blocks: new Map(), // by index
    workers: new Map(), // by id
    refusals: new Map(), // by code
    bytesIn: 0,
    bytesOut: 0,
    float32Share: null, // of the bytes of whole float32 weights, both ways, that were moved
    rounds: 0, // closed with a version
    loss: new Map(), // curve by block
    scores: new Map(), // curve by what was scored: block-1, pool, fused
    scored: null, // unix seconds of the newest score
    bytesPerToken: 1, // of the text that is scored
    pace: [], // [time, share of the budget]
    feed: [], // newest last
    feedCount: 0, // events that were ever in the feed
  };
}

export function fold(state, event) {
  const kind = event?.kind;
  if (!Object.hasOwn(FOLDS, kind)) return state;
  if (kind !== "status") {
    if (kind === "run" && state.run && isText(event.run) && state.run.run !== event.run) Object.assign(state, begin()); // another run
    if (isNumber(event.seq) && event.seq <= state.seq) return state; // sent twice, after a reconnection
    if (isNumber(event.seq)) state.seq = event.seq;
    if (isNumber(event.time)) {
      state.first ??= event.time;
      state.time = Math.max(state.time ?? 0, event.time);
    }
  }
  FOLDS[kind](state, event);
  if (kind !== "status") remember(state, event);
  return state;
}

const FOLDS = {
  run(state, e) {
    if (!isText(e.run)) return;
    state.run = e;
    state.restarts += e.restart ? 1 : 0;
    state.budget = { rounds: numberOr(e.rounds, state.budget.rounds), tokens: numberOr(e.tokens, state.budget.tokens) };
    for (let index = 1; index <= Math.min(numberOr(e.blocks, 0), MOST_BLOCKS); index++) blockOf(state, index);
  },

  worker(state, e) {
    const worker = workerOf(state, e.worker, e.time);
    if (e.name) worker.name = String(e.name);
    if (e.device) worker.device = String(e.device);
    const absent = e.state === "left" || e.state === "lost" || e.state === "kicked";
    worker.state = absent ? e.state : worker.task ? "training" : "waiting";
    worker.reason = e.reason ? String(e.reason) : "";
    if (e.state === "left" || e.state === "kicked") release(state, worker);
  },

  task(state, e) {
    const worker = workerOf(state, e.worker, e.time);
    release(state, worker);
    Object.assign(worker, {
      state: "training",
      block: e.block,
      task: { task: e.task, block: e.block, base: e.base, step: 0, steps: numberOr(e.steps, 0) },
    });
    const { round } = blockOf(state, e.block);
    round.leased.set(e.task, e.worker);
    round.deadline = numberOr(e.deadline, round.deadline);
    round.opened ??= e.time;
    round.target = numberOr(e.target, round.target);
  },

  update(state, e) {
    const worker = workerOf(state, e.worker, e.time);
    const block = blockOf(state, e.block);
    worker.accepted++;
    worker.late += e.staleness > 0 ? 1 : 0;
    worker.staleness = numberOr(e.staleness, 0);
    worker.tokens += numberOr(e.tokens, 0);
    worker.bytesIn += numberOr(e.bytes, 0);
    worker.loss = numberOr(e.loss_after, worker.loss);
    if (e.seconds > 0 && e.tokens > 0) worker.speed = e.tokens / e.seconds;
    if (worker.task?.task === e.task) finishTask(state, worker);
    block.accepted++;
    block.late += e.staleness > 0 ? 1 : 0;
    block.lateByOne += e.staleness === 1 ? 1 : 0;
    block.bytesIn += numberOr(e.bytes, 0);
    block.round.leased.delete(e.task);
    block.round.updates.add(e.worker);
  },

  refused(state, e) {
    const count = numberOr(e.count, 1);
    const code = String(e.code ?? "unknown");
    const entry = state.refusals.get(code) ?? { code, count: 0, sentence: "", time: null, workers: new Map() };
    Object.assign(entry, { count: entry.count + count, sentence: String(e.sentence ?? ""), time: e.time });
    state.refusals.set(code, entry);
    if (isIndex(e.block)) blockOf(state, e.block).refused += count;
    if (!e.worker) return;
    entry.workers.set(e.worker, (entry.workers.get(e.worker) ?? 0) + count);
    const worker = workerOf(state, e.worker, e.time);
    worker.refused += count;
    worker.why = { code, sentence: entry.sentence };
  },

  round(state, e) {
    const { round } = blockOf(state, e.block);
    round.deadline = numberOr(e.deadline, round.deadline);
    round.reason = String(e.reason ?? "");
    if (e.outcome === "extended") round.extended = true;
    if (e.outcome === "empty") Object.assign(round, { updates: new Set(), extended: false, opened: null, deadline: null });
    if (e.outcome !== "expired") return;
    round.leased.delete(e.task);
    const worker = state.workers.get(e.worker);
    if (worker?.task?.task === e.task) finishTask(state, worker);
  },

  version(state, e) {
    const block = blockOf(state, e.block);
    const leased = block.round.leased;
    Object.assign(block, { version: e.version, steps: numberOr(e.steps, block.steps), tokens: numberOr(e.tokens, block.tokens) });
    Object.assign(block, { loss: numberOr(e.loss, block.loss), round: openRound(), born: e.time });
    block.round.leased = leased; // their tasks train from an older base and count here
    block.stepsAt.set(e.version, block.steps);
    if (e.version > 0) state.rounds++;
    addTraffic(state, e);
    if (isNumber(e.loss)) addPoint(state.loss, e.block, e.time - state.first, bytesOf(state, e), block.steps, e.loss);
    state.pace.push([e.time, progress(state)]);
    if (state.pace.length > 2 * PACE) state.pace = state.pace.filter((_, n) => n % 2 === 1);
  },

  score(state, e) {
    addTraffic(state, e);
    state.scored = numberOr(e.time, state.scored);
    state.bytesPerToken = numberOr(e.bytes_per_token, state.bytesPerToken);
    const versions = Object.entries(e.versions ?? {}).map(([index, version]) => [Number(index), version]);
    const steps = new Map(
      versions.map(([index, version]) => [index, blockOf(state, index).stepsAt.get(version) ?? blockOf(state, index).steps]),
    );
    const mean = steps.size ? [...steps.values()].reduce((sum, n) => sum + n, 0) / steps.size : 0;
    const time = Math.max(0, e.time - state.first - numberOr(e.seconds, 0)); // scoring takes a while: the versions are older
    for (const [name, value] of Object.entries(e.scores ?? {})) {
      if (!isNumber(value)) continue;
      const own = name.startsWith("block-") ? steps.get(Number(name.slice(6))) : undefined;
      addPoint(state.scores, name, time, bytesOf(state, e), own ?? mean, value);
    }
  },

  finish(state, e) {
    state.finished = { reason: String(e.reason ?? ""), time: e.time };
    for (const worker of state.workers.values()) if (worker.task) finishTask(state, worker);
  },

  // Never stored: what only a running coordinator knows, with `time` by its clock.
  status(state, e) {
    Object.assign(state, { phase: e.state, reason: e.reason ?? "", rounds: e.rounds, bytesIn: e.bytes_in, bytesOut: e.bytes_out });
    state.float32Share = e.float32_bytes ? e.training_bytes / e.float32_bytes : null;
    state.budget = { rounds: e.round_budget ?? null, tokens: e.token_budget ?? null };
    if (e.state === "finished") state.finished ??= { reason: e.reason, time: e.time };
    for (const status of e.blocks ?? []) updateBlock(state, status, e.time);
    for (const status of e.workers ?? []) updateWorker(state, status, e.time);
    for (const [code, count] of Object.entries(e.refusals ?? {})) {
      const entry = state.refusals.get(code) ?? { code, count: 0, sentence: "", time: null, workers: new Map() };
      state.refusals.set(code, Object.assign(entry, { count: Math.max(entry.count, count) }));
    }
  },
};

function updateBlock(state, status, now) {
  const block = blockOf(state, status.block);
  for (const name of ["version", "steps", "tokens", "accepted", "refused", "late"]) block[name] = status[name];
  block.lateByOne = numberOr(status.late_by_one, block.lateByOne);
  Object.assign(block, { loss: status.loss ?? block.loss, bytesIn: status.bytes_in, bytesOut: status.bytes_out });
  const open = status.round;
  if (!open) return;
  const { round } = block;
  Object.assign(round, { reason: open.reason, target: open.target, minimum: open.minimum, count: open.updates, working: open.leased });
  round.deadline = open.deadline_seconds > 0 ? now + open.deadline_seconds : null;
  round.length = open.deadline_seconds > 0 ? open.open_seconds + open.deadline_seconds : null;
}

function updateWorker(state, status, now) {
  const worker = workerOf(state, status.worker);
  if (status.state !== "left") worker.seen = now - status.seen_seconds; // the time is unknown once a worker left
  for (const name of ["name", "device", "state", "accepted", "tokens"]) worker[name] = status[name];
  for (const name of ["standing", "barred", "checked", "share"]) worker[name] = status[name] ?? null;
  Object.assign(worker, { refused: Math.max(status.refused, worker.refused), bytesIn: status.bytes_in, bytesOut: status.bytes_out });
  Object.assign(worker, { block: status.block ?? worker.block, loss: status.loss ?? worker.loss });
  if (status.tokens_per_second > 0) worker.speed = status.tokens_per_second;
  worker.task = status.task ? { ...worker.task, task: status.task, block: status.block, step: status.step, steps: status.steps } : null;
}

function workerOf(state, id, time) {
  const key = String(id);
  let worker = state.workers.get(key);
  if (!worker) {
    worker = { id: key, name: "", device: "", state: "waiting", reason: "", block: null, task: null, loss: null, speed: 0, tokens: 0 };
    Object.assign(worker, { accepted: 0, late: 0, staleness: null, refused: 0, why: null, bytesIn: 0, bytesOut: 0, seen: null });
    state.workers.set(key, worker);
  }
  if (isNumber(time)) worker.seen = Math.max(worker.seen ?? 0, time);
  return worker;
}

function blockOf(state, index) {
  let block = state.blocks.get(index);
  if (!block) {
    block = { index, version: 0, steps: 0, tokens: 0, loss: null, accepted: 0, late: 0, lateByOne: 0 };
    Object.assign(block, { refused: 0, bytesIn: 0, bytesOut: 0 });
    Object.assign(block, { born: null, stepsAt: new Map([[0, 0]]), round: openRound() });
    if (isIndex(index)) state.blocks.set(index, block);
  }
  return block;
}

function openRound() {
  const empty = { updates: new Set(), leased: new Map(), count: null, working: null, target: null, minimum: 1 };
  return { ...empty, opened: null, deadline: null, length: null, extended: false, reason: "" };
}

function release(state, worker) {
  if (worker.task) blockOf(state, worker.task.block).round.leased.delete(worker.task.task);
  worker.task = null;
}

function finishTask(state, worker) {
  release(state, worker);
  if (worker.state === "training") worker.state = "waiting";
}

function addTraffic(state, e) {
  state.bytesIn = Math.max(state.bytesIn, numberOr(e.bytes_in, 0));
  state.bytesOut = Math.max(state.bytesOut, numberOr(e.bytes_out, 0));
}

// Traffic of the run at the time of an event, which may arrive later.
function bytesOf(state, e) {
  return isNumber(e.bytes_in) && isNumber(e.bytes_out) ? e.bytes_in + e.bytes_out : state.bytesIn + state.bytesOut;
}

function addPoint(curves, key, time, bytes, steps, value) {
  if (![time, bytes, steps].every((place) => isNumber(place) && place >= 0)) return; // not of this run
  if (!curves.has(key)) curves.set(key, { time: [], bytes: [], steps: [], value: [] });
  const curve = curves.get(key);
  curve.time.push(time);
  curve.bytes.push(bytes);
  curve.steps.push(steps);
  curve.value.push(value);
}

function remember(state, event) {
  state.feed.push(event);
  state.feedCount++;
  if (state.feed.length > 2 * FEED) state.feed.splice(0, FEED);
}

export function tail(state) {
  return state.feed.slice(-TAIL);
}

// Where the schedule of a block ends; 0 if the run does not tell.
export function stepBudget(run, block) {
  return (block.index === run?.fusion && run.fusion_steps) || run?.steps || 0;
}

// Share of its budget that a block has spent, 0 to 1.
export function share(state, block) {
  const shares = [0];
  if (stepBudget(state.run, block)) shares.push(block.steps / stepBudget(state.run, block));
  if (state.budget.rounds) shares.push(block.version / state.budget.rounds);
  if (state.budget.tokens) {
    const steps = [...state.blocks.values()].reduce((sum, other) => sum + (stepBudget(state.run, other) || 1), 0);
    shares.push((block.tokens * steps) / (stepBudget(state.run, block) || 1) / state.budget.tokens);
  }
  return Math.min(1, Math.max(...shares));
}

// The same of the whole run.
export function progress(state) {
  let sum = 0;
  for (const block of state.blocks.values()) sum += share(state, block);
  return state.blocks.size ? sum / state.blocks.size : 0;
}

// Seconds to the end at the pace of the last quarter of the time so far (two minutes at least); null where that says nothing.
export function remaining(state, now) {
  const [last] = state.pace.slice(-1);
  if (!last || state.finished || state.pace.length < 3) return null;
  const since = last[0] - Math.max(120, (last[0] - state.first) / 4);
  const from = state.pace.find(([time]) => time >= since);
  const [seconds, gain] = [last[0] - from[0], last[1] - from[1]];
  if (seconds <= 0 || gain <= 0) return null;
  return Math.max(0, ((1 - last[1]) * seconds) / gain - (now - last[0]));
}

// Workers that are training a block, those furthest on first.
export function atWork(state, index) {
  const workers = [...state.workers.values()].filter((worker) => worker.state === "training" && worker.task?.block === index);
  return workers.sort((a, b) => doneOf(b) - doneOf(a));
}

function doneOf({ task }) {
  return task.steps ? task.step / task.steps : 0;
}

// Whether the fusion block still waits for the others to have spent half of their budget.
export function isTooEarly(state, block) {
  if (state.run?.fusion !== block.index || block.version > 0) return false;
  const others = [...state.blocks.values()].filter((other) => other !== block);
  return others.some((other) => share(state, other) < 0.5);
}

// How a curve went from its first point to its last, and by how much per byte.
export function curveGain(curve) {
  const end = curve.value.length - 1;
  if (end < 0) return null;
  const [gain, bytes] = [curve.value[end] - curve.value[0], curve.bytes[end] - curve.bytes[0]];
  return { now: curve.value[end], gain: end ? gain : null, perByte: end && bytes > 0 ? gain / bytes : null };
}

// The same of the whole run: from the first pooled score to the newest of the composed model.
export function runGain(state) {
  const pool = state.scores.get("pool");
  const best = state.scores.get("fused") ?? pool;
  if (!pool) return null;
  const ends = (name) => [pool[name][0], best[name].at(-1)];
  return curveGain({ value: best === pool ? pool.value : ends("value"), bytes: best === pool ? pool.bytes : ends("bytes") });
}

// A number that a chart can draw.
export function isNumber(value) {
  return typeof value === "number" && Math.abs(value) <= Number.MAX_SAFE_INTEGER;
}

function numberOr(value, otherwise) {
  return isNumber(value) ? value : otherwise;
}

function isText(value) {
  return typeof value === "string" && value !== "";
}

function isIndex(value) {
  return Number.isInteger(value) && value >= 1 && value <= MOST_BLOCKS;
}

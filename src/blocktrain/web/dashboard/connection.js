// The connection to the coordinator: server-sent events over fetch, because EventSource cannot send
// a token. It reconnects by itself.

const PATIENCE = 25000; // ms without a byte (the coordinator sends a comment every 10 s)
const WAITS = [500, 1000, 2000, 4000, 8000];

// Server-sent events out of pieces of text.
export class Frames {
  constructor() {
    this.rest = "";
    this.data = [];
    this.id = null;
    this.event = "message";
  }

  feed(text) {
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop();
    const frames = [];
    for (const line of lines) {
      if (line === "") {
        if (this.data.length) frames.push({ event: this.event, id: this.id, data: this.data.join("\n") });
        [this.data, this.event, this.id] = [[], "message", null];
        continue;
      }
      const colon = line.indexOf(":");
      const name = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (name === "data") this.data.push(value);
      else if (name === "event") this.event = value;
      else if (name === "id") this.id = value;
    }
    return frames;
  }
}

export class Refusal extends Error {
  constructor(status, body) {
    super(body?.sentence || `the answer was ${status}`);
    this.status = status;
    this.code = body?.code ?? "";
  }
}

// GET with the token; throws Refusal if the server refuses.
export async function ask(path, token, options = {}) {
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(path, { cache: "no-store", credentials: "omit", ...options, headers });
  if (response.ok) return response;
  throw new Refusal(response.status, await response.json().catch(() => null));
}

// Calls `on.events([...])`, `on.ready()`, `on.skew(seconds)` and `on.change({phase, ...})`;
// phases: connecting, live, ended, away (retryAt, sentence), locked (wrong, sentence).
export class Connection {
  constructor(on) {
    Object.assign(this, { on, token: "", after: 0, tries: 0, running: null, timer: 0, replay: false, leftOut: 0 });
  }

  start(token) {
    this.stop();
    Object.assign(this, { token, tries: 0 });
    this.connect();
  }

  stop() {
    clearTimeout(this.timer);
    this.running?.abort();
    this.running = null;
  }

  // Now, instead of after the pause.
  retry() {
    if (this.running) return;
    this.tries = 1; // it is still away until it answers
    clearTimeout(this.timer);
    this.connect();
  }

  again() {
    this.after = 0;
    this.start(this.token);
  }

  async connect() {
    const running = (this.running = new AbortController());
    if (!this.tries) this.on.change({ phase: "connecting" });
    let reason = "the connection was cut";
    try {
      await this.read(running);
      if (this.replay) return this.finish(running);
    } catch (error) {
      if (running !== this.running) return;
      if (error instanceof Refusal && error.status === 401) {
        this.running = null;
        this.on.change({ phase: "locked", wrong: this.token !== "", sentence: error.message });
        return;
      }
      if (error instanceof Refusal) reason = error.message;
      else if (running.signal.aborted) reason = "no data arrived for a while";
      else reason = "there is no answer";
    }
    if (running !== this.running) return;
    this.running = null;
    const pause = WAITS[Math.min(this.tries++, WAITS.length - 1)] * (0.8 + 0.4 * Math.random());
    this.timer = setTimeout(() => this.connect(), pause);
    this.on.change({ phase: "away", retryAt: Date.now() + pause, sentence: reason });
  }

  finish(running) {
    if (running === this.running) this.on.change({ phase: "ended" });
    this.running = null;
  }

  async read(running) {
    let watch = 0;
    const restartTimer = () => {
      clearTimeout(watch);
      watch = setTimeout(() => running.abort(), PATIENCE);
    };
    const { signal } = running;
    restartTimer();
    try {
      this.replay = (await (await ask("v1/replay", this.token, { signal })).json()).replay === true;
      const headers = this.after ? { "Last-Event-ID": String(this.after) } : {};
      const response = await ask(`v1/events${this.replay ? "?follow=0" : ""}`, this.token, { signal, headers });
      const serverTime = Date.parse(response.headers.get("date") ?? "");
      if (serverTime) this.on.skew((serverTime - Date.now()) / 1000);
      this.on.change({ phase: "reading" });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      const frames = new Frames();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        if (running !== this.running) return;
        restartTimer();
        this.deliver(frames.feed(value));
      }
    } finally {
      clearTimeout(watch);
    }
  }

  deliver(frames) {
    const events = [];
    let ready = null;
    for (const frame of frames) {
      if (frame.id) this.after = Number(frame.id) || this.after;
      if (frame.event === "ready") ready = parseFrame(frame) ?? {};
      else events.push(parseFrame(frame));
    }
    if (events.length) this.on.events(events.filter(Boolean));
    if (!ready || this.replay) return;
    this.tries = 0;
    this.on.change({ phase: "live", leftOut: ready.left_out || this.leftOut });
    this.leftOut = ready.left_out || this.leftOut;
  }
}

function parseFrame(frame) {
  try {
    const event = JSON.parse(frame.data);
    return frame.event === "status" ? { ...event, kind: "status" } : event;
  } catch {
    return null;
  }
}

// The events of a log as it is on the disk; an incomplete last line is skipped.
export function parseLog(text) {
  const events = [];
  for (const line of text.split("\n")) {
    if (!line.trim()) continue;
    try {
      const event = JSON.parse(line);
      if (event && typeof event.kind === "string") events.push(event);
    } catch {
      continue;
    }
  }
  return events;
}

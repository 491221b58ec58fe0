// The page: where events come from, what is shown when, and every button.

import { begin, fold } from "./fold.js";
import { Curves } from "./curves.js";
import { Connection, ask } from "./connection.js";
import { Player } from "./player.js";
import { make, setAttribute, setHidden, setText } from "./elements.js";
import { Feed, Head, Ledger, Refusals, blockTable, blockViews } from "./views.js";
import { Workers } from "./workers.js";
import { clock, count, duration, runTitle, sentence } from "./format.js";

const CHART_MS = 250; // between two drawings of the charts
const LEDGER_MS = 5000; // between two looks at the ledger
const ENTRIES = 12;
const BEYOND = 999999999999; // larger than any entry: asks only for the total
const LOOPBACK = /^(localhost|127\.|\[::1\])/;
const byId = (id) => document.getElementById(id);
const here = location.origin + location.pathname.replace(/\/[^/]*$/, "");

let live = begin(); // the run as the coordinator reports it
let link = { phase: "connecting" };
let skew = 0; // seconds by which the coordinator's clock is ahead
let token = takeToken();
let revealed = false;
let heardAt = 0;
let drawnAt = 0;
let ledgerAt = 0;
let framed = 0;
let ledgerTotal = 0;
let changed = false; // since the charts were drawn
let atOnce = false; // draw them without waiting
let problem = ""; // shown for a few seconds

const head = new Head();
const curves = new Curves(() => setHidden(byId("unzoom"), false));
const blocks = blockTable();
const workers = new Workers(() => draw());
const feed = new Feed();
const refusals = new Refusals();
const ledger = new Ledger();
const player = new Player({
  draw,
  frame() {
    changed = true;
    render();
  },
  say,
});

const line = new Connection({
  events(events) {
    const over = live.finished;
    for (const event of events) take(event);
    heardAt = Date.now();
    if (live.finished && !over && link.phase === "live") setText(byId("announce"), sentence(live.finished.reason));
    changed = true;
    draw();
  },
  skew(seconds) {
    skew = Math.abs(seconds) > 2 ? seconds : 0;
  },
  change(next) {
    if (next.phase === "reading") return;
    if (next.phase === "ended") player.show(collected, false);
    const before = link.phase;
    link = next;
    if (before !== next.phase || next.phase === "locked") announce();
    draw(true);
  },
});
const collected = []; // every event of a log that is served for replay

function take(event) {
  if (line.replay) {
    collected.push(event);
  } else if (event.kind === "status" && live.run && event.run !== live.run.run) {
    live = begin(); // another run at the same address
    line.again();
  } else {
    fold(live, event.kind === "status" ? { ...event, time: Date.now() / 1000 + skew } : event);
  }
}

function now() {
  return player.film ? player.film.now : Date.now() / 1000 + skew;
}

// The token comes in the fragment, which no browser sends anywhere; it stays in this tab.
function takeToken() {
  const value = new URLSearchParams(location.hash.slice(1)).get("token");
  if (value) {
    storage(sessionStorage, "token", value);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return value ?? storage(sessionStorage, "token") ?? "";
}

// A browser may refuse to keep anything; then it is forgotten with the page.
function storage(area, name, value) {
  try {
    if (value !== undefined) area.setItem(`blocktrain-${name}`, value);
    return area.getItem(`blocktrain-${name}`);
  } catch {
    return null;
  }
}

// Drawing: at most once a frame, charts less often.

function draw(all = false) {
  atOnce ||= all === true;
  framed ||= requestAnimationFrame(() => {
    framed = 0;
    render();
  });
}

function render() {
  const { film } = player;
  const state = film ? film.state : live;
  const locked = link.phase === "locked" && !film;
  const known = state.run !== null && !locked;
  const opens = locked && byId("sign-in").hidden;
  setHidden(byId("sign-in"), !locked);
  if (opens) byId("token").focus();
  setHidden(byId("empty"), locked || known);
  setHidden(byId("run"), !known);
  renderLine();
  player.update();
  if (locked) return renderSignIn();
  if (!known) return renderEmpty();
  const time = now();
  head.update(state, time);
  blocks.update(blockViews(state, time));
  workers.update(state, time);
  feed.update(state);
  refusals.update(state);
  ledger.update(state, film === null);
  renderJoin(state);
  renderFoot(state);
  renderCharts(state);
  if (!film && link.phase === "live") fetchLedger();
}

function renderFoot(state) {
  const { run, fingerprint, protocol, parent } = state.run;
  const parts = [`run ${run}`, ...(parent ? [`goes on from ${String(parent).slice(0, 12)}`] : []), `settings ${String(fingerprint).slice(0, 16)}`, `protocol ${protocol}`, `${count(state.seq)} events`];
  if (!player.film && link.leftOut)
    parts.push(`${count(link.leftOut)} of the oldest tasks, updates and refusals are left out here; the log has them`);
  setText(byId("foot"), parts.join(" · "));
}

function renderCharts(state) {
  const moment = performance.now();
  if (atOnce || (changed && moment - drawnAt >= CHART_MS)) {
    [atOnce, changed, drawnAt] = [false, false, moment];
    curves.update(state);
  } else if (changed) {
    setTimeout(draw, CHART_MS);
  }
}

const PILLS = { connecting: "connecting", live: "live", away: "away", locked: "token needed", ended: "replay" };

function renderLine() {
  const { film } = player;
  const finished = !film && link.phase === "live" && live.finished;
  const pill = byId("pill");
  setAttribute(pill, "class", `pill ${film ? "replay" : link.phase}`);
  setText(
    pill.lastElementChild,
    film ? "replay" : finished ? "finished" : live.phase === "stopping" && link.phase === "live" ? "stopping" : PILLS[link.phase],
  );
  const away = link.phase === "away" && !film;
  const old = away && live.run !== null;
  document.body.classList.toggle("old", old);
  setHidden(byId("notice"), !old && !problem);
  setHidden(byId("try-now"), !old);
  if (problem) setText(byId("notice-text"), problem);
  else if (old)
    setText(
      byId("notice-text"),
      `The coordinator does not answer: ${link.sentence}. ${pause()} What you see is from ${clock(heardAt / 1000)}, ${duration((Date.now() - heardAt) / 1000)} ago.`,
    );
  const { run } = film ? film.state : live;
  document.title = run ? `${runTitle(run)} – BlockTrain` : "BlockTrain";
}

function pause() {
  const seconds = Math.ceil((link.retryAt - Date.now()) / 1000);
  return seconds > 0 ? `Trying again in ${seconds} s.` : "Trying again now.";
}

function renderSignIn() {
  setText(byId("sign-in-title"), link.wrong ? "This is not the token of the run" : "This run needs its token");
  setText(byId("sign-in-text"), "It is in the join command that the coordinator printed, after --token. It stays in this tab.");
  setText(byId("sign-in-wrong"), link.wrong ? `${sentence(link.sentence)}.` : "");
}

function renderEmpty() {
  const away = link.phase === "away";
  setText(
    byId("empty-title"),
    away
      ? "The coordinator does not answer"
      : link.phase === "live"
        ? "Nothing yet"
        : link.phase === "ended"
          ? "An empty log"
          : "Connecting",
  );
  const waiting =
    "The coordinator is here and prepares the run: version 0 of every block, and the corpus. This takes a moment; the page goes on by itself.";
  const texts = { live: waiting, ended: "This log holds no events. Open another one." };
  setText(
    byId("empty-text"),
    away ? `${sentence(link.sentence)}. ${pause()}` : (texts[link.phase] ?? "Asking the coordinator for the run."),
  );
}

function renderJoin(state) {
  const over = state.finished !== null;
  setHidden(byId("join"), over || player.film !== null);
  setHidden(byId("finished"), !over);
  const visibleCommand = (what) => command(what, token && !revealed ? "••••••••" : token);
  setText(byId("join-command"), visibleCommand("worker"));
  // A replay has no coordinator at its address, so there is nothing to pull from it.
  setHidden(byId("pull"), player.film !== null);
  setText(byId("pull-command"), player.film ? "" : visibleCommand("pull"));
  setHidden(byId("join-reveal"), !token);
  setText(byId("join-reveal"), revealed ? "Hide token" : "Show token");
  setAttribute(byId("join-reveal"), "aria-pressed", revealed);
  setText(byId("join-note"), `${state.workers.size ? "" : "Nobody has joined yet. "}On any machine that should help:`);
  byId("join").classList.toggle("first", state.workers.size === 0);
  setHidden(byId("join-hint"), !LOOPBACK.test(location.hostname));
  if (over) setText(byId("finished-text"), `${sentence(state.finished.reason)}.${player.film ? "" : " Get the model with:"}`);
}

function command(what, secret) {
  const parts = ["blocktrain", what, here, ...(what === "pull" ? ["--out", "runs/pulled"] : []), ...(secret ? ["--token", secret] : [])];
  return parts.join(" ");
}

async function copy(button, text) {
  const label = button.textContent;
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyWithSelection(text); // browsers offer no clipboard over plain http
    setText(button, "Copied");
    setText(byId("announce"), "Copied");
  } catch {
    setText(button, "Not allowed here");
  }
  setTimeout(() => setText(button, label), 1600);
}

function copyWithSelection(text) {
  const field = make("textarea", "unseen");
  field.value = text;
  document.body.append(field);
  const focused = document.activeElement;
  field.select();
  document.execCommand("copy");
  field.remove();
  focused?.focus();
}

// What changed, for screen readers: screen readers would repeat the changing text of `renderLine`.
function announce() {
  const words = {
    connecting: "Connecting to the coordinator",
    live: "Connected",
    away: "The coordinator does not answer; what you see is old",
    locked: "A token is needed",
    ended: "Replaying a log",
  };
  setText(byId("announce"), words[link.phase] ?? "");
}

async function fetchLedger() {
  const moment = performance.now();
  if (moment - ledgerAt < LEDGER_MS) return;
  const { top, bottom } = byId("record").getBoundingClientRect();
  if (bottom < 0 || top > innerHeight) return; // it is out of sight: save the traffic
  ledgerAt = moment;
  try {
    const page = async (after) => (await ask(`v1/ledger?after=${after}`, token)).json();
    const { total } = await page(BEYOND);
    if (total === ledgerTotal) return;
    ledgerTotal = total;
    ledger.entries = (await page(Math.max(0, total - ENTRIES))).entries.slice(-ENTRIES);
    draw();
  } catch {
    ledgerAt += 2 * LEDGER_MS; // the connection itself shows that the coordinator is away
  }
}

function say(text) {
  problem = text;
  setText(byId("announce"), text);
  setTimeout(() => {
    problem = "";
    draw();
  }, 8000);
  draw();
}

// Buttons

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  storage(localStorage, "theme", theme);
  setText(byId("theme").lastElementChild, theme);
  setAttribute(byId("theme"), "aria-label", `Theme: ${theme}`);
  curves.restyle();
}

function unzoom() {
  curves.unzoom();
  setHidden(byId("unzoom"), true);
}

function onChange(id, then) {
  byId(id).addEventListener("change", (event) => {
    then(event.target.value);
    draw(true);
  });
}

function onClick(id, then) {
  byId(id).addEventListener("click", () => then(byId(id)));
}

function wire() {
  onClick("theme", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => curves.restyle());
  onClick("try-now", () => line.retry());
  onClick("join-copy", (button) => copy(button, command("worker", token)));
  onClick("pull-copy", (button) => copy(button, command("pull", token)));
  onClick("join-reveal", () => {
    revealed = !revealed;
    draw();
  });
  onClick("unzoom", unzoom);
  onChange("axis", (value) => {
    curves.axis = value;
    unzoom();
  });
  onChange("span", (value) => {
    curves.recent = value === "recent";
    unzoom();
  });
  onChange("tone", (value) => (feed.tone = value));
  byId("sign-in-form").addEventListener("submit", (event) => {
    event.preventDefault();
    token = byId("token").value.trim();
    byId("token").value = "";
    storage(sessionStorage, "token", token);
    line.start(token);
  });
  window.addEventListener("online", () => line.retry());
  document.addEventListener("visibilitychange", () => document.hidden || (link.phase === "away" && line.retry()));
  new IntersectionObserver(() => draw()).observe(byId("record")); // the ledger is fetched when it is visible
  setInterval(() => draw(), 1000); // countdowns and "seconds ago"
}

setTheme(THEMES.find((theme) => theme === storage(localStorage, "theme")) ?? "auto");
wire();
line.start(token);

// The page: what is shown when, and every button.

import { Refusal, answer as listen, ask } from "./requests.js";
import { Editor } from "./editor.js";
import { setAttribute, setHidden, setText } from "./elements.js";
import { Answers, Figures, Hosts, Strip, degradedWords, missingWords, modelWords, serverWords } from "./views.js";
import { digits, many, sentence } from "./format.js";

const LOOK_MS = 1000; // between two looks at the status
const WAITS = [1000, 2000, 4000, 8000];
const SEEDS = 1e6; // easy to type again
const byId = (id) => document.getElementById(id);
const here = location.origin + location.pathname.replace(/\/[^/]*$/, "");
const size = new TextEncoder();

let key = takeKey();
let status = null;
let phase = "connecting"; // live, away, locked
let reason = "";
let tries = 0;
let timer = 0;
let looking = 0; // the look whose answer counts
let writing = null; // {answer, stop}: an answer that is being written
let last = null; // {before: the sheet before the last answer}
let numbers = 0;
let framed = 0;

const paper = new Editor(byId("sheet"), byId("ink"), byId("text"), () => {
  if (!writing) last = null;
  draw();
});
const [figures, strip, hosts, answers] = [new Figures(), new Strip(), new Hosts(), new Answers()];

// The key comes in the fragment, which no browser sends anywhere; it stays in this tab.
function takeKey() {
  const value = new URLSearchParams(location.hash.slice(1)).get("key");
  if (value) {
    sessionStorage.setItem("blocktrain-key", value);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return value ?? sessionStorage.getItem("blocktrain-key") ?? "";
}

// Polls the server's status once a second while the page is visible.

async function look() {
  const mine = ++looking;
  clearTimeout(timer);
  let pause = LOOK_MS;
  try {
    const answer = await (await ask("v1/status", key, { signal: AbortSignal.timeout(8000) })).json();
    if (mine !== looking) return;
    if (!status) begin(answer);
    [status, tries] = [answer, 0];
    change("live");
  } catch (error) {
    if (mine !== looking) return;
    if (error instanceof Refusal && error.status === 401) return change("locked", key ? error.message : "");
    pause = WAITS[Math.min(tries++, WAITS.length - 1)];
    change("away", error instanceof Refusal ? error.message : "the server does not answer");
  }
  timer = setTimeout(() => document.hidden || look(), pause);
}

function begin(answer) {
  const { defaults, limits, modes } = answer;
  for (const radio of document.querySelectorAll("#mode input")) {
    radio.disabled = Boolean(modes) && !modes.includes(radio.value);
    radio.checked = radio.value === defaults.mode;
  }
  byId("sweeps").value = defaults.sweeps;
  byId("sweeps").max = limits.sweeps;
  byId("length").max = limits.max_tokens;
}

function change(next, sentence = "") {
  const before = phase;
  [phase, reason] = [next, sentence];
  if (before !== next) announce();
  draw();
}

function announce() {
  const words = { live: "Connected", away: "The server does not answer", locked: "An API key is needed" };
  setText(byId("announce"), words[phase] ?? "");
  if (phase === "locked") requestAnimationFrame(() => byId("key").focus());
}

// Drawing: at most once a frame.

function draw() {
  framed ||= requestAnimationFrame(() => {
    framed = 0;
    render();
  });
}

const PILLS = { connecting: "connecting", live: "ready", away: "away", locked: "key needed" };

function render() {
  const known = status !== null && phase !== "locked";
  setHidden(byId("sign-in"), phase !== "locked");
  setHidden(byId("empty"), known || phase === "locked");
  setHidden(byId("model"), !known);
  setHidden(byId("notice"), !(known && phase === "away"));
  const missing = phase === "live" ? missingWords(status.missing_blocks ?? []) : "";
  setAttribute(byId("pill"), "class", `pill ${missing ? "partial" : writing ? "writing" : phase}`);
  setText(byId("pill").lastElementChild, missing || (writing ? "writing" : PILLS[phase]));
  setText(byId("notice-text"), `${sentence(reason)} Trying again by itself.`);
  setText(byId("sign-in-wrong"), reason && sentence(reason));
  if (phase === "away") setText(byId("empty-title"), "The server does not answer");
  setText(byId("empty-text"), phase === "away" ? `${sentence(reason)} Trying again by itself.` : "Asking the server for its model.");
  if (!known) return;
  document.title = `${status.id} – BlockTrain`;
  setText(byId("model-name"), status.id);
  setText(byId("kicker"), modelWords(status));
  setText(byId("foot"), serverWords(status));
  hosts.update(status, performance.now() / 1000);
  renderHow();
  renderAnswer();
}

const MODES = {
  exact: "One block drafts here, all blocks check the draft in one sweep. The text is the same, token for token, as one by one.",
  sweep: "A draft of the whole text; each sweep keeps what is right, corrects the first token that is not, and drafts the rest again. Fast; more sweeps come closer to the exact text.",
  autoregressive: "One traversal of all hosts for every token: the usual way, as a baseline for the other two.",
};

function mode() {
  return document.querySelector("#mode input:checked")?.value ?? "exact";
}

function renderHow() {
  setText(byId("mode-text"), MODES[mode()]);
  byId("sweeps").disabled = mode() !== "sweep";
  setText(byId("code"), code());
}

function code(secret = key ? "YOUR KEY" : "none") {
  return `from openai import OpenAI

client = OpenAI(
    base_url="${here}/v1",
    api_key="${secret}",
)
answer = client.completions.create(
    model="${status.id}",
    prompt="The ",
    max_tokens=${Number(byId("length").value) || 256},
    extra_body={"mode": "${mode()}"},
)
print(answer.choices[0].text)
`;
}

function renderAnswer() {
  const button = byId("write");
  setText(button.firstElementChild, writing ? "Stop" : "Write on");
  setText(button.lastElementChild, writing ? "Esc" : "Ctrl ↵");
  setAttribute(button, "aria-keyshortcuts", writing ? "Escape" : "Control+Enter");
  button.classList.toggle("main", !writing);
  button.disabled = !writing && phase !== "live";
  for (const id of ["back", "again"]) byId(id).disabled = Boolean(writing) || !last;
  byId("text").readOnly = Boolean(writing);
  byId("sheet").classList.toggle("busy", Boolean(writing));
  if (writing) {
    writing.answer.seconds = (performance.now() - writing.answer.began) / 1000;
    figures.update(writing.answer);
    strip.update(writing.answer);
    showDegraded(writing.answer);
  }
}

function showDegraded(answer) {
  const words = answer ? degradedWords(answer.facts.degraded ?? []) : "";
  setText(byId("degraded"), words);
  setHidden(byId("degraded"), !words);
}

// Writing

function settings() {
  const fields = ["sweeps", "length", "temperature", "top-p", "seed"].map(byId);
  const wrong = fields.find((field) => !field.disabled && !field.checkValidity());
  if (wrong) {
    wrong.reportValidity();
    return null;
  }
  const [sweeps, length, temperature, topP, seed] = fields.map((field) => (field.value === "" ? null : Number(field.value)));
  return { mode: mode(), sweeps: mode() === "sweep" ? sweeps : null, max_tokens: length, temperature, top_p: topP, seed: seed ?? Math.floor(SEEDS * Math.random()) };
}

async function write() {
  const options = settings();
  if (writing || !options || phase !== "live") return;
  const answer = { number: ++numbers, options, began: performance.now(), seconds: 0, size: 0, sweeps: 0, gains: [], first: null, cut: 0, facts: {}, finish: null, degraded: false };
  writing = { answer, stop: new AbortController() };
  const before = paper.keep();
  tell("", "");
  strip.clear();
  draw();
  setText(byId("announce"), "Writing");
  let wrong = "";
  try {
    const body = { model: status.id, prompt: paper.text, stream: true, stream_options: { include_usage: true }, ...options };
    for await (const chunk of listen(body, key, writing.stop.signal)) take(answer, chunk);
  } catch (error) {
    if (error.name !== "AbortError") wrong = errorText(error);
  }
  finish(answer, before, wrong);
}

function take(answer, chunk) {
  if (chunk.usage) Object.assign(answer, { size: chunk.usage.completion_tokens, cut: chunk.usage.prompt_bytes_cut });
  const choice = chunk.choices[0];
  if (!choice) return;
  const added = size.encode(choice.text).length;
  if (added) answer.first ??= performance.now() - answer.began;
  if (choice.text) paper.add(choice.text, answer.number + chunk.blocktrain.sweeps);
  answer.size += added;
  if (chunk.blocktrain.sweeps > answer.sweeps || !answer.gains.length) answer.gains.push(added);
  else answer.gains[answer.gains.length - 1] += added;
  Object.assign(answer, { facts: chunk.blocktrain, sweeps: chunk.blocktrain.sweeps, finish: choice.finish_reason, degraded: chunk.blocktrain.degraded.length > 0 });
  draw();
}

function finish(answer, before, wrong) {
  const stopped = writing.stop.signal.aborted;
  answer.seconds = (performance.now() - answer.began) / 1000;
  writing = null;
  figures.update(answer);
  strip.update(answer);
  showDegraded(answer);
  if (answer.size) {
    last = { before };
    answers.add(answer);
  }
  const summary = `${many(answer.size, "token")} in ${many(answer.sweeps, "sweep")}, ${digits(answer.seconds)} s`;
  const cut = answer.cut ? ` The first ${many(answer.cut, "byte")} of your text were beyond its context.` : "";
  tell(wrong ? "" : stopped ? `Stopped after ${summary}.` : `${summary}.${cut}`, wrong);
  setText(byId("announce"), wrong || (stopped ? "Stopped" : `Done: ${summary}`));
  draw();
}

function tell(ending, wrong) {
  setText(byId("ending"), ending);
  setText(byId("wrong"), wrong);
  setHidden(byId("wrong"), !wrong);
}

function errorText(error) {
  if (!(error instanceof Refusal)) return sentence(error instanceof TypeError ? "the server does not answer; the text so far is kept" : error.message);
  if (error.status === 401) look();
  return sentence(error.message);
}

function takeBack() {
  const { before } = last;
  paper.restore(before);
  last = null;
  tell("", "");
  byId("text").focus();
}

function another() {
  paper.restore(last.before);
  write();
}

// Buttons

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("blocktrain-theme", theme);
  setText(byId("theme").lastElementChild, theme);
  setAttribute(byId("theme"), "aria-label", `Theme: ${theme}`);
}

async function copy(button, text) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    setText(button, "Copied");
    setText(byId("announce"), "Copied");
  } catch {
    getSelection().selectAllChildren(byId("code")); // browsers offer no clipboard over plain http
    setText(button, "Selected: press Ctrl+C");
  }
  setTimeout(() => setText(button, label), 1600);
}

function wire() {
  byId("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
  byId("write").addEventListener("click", () => (writing ? writing.stop.abort() : write()));
  byId("back").addEventListener("click", takeBack);
  byId("again").addEventListener("click", another);
  byId("try-now").addEventListener("click", look);
  byId("code-copy").addEventListener("click", (event) => copy(event.currentTarget, code(key || "none")));
  for (const id of ["mode", "length"]) byId(id).addEventListener("input", draw);
  byId("sign-in-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = byId("key").value.trim();
    byId("key").value = "";
    sessionStorage.setItem("blocktrain-key", key);
    look();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && writing) writing.stop.abort();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      write();
    }
  });
  document.addEventListener("visibilitychange", () => document.hidden || look());
  window.addEventListener("online", look);
  setInterval(() => writing && draw(), 100); // the clock of an answer
}

setTheme(THEMES.find((theme) => theme === localStorage.getItem("blocktrain-theme")) ?? "auto");
wire();
look();

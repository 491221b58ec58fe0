// The bar under a replayed log: play, slider, speed, keys; and the ways to bring a log here.

import { parseLog } from "./connection.js";
import { Film, SPEEDS } from "./replay.js";
import { make, setAttribute, setHidden, setText } from "./elements.js";
import { clock, elapsed } from "./format.js";

const FIELDS = "input:not([type=range]), select, button, [contenteditable]"; // keys belong to them
const byId = (id) => document.getElementById(id);

export class Player {
  // Tells `on.draw(all)` when something else is to be seen, `on.frame()` for every frame of a playing film, `on.say(text)`.
  constructor(on) {
    Object.assign(this, { on, film: null });
    this.wire();
    this.wireFiles();
  }

  show(events, canGoBack) {
    this.film = new Film(events);
    setHidden(byId("back-to-live"), !canGoBack);
    byId("speed").value = String(this.film.speed);
    this.on.draw(true);
  }

  close() {
    this.film = null;
    setHidden(byId("back-to-live"), true);
    this.on.draw(true);
  }

  update() {
    const { film } = this;
    setHidden(byId("player"), film === null);
    if (!film) return;
    setText(byId("play"), film.playing ? "Pause" : "Play");
    const slider = byId("position");
    const [length, at] = [film.end - film.start, film.now - film.start];
    setAttribute(slider, "max", Math.max(1, Math.ceil(length)));
    slider.value = at;
    setAttribute(slider, "aria-valuetext", `${elapsed(at)} of ${elapsed(length)}`);
    setText(byId("moment"), `${elapsed(at)} / ${elapsed(length)}`);
    setText(byId("moment-clock"), ` · ${clock(film.now)}`);
  }

  toggle() {
    if (this.film.playing) {
      this.film.playing = false;
    } else {
      this.film.play();
      this.roll(this.film, performance.now());
    }
    this.on.draw();
  }

  roll(film, last) {
    requestAnimationFrame((moment) => {
      if (film !== this.film) return;
      if (!film.playing) return this.on.draw(true);
      film.tick((moment - last) / 1000);
      this.on.frame();
      this.roll(film, moment);
    });
  }

  move(action) {
    this.film.playing = false;
    action(this.film);
    this.on.draw(true);
  }

  hop(direction) {
    this.move((film) => film.hop(direction));
  }

  wire() {
    byId("speed").append(...SPEEDS.map((speed) => Object.assign(make("option", "", `${speed}×`), { value: speed })));
    byId("speed").addEventListener("change", (event) => (this.film.speed = Number(event.target.value)));
    byId("position").addEventListener("input", (event) => this.move((film) => film.moveTo(film.start + Number(event.target.value))));
    byId("play").addEventListener("click", () => this.toggle());
    byId("hop-back").addEventListener("click", () => this.hop(-1));
    byId("hop-on").addEventListener("click", () => this.hop(1));
    byId("back-to-live").addEventListener("click", () => this.close());
    const keys = { " ": () => this.toggle(), "[": () => this.hop(-1), "]": () => this.hop(1) };
    document.addEventListener("keydown", (event) => {
      const ours = this.film && !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.closest(FIELDS);
      if (!ours || !Object.hasOwn(keys, event.key)) return;
      event.preventDefault();
      keys[event.key]();
    });
  }

  wireFiles() {
    const input = byId("log-file");
    byId("open-log").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      if (input.files[0]) this.open(input.files[0]);
    });
    const carried = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => {
      if (!carried(event)) return;
      event.preventDefault();
      setHidden(byId("drop"), false);
    });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) setHidden(byId("drop"), true);
    });
    document.addEventListener("drop", (event) => {
      setHidden(byId("drop"), true);
      if (!carried(event)) return;
      event.preventDefault();
      this.open(event.dataTransfer.files[0]);
    });
  }

  async open(file) {
    const events = parseLog(await file.text());
    byId("log-file").value = ""; // so that the same file can be opened again
    if (events.length) this.show(events, true);
    else this.on.say(`${file.name} holds no events; an events.jsonl of a coordinator's folder does.`);
  }
}

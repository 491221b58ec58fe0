// The text that you and the model write together. A textarea holds it; a layer below it shows who
// wrote what, with a shade for each sweep.

import { make } from "./elements.js";

const NEAR = 48; // pixels from the end within which the sheet follows what is written

export class Editor {
  constructor(sheet, ink, area, changed) {
    Object.assign(this, { sheet, ink, area, changed, parts: [] }); // parts: [{text, sweep}], sweep null: yours
    area.addEventListener("input", () => this.edited());
    this.draw();
  }

  get text() {
    return this.area.value;
  }

  get written() {
    return this.parts.some((part) => part.sweep !== null);
  }

  // What was there and what is there now differ in the middle: that is yours.
  edited() {
    const [before, after] = [this.parts.map((part) => part.text).join(""), this.area.value];
    const shorter = Math.min(before.length, after.length);
    let start = 0;
    while (start < shorter && before[start] === after[start]) start++;
    let end = 0;
    while (end < shorter - start && before[before.length - 1 - end] === after[after.length - 1 - end]) end++;
    const mine = { text: after.slice(start, after.length - end), sweep: null };
    this.parts = mergeParts([...cut(this.parts, 0, start), mine, ...cut(this.parts, before.length - end, before.length)]);
    this.draw();
    this.changed();
  }

  // What the model has added in its sweep of that number.
  add(text, sweep) {
    const follow = this.sheet.scrollHeight - this.sheet.scrollTop - this.sheet.clientHeight < NEAR;
    this.parts.push({ text, sweep });
    this.area.value += text;
    this.ink.lastChild.before(mark(this.parts.at(-1)));
    if (follow) this.sheet.scrollTop = this.sheet.scrollHeight;
  }

  keep() {
    return this.parts.map((part) => ({ ...part }));
  }

  restore(parts) {
    this.parts = parts;
    this.area.value = parts.map((part) => part.text).join("");
    this.draw();
    this.sheet.scrollTop = this.sheet.scrollHeight;
    this.changed();
  }

  draw() {
    this.ink.replaceChildren(...this.parts.map(mark), "\u200b"); // the last line counts also when it is empty
  }
}

function mark(part) {
  return part.sweep === null ? document.createTextNode(part.text) : make("span", part.sweep % 2 ? "by-model odd" : "by-model", part.text);
}

function cut(parts, start, end) {
  const slices = [];
  let at = 0;
  for (const part of parts) {
    const text = part.text.slice(Math.max(0, start - at), Math.max(0, end - at));
    if (text) slices.push({ text, sweep: part.sweep });
    at += part.text.length;
  }
  return slices;
}

function mergeParts(parts) {
  const merged = [];
  for (const part of parts) {
    if (merged.length && merged.at(-1).sweep === null && part.sweep === null) merged.at(-1).text += part.text;
    else if (part.text) merged.push(part);
  }
  return merged;
}

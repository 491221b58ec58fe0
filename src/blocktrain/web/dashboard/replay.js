// A log as a film: the state at any moment of it, and a hand to move with.

import { begin, fold, isNumber } from "./fold.js";

export const SPEEDS = [1, 10, 60, 300, 1800];
const LONGEST_PAUSE = 2; // seconds that a viewer waits while nothing happens

export class Film {
  constructor(events) {
    this.events = events.filter((event) => event.kind !== "status");
    this.times = [];
    let last = this.events.find((event) => isNumber(event.time))?.time ?? 0;
    for (const event of this.events) this.times.push((last = Math.max(last, isNumber(event.time) ? event.time : last)));
    this.start = this.times[0] ?? 0;
    this.end = last;
    this.playing = false;
    this.speed = SPEEDS.find((speed) => (this.end - this.start) / speed <= 60) ?? SPEEDS[SPEEDS.length - 1];
    this.rewind();
    this.moveTo(this.end);
  }

  rewind() {
    this.state = begin();
    this.next = 0; // the first event that has not happened yet
    this.now = this.start;
  }

  moveTo(time) {
    const goal = Math.min(this.end, Math.max(this.start, time));
    if (goal < this.now) this.rewind();
    this.now = goal;
    while (this.next < this.events.length && this.times[this.next] <= goal) fold(this.state, this.events[this.next++]);
  }

  // To the next event, or with -1 to the one before; events of the same moment are one.
  hop(direction) {
    if (direction > 0) return this.moveTo(this.times[this.next] ?? this.end);
    let index = this.next - 1;
    while (index >= 0 && this.times[index] >= this.now) index--;
    this.moveTo(this.times[index] ?? this.start);
  }

  play() {
    if (this.now >= this.end) this.moveTo(this.start);
    this.playing = true;
  }

  // So many real seconds later; long silences are skipped.
  tick(seconds) {
    if (!this.playing) return;
    let goal = this.now + seconds * this.speed;
    const coming = this.times[this.next] ?? this.end;
    if (coming - goal > LONGEST_PAUSE * this.speed) goal = coming - LONGEST_PAUSE * this.speed;
    this.moveTo(goal);
    if (this.now >= this.end) this.playing = false;
  }
}

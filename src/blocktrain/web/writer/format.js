// Numbers as text.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
export const NONE = "–";

// Three digits and a unit: 1.23 MB.
export function bytes(count) {
  let [value, n] = [count, 0];
  while (Math.abs(value) >= 999.5 && n < UNITS.length - 1) [value, n] = [value / 1000, n + 1];
  return `${n ? digits(value) : Math.round(value)} ${UNITS[n]}`;
}

export function count(number) {
  return Math.round(number).toLocaleString("en");
}

export function digits(value) {
  const size = Math.abs(value);
  return size < 9.995 ? value.toFixed(2) : size < 99.95 ? value.toFixed(1) : count(value);
}

export function milliseconds(value) {
  return value < 1000 ? `${value < 9.95 ? value.toFixed(1) : Math.round(value)} ms` : `${digits(value / 1000)} s`;
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

// The two largest units: 42 s, 3 min 05 s, 2 h 10 min, 3 d 4 h.
export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  const pad = (number) => String(number).padStart(2, "0");
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${pad(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${pad(Math.floor((s % 3600) / 60))} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function many(number, one, more = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : more}`;
}

export function joinNames(items) {
  return items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;
}

export function sentence(text) {
  const words = text ? text[0].toUpperCase() + text.slice(1) : "";
  return /[.!?]$/.test(words) ? words : `${words}.`;
}

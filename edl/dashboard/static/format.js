// Figures and times as a person reads them, with their units. What is not known is a dash.

export const UNKNOWN = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const small = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const large = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const full = new Intl.DateTimeFormat("en-GB", {
  weekday: "long", day: "numeric", month: "long", year: "numeric",
  hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short",
});
const LAST_DATE_S = 8.64e12; // beyond it JavaScript has no dates, and formatting them raises an error

export function count(value) {
  if (value === null) return UNKNOWN;
  return Math.abs(value) < 1e7 ? whole.format(value) : large.format(value);
}

/** A figure that need not be whole, such as a rate. */
export function figure(value) {
  if (value === null) return UNKNOWN;
  if (Math.abs(value) >= 1e6) return large.format(value);
  return Math.abs(value) < 1000 ? small.format(value) : whole.format(value);
}

export function rate(value, unit) {
  return value === null ? UNKNOWN : `${figure(value)} ${unit}`;
}

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A share from 0 to 1 as a percentage; 99.96% is not shown as 100%. */
export function percent(value) {
  if (value === null) return UNKNOWN;
  const hundredths = value * 100;
  const text = hundredths.toFixed(1);
  if (text === "100.0" && value < 1) return ">99.9%";
  if (text === "0.0" && value > 0) return "<0.1%";
  return `${text}%`;
}

/** 0.35 s, 12 s, 4 min 05 s, 3 h 20 min, 2 d 4 h. */
export function duration(seconds) {
  if (seconds === null) return UNKNOWN;
  const amount = Math.max(0, seconds);
  if (amount < 9.995) return `${amount.toFixed(2)} s`;
  if (amount < 119.5) return `${amount.toFixed(0)} s`;
  const minutes = Math.floor(Math.round(amount) / 60);
  if (minutes < 120) return `${minutes} min ${String(Math.round(amount) % 60).padStart(2, "0")} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${whole.format(Math.floor(minutes / 1440))} d ${Math.floor((minutes % 1440) / 60)} h`;
}

/** Whole seconds and longer, for ages that tick. */
export function age(seconds) {
  if (seconds === null) return UNKNOWN;
  return seconds < 9.995 ? `${Math.floor(Math.max(0, seconds))} s` : duration(seconds);
}

function dateOf(seconds) {
  return seconds === null || Math.abs(seconds) > LAST_DATE_S ? null : new Date(seconds * 1000);
}

/** The local time, with the day where that is not today. */
export function time(seconds, now) {
  const date = dateOf(seconds);
  if (date === null) return UNKNOWN;
  const today = dateOf(now);
  const same = today !== null && date.toDateString() === today.toDateString();
  return same ? clock.format(date) : `${day.format(date)}, ${clock.format(date)}`;
}

/** The local date and time in full, with the zone. */
export function fullTime(seconds) {
  const date = dateOf(seconds);
  return date === null ? "time unknown" : full.format(date);
}

/** What an axis of times shows at a tick, where ticks are `step` seconds apart. */
export function tick(seconds, step) {
  const date = dateOf(seconds);
  if (date === null) return "";
  if (step >= 86400) return day.format(date);
  const text = clock.format(date);
  return step >= 60 ? text.slice(0, 5) : text;
}

/** 0, 1, 2, 3, 7 as "0–3, 7". */
export function ranges(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const found = [];
  for (const number of sorted) {
    const last = found[found.length - 1];
    if (last !== undefined && number <= last[1] + 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

// Decisions and events of all jobs and services, each with its cause, the newest first.

import { BoundedTable, element, setNameCell, setText, setTitle } from "./dom.js";
import { count, fullTime, time } from "./format.js";
import { setBadge } from "./parts.js";

const column = (label, kind, set) => ({ label, kind, set });

const known = new WeakMap(); // state -> its events: several parts of the page ask

/** The newest events of all first; the server merges so many of them, and of older ones each job has its own. */
export function eventsOf(state) {
  if (!known.has(state)) known.set(state, mergeEvents(state));
  return known.get(state);
}

function mergeEvents(state) {
  const oldest = state.events.reduce((least, event) => Math.min(least, event.time ?? Infinity), Infinity);
  const own = state.jobs.flatMap((job) => job.events.filter((event) => event.time < oldest).map((event) => ({ ...event, job: job.job })));
  return [...state.events, ...own].sort((left, right) => (right.time ?? 0) - (left.time ?? 0));
}

function keyOf(event) {
  return [event.time, event.kind, event.job, event.service, event.node, event.text].join("\n");
}

export class EventsView {
  constructor(section) {
    this._filter = element("input", { type: "search", id: "events-filter", autocomplete: "off", spellcheck: "false" });
    this._only = element("input", { type: "checkbox", id: "events-decisions" });
    this._count = element("p", { class: "headline" });
    this._table = new BoundedTable("Newest first", [
      column("time", "when", (cell, event) => {
        setText(cell, time(event.time, event.now));
        setTitle(cell, fullTime(event.time));
      }),
      column("what", "word", (cell, event) => setBadge(cell, event.kind)),
      column("where", "", (cell, event) => setNameCell(cell, [event.job, event.service, event.node].filter(Boolean).join(" / ") || "–")),
      column("details", "text", (cell, event) => setNameCell(cell, event.text || "–")),
      column("cause", "wide", (cell, event) => setNameCell(cell, event.cause || "–")),
    ], keyOf, { noun: "events", rows: 30 });
    const again = () => this._state && this.update(this._state);
    this._filter.addEventListener("input", again);
    this._only.addEventListener("change", again);
    section.append(
      element("div", { class: "controls" },
        element("label", { for: "events-filter" }, "Only with the words"), this._filter,
        element("label", { class: "check" }, this._only, " only decisions")),
      this._count, this._table.root);
  }

  update(state) {
    this._state = state;
    const all = eventsOf(state);
    const words = this._filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = all.filter((event) => (!this._only.checked || event.decision) && hasAll(event, words));
    setText(this._count, chosen.length === all.length ? `${count(all.length)} in all` : `${count(chosen.length)} of ${count(all.length)}`);
    this._table.update(chosen.map((event) => ({ ...event, now: state.time })));
  }
}

function hasAll(event, words) {
  if (words.length === 0) return true;
  const text = [event.kind, event.job, event.service, event.node, event.text, event.cause].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

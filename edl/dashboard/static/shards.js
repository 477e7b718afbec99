// The shards of each job's datasets: how far they are, the poisoned ones first, who holds which.

import { BoundedTable, MoreButton, element, nameElement, reconcile, setName, setNameCell, setText, setTitle } from "./dom.js";
import { UNKNOWN, age, count, duration, figure, fullTime, plural, time } from "./format.js";
import { PartsBar } from "./parts.js";

const CARDS_SHOWN = 20; // until "show all"
const FAILURES_SHOWN = 5; // of a shard: the newest

const column = (label, kind, set) => ({ label, kind, set });

/** Every dataset of every job, those with poisoned shards first. */
export function datasetsOf(state) {
  const found = state.jobs.flatMap((job) => (job.master?.datasets ?? []).map((dataset) => ({
    dataset, job: job.job, master: job.master, now: state.time,
  })));
  return found.sort((left, right) => poisonedIn(right.dataset) - poisonedIn(left.dataset)
    || left.job.localeCompare(right.job) || left.dataset.name.localeCompare(right.dataset.name));
}

export function poisonedIn(dataset) {
  return dataset.poisonedCount ?? dataset.poisoned.length;
}

export class ShardsView {
  constructor(section) {
    this._list = element("div", { class: "cards" });
    this._more = new MoreButton(CARDS_SHOWN, "datasets", () => this.update(this._state));
    section.append(this._list, this._more.root);
  }

  update(state) {
    this._state = state;
    reconcile(this._list, this._more.shown(datasetsOf(state)), (item) => `${item.job}\n${item.dataset.name}`, () => new DatasetCard());
  }
}

class DatasetCard {
  constructor() {
    this._name = nameElement();
    this._job = nameElement();
    this._headline = element("p", { class: "headline" });
    this._silent = element("p", { class: "message" });
    this._poisoned = new PoisonedTable();
    this._bar = new PartsBar("Shards");
    this._holders = new BoundedTable("Holders", [
      column("holder", "heading", (cell, holder) => setNameCell(cell, holder.holder)),
      column("shards held", "number", (cell, holder) => setText(cell, count(holder.leases))),
      column("units done", "number", (cell, holder) => setText(cell, count(holder.unitsDone))),
      column("units/s", "number", (cell, holder) => setText(cell, figure(holder.unitsPerS))),
      column("last heard", "number", (cell, holder) => setText(cell, holder.seenS === null ? UNKNOWN : `${age(holder.seenS)} ago`)),
    ], (holder) => holder.holder, { noun: "holders" });
    this.root = element("article", { class: "card" },
      element("h3", {}, this._name, element("span", { class: "of" }, " of job ", this._job)),
      this._headline, this._silent, this._poisoned.root, this._bar.root, this._holders.root);
  }

  update({ dataset, job, master, now }) {
    setName(this._name, dataset.name);
    setName(this._job, job);
    setText(this._headline, headline(dataset));
    const words = masterWords(master);
    this._silent.hidden = words === "";
    setText(this._silent, words);
    this._poisoned.update({ dataset, job, now });
    const parts = [
      ["poisoned", "failed too often, and skipped until put back"],
      ["done", "reported done"],
      ["doing", "given to a holder"],
      ["todo", "waiting"],
    ];
    const amounts = { ...dataset, poisoned: poisonedIn(dataset) };
    this._bar.update(parts.map(([name, help]) => ({
      name, help, look: `shard-${name}`, amount: amounts[name] ?? 0, shown: amounts[name] === null ? UNKNOWN : plural(amounts[name], "shard"),
    })));
    this._holders.setCaption(`Holders: ${count(dataset.holders.length)}`);
    this._holders.root.hidden = dataset.holders.length === 0;
    this._holders.update(dataset.holders);
  }
}

function masterWords(master) {
  if (master.state === "silent") return `The job's master has reported nothing for ${age(master.ageS)}: these figures are old.`;
  return master.state === "stopped" ? "The job's master has stopped; a new master continues from there." : "";
}

function headline(dataset) {
  const words = [];
  if (dataset.kind !== "") words.push(dataset.kind);
  if (dataset.epoch !== null) {
    words.push(dataset.epochs === null ? `epoch ${count(dataset.epoch + 1)}` : `epoch ${count(dataset.epoch + 1)} of ${count(dataset.epochs)}`);
  }
  words.push(dataset.units === null ? "unbounded" : plural(dataset.units, "unit"));
  const left = (dataset.todo ?? 1) + (dataset.doing ?? 1) > 0;
  if (left && dataset.unitsPerS !== null) words.push(`${figure(dataset.unitsPerS)} units/s`);
  if (left && dataset.etaS !== null) words.push(`${duration(dataset.etaS)} left`);
  return words.join(" · ");
}

/** What failed too often, with each failure's time, holder and reason. */
class PoisonedTable {
  constructor() {
    this._table = new BoundedTable("Poisoned shards", [
      column("shard", "heading", (cell, shard) => setText(cell, count(shard.shard))),
      column("units", "", (cell, shard) => setText(cell, shard.start === null ? UNKNOWN : `${count(shard.start)} to ${count(shard.stop)}`)),
      column("failures: when, holder, reason", "wide", setFailures),
    ], (shard) => `${shard.epoch}\n${shard.shard}`, { noun: "poisoned shards" });
    this._unlisted = element("p", { class: "message" });
    this.root = element("div", { class: "poisoned" }, this._table.root, this._unlisted);
  }

  update({ dataset, now }) {
    const total = poisonedIn(dataset);
    this.root.hidden = total === 0;
    if (total === 0) return;
    this._table.setCaption(`▲ ${plural(total, "poisoned shard")}`);
    this._table.update(dataset.poisoned.map((shard) => ({ ...shard, now })));
    const unlisted = total - dataset.poisoned.length;
    this._unlisted.hidden = unlisted <= 0;
    setText(this._unlisted, unlisted > 0 ? `${plural(unlisted, "more poisoned shard")}: the master lists the first ones.` : "");
  }
}

function setFailures(cell, shard) {
  if (cell.firstChild === null) {
    cell.append(element("div", {}, element("ul", { class: "failures" }), element("span", { class: "headline" })));
  }
  const [list, rest] = cell.firstChild.children;
  const hidden = shard.failures.length - FAILURES_SHOWN;
  rest.hidden = hidden <= 0;
  setText(rest, `and ${plural(hidden, "earlier failure")}`);
  const newest = shard.failures.slice(-FAILURES_SHOWN).map((failure) => ({ ...failure, now: shard.now })).reverse();
  reconcile(list, newest, (failure) => `${failure.time}\n${failure.holder}`, () => {
    const [when, holder, reason] = [element("time"), nameElement(), element("bdi", { class: "reason" })];
    const root = element("li", {}, when, " ", holder, ": ", reason);
    return {
      root,
      update(failure) {
        setText(when, time(failure.time, failure.now));
        setTitle(when, fullTime(failure.time));
        setName(holder, failure.holder);
        setText(reason, failure.reason || "no reason given");
      },
    };
  });
}

// The jobs: state, members, goodput and its parts over time, throughput.

import { categoriesOf, colourOf, helpOf, lookOf } from "./categories.js";
import { TimeChart } from "./chart.js";
import { BoundedTable, MoreButton, element, nameElement, reconcile, setName, setNameCell, setText } from "./dom.js";
import { UNKNOWN, age, count, duration, figure, fullTime, percent, plural, ranges } from "./format.js";
import { Badge, FactList, PartsBar, WantedLine, kindOf, setBadge } from "./parts.js";
import { lines, shares } from "./series.js";

const JOBS_SHOWN = 20; // until "show all"
const JOBS_OPEN = 2; // at first: each has two pictures and a table
const MARKS = 60; // in a picture: more are a hedge
const NOT_MARKED = new Set(["straggler"]); // no moment
const GAVE_UP = "gave up";
const ENDED = new Set(["done", "failed", GAVE_UP]);

export class JobsView {
  constructor(section) {
    this._list = element("div", { class: "cards" });
    this._more = new MoreButton(JOBS_SHOWN, "jobs", () => this.update(this._state));
    this._older = element("p", { class: "headline" });
    section.append(this._list, this._more.root, this._older);
    this._made = 0;
  }

  update(state) {
    this._state = state;
    const items = [...state.jobs].sort(order).map((job) => ({ job, now: state.time }));
    reconcile(this._list, this._more.shown(items), (item) => item.job.job, (item) => {
      this._made += 1;
      return new JobCard(item.job.job, this._made <= JOBS_OPEN && item.job.state !== GAVE_UP);
    });
    this._older.hidden = state.moreJobs <= 0;
    setText(this._older, `${plural(state.moreJobs, "older job")} that ended ${state.moreJobs === 1 ? "is" : "are"} left out.`);
  }
}

/** Jobs that move first, then those that began last. */
function order(left, right) {
  return ENDED.has(left.state) - ENDED.has(right.state)
    || (right.began ?? 0) - (left.began ?? 0)
    || left.job.localeCompare(right.job);
}

class JobCard {
  constructor(name, open) {
    this._name = nameElement(name);
    this._badge = new Badge();
    this._headline = element("span", { class: "headline" });
    this._body = element("div", { class: "card-body" });
    this.root = element("details", { class: "card" },
      element("summary", {}, element("h3", {}, this._name), " ", this._badge.root, " ", this._headline), this._body);
    this.root.open = open;
    this.root.addEventListener("toggle", () => this._draw());
    this._parts = null;
  }

  update(item) {
    this._item = item;
    const { job } = item;
    this._badge.update(job.state);
    setText(this._headline, job.masterOnly ? "no agent has reported; the shards that the master reports are below" : headline(job));
    this._draw();
  }

  destroy() {
    this._parts?.forEach((part) => part.destroy?.());
  }

  /** What is folded costs nothing. */
  _draw() {
    if (!this.root.open || this._item === undefined) return;
    if (this._parts === null) {
      this._parts = [new Summary(), new GoodputOverTime(), new Members()];
      this._body.append(...this._parts.map((part) => part.root));
    }
    for (const part of this._parts) {
      part.update(this._item);
      if (this._item.job.masterOnly && part.forAgents) part.root.hidden = true;
    }
  }
}

function headline(job) {
  const words = [];
  if (job.goodput !== null) words.push(`goodput ${percent(job.goodput)}`);
  if (job.worldSize !== null && job.worldSize > 0) words.push(plural(job.worldSize, "rank"));
  if (job.step !== null && job.step >= 0) words.push(`step ${count(job.step)}`);
  return words.join(" · ");
}

/** The figures of now, and what the time went into. */
class Summary {
  constructor() {
    this._message = element("p", { class: "message" });
    this._facts = new FactList();
    this._bar = new PartsBar("Where the time went");
    this._wanted = new WantedLine("worker");
    this._excluded = element("ul", { class: "left-out" });
    this.root = element("div", {}, this._message, this._facts.root, this._wanted.root,
      element("h4", {}, "Where the time went"), this._bar.root, this._excluded);
  }

  get forAgents() {
    return true;
  }

  update({ job, now }) {
    this.root.hidden = false;
    const message = job.message.trim();
    this._message.hidden = message === "";
    setText(this._message, message);
    this._facts.update([
      ["goodput", job.goodput === null ? "unknown" : percent(job.goodput),
        job.goodput === null
          ? "No step was reported: Checkpointer.save reports steps"
          : "Share of the wall-clock time spent on steps, not counting repetitions of lost steps"],
      ["samples/s", figure(job.samplesPerS)],
      ["steps/s", figure(job.stepsPerS)],
      ["step", job.step !== null && job.step < 0 ? "none yet" : count(job.step)],
      ["ranks", count(job.worldSize)],
      ["generation", job.generation !== null && job.generation < 0 ? "none yet" : count(job.generation),
        "How many times agents agreed on who takes part"],
      [ENDED.has(job.state) ? "ran for" : "since its start", duration(job.elapsedS), job.began === null ? "" : `Began ${fullTime(job.began)}`],
    ]);
    this._bar.update(categoriesOf(job.seconds).map((name) => ({
      name, look: lookOf(name), help: helpOf(name), amount: job.seconds.get(name) ?? 0, shown: duration(job.seconds.get(name) ?? 0),
    })));
    this._wanted.update(job.wanted, now);
    this._excluded.hidden = job.leftOut.length === 0;
    reconcile(this._excluded, job.leftOut, (host) => host.node, () => {
      const [name, reason] = [nameElement(), element("bdi")];
      const root = element("li", {}, "The host of ", name, " is left out: ", reason,
        ". Once its GPU is reset or replaced, a reboot or ", element("code", {}, "edl run --readmit"), " there lets it join again.");
      return {
        root,
        update(host) {
          setName(name, host.node);
          setText(reason, host.reason || "no reason given");
        },
      };
    });
  }
}

const THROUGHPUTS = [
  { unit: "samples/s", read: (point) => point.samplesPerS },
  { unit: "steps/s", read: (point) => point.stepsPerS },
  { unit: "units/s", read: (point) => point.unitsPerS },
];

/** The first kind of throughput that a job has any figures of; of a master alone only units are known. */
function throughputOf(job) {
  if (job.masterOnly) return THROUGHPUTS[2];
  return THROUGHPUTS.find(({ read }) => job.history.some((point) => read(point) > 0)) ?? THROUGHPUTS[0];
}

/** The two pictures over time. */
class GoodputOverTime {
  constructor() {
    this._slot = element("div", { class: "slot" });
    this._throughputSlot = element("div", { class: "slot" });
    this.root = element("div", { class: "charts" }, this._slot, this._throughputSlot);
    this._categories = "";
  }

  update({ job }) {
    this.root.hidden = job.history.length === 0;
    const categories = categoriesOf(job.seconds);
    if (this._categories !== categories.join("\n")) {
      this._categories = categories.join("\n");
      this._bands?.destroy();
      this._bands = new TimeChart({
        title: "Where the time went, over time",
        unit: "%",
        bands: true,
        top: 100,
        series: categories.map((name) => ({ label: name, colour: colourOf(name) })),
      });
      this._slot.replaceChildren(this._bands.root);
    }
    const marks = job.events.filter((event) => event.time !== null && !NOT_MARKED.has(event.kind)).slice(-MARKS).map((event) => ({
      t: event.time, bad: kindOf(event.kind) === "bad", text: [event.kind, event.node, event.cause].filter(Boolean).join(" "),
    }));
    this._slot.hidden = job.masterOnly;
    this._bands.update(shares(job.history, categories), marks);
    const kind = throughputOf(job);
    if (this._kind !== kind) {
      this._kind = kind;
      this._throughput?.destroy();
      this._throughput = new TimeChart({ title: `Throughput, ${kind.unit}`, unit: kind.unit, series: [{ label: "", colour: "--line" }] });
      this._throughputSlot.replaceChildren(this._throughput.root);
    }
    this._throughput.update(lines(job.history, [kind.read]), marks);
  }

  destroy() {
    this._bands?.destroy();
    this._throughput?.destroy();
  }
}

/** A node that is not there has no rate, whatever it had last. */
function isGone(node) {
  return node.state === "left" || node.state === "lost";
}

class Members {
  constructor() {
    const column = (label, kind, set) => ({ label, kind, set });
    this._table = new BoundedTable("Members", [
      column("node", "heading", (cell, node) => setNameCell(cell, node.node)),
      column("ranks", "", (cell, node) => setText(cell, node.ranks.length === 0 ? "–" : ranges(node.ranks))),
      column("state", "word", (cell, node) => setBadge(cell, node.state)),
      column("goodput", "number", (cell, node) => setText(cell, percent(node.goodput))),
      column("step", "number", (cell, node) => setText(cell, node.step !== null && node.step < 0 ? "–" : count(node.step))),
      column("steps/s", "number", (cell, node) => setText(cell, isGone(node) ? UNKNOWN : figure(node.stepsPerS))),
      column("samples/s", "number", (cell, node) => setText(cell, isGone(node) ? UNKNOWN : figure(node.samplesPerS))),
      column("last heard", "number", (cell, node) => setText(cell, node.silentS === null ? "–" : `${age(node.silentS)} ago`)),
    ], (node) => `${node.node}\n${node.began}`, { noun: "members" });
    this.root = this._table.root;
  }

  get forAgents() {
    return true;
  }

  update({ job }) {
    this.root.hidden = job.nodes.length === 0;
    const gone = job.nodes.filter(isGone).length;
    const there = job.nodes.length - gone;
    this._table.setCaption(`Members: ${plural(there, "node")} there${gone > 0 ? `, ${count(gone)} gone` : ""}`);
    this._table.update(job.nodes);
  }
}


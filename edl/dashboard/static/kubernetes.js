// Jobs and pools of a Kubernetes cluster: phase, members, why something waits, and how members ended.

import { BoundedTable, MoreButton, element, nameElement, reconcile, setName, setNameCell, setText, setTitle } from "./dom.js";
import { UNKNOWN, age, count, figure, fullTime, plural, time } from "./format.js";
import { Badge, FactList, setBadge } from "./parts.js";

const CARDS_SHOWN = 20; // until "show all"
const CARDS_OPEN = 1; // at first: each has two tables
const HEALTHY = new Set(["ready", "succeeded", "ending"]);

const column = (label, kind, set) => ({ label, kind, set });

export class KubernetesView {
  constructor(section) {
    this._where = element("p", { class: "headline" });
    this._stale = element("p", { class: "stale", role: "status" });
    this._list = element("div", { class: "cards" });
    this._more = new MoreButton(CARDS_SHOWN, "jobs and pools", () => this.update(this._state));
    this._none = element("p", { class: "hint" }, "There are no jobs or pools; ", element("code", {}, "edl submit"), " creates one.");
    this._older = element("p", { class: "headline" });
    section.append(this._where, this._stale, this._none, this._list, this._more.root, this._older);
    this._made = 0;
  }

  update(state) {
    const cluster = state.kubernetes;
    this._state = state;
    setText(this._where, placesOf(cluster));
    this._stale.hidden = cluster.stale === "";
    setText(this._stale, cluster.stale === "" ? "" : `These figures are old: ${cluster.stale}`);
    const items = workloadsOf(state).map((workload) => ({ workload, now: state.time, spacious: cluster.namespaces.length !== 1 }));
    this._none.hidden = items.length > 0 || cluster.looked === null;
    reconcile(this._list, this._more.shown(items), keyOf, () => {
      this._made += 1;
      return new WorkloadCard(this._made <= CARDS_OPEN);
    });
    this._older.hidden = cluster.moreJobs <= 0;
    setText(this._older, `${plural(cluster.moreJobs, "older job")} that ended ${cluster.moreJobs === 1 ? "is" : "are"} left out.`);
  }
}

function placesOf({ namespaces }) {
  if (namespaces.length === 0) return "All namespaces";
  return `${namespaces.length === 1 ? "Namespace" : "Namespaces"} ${namespaces.join(", ")}`;
}

/** Jobs and pools, in the order in which the server sends them: those that go on first. */
export function workloadsOf(state) {
  return state.kubernetes === null ? [] : [...state.kubernetes.jobs, ...state.kubernetes.pools];
}

/** How many need a person. */
export function troubledIn(state) {
  return workloadsOf(state).filter((item) => item.phase === "Failed" || item.phase === "Rejected").length;
}

function keyOf({ workload }) {
  return [workload.kind, workload.namespace, workload.name].join("/");
}

class WorkloadCard {
  constructor(open) {
    this._kind = element("span", { class: "of" });
    this._name = nameElement();
    this._badge = new Badge();
    this._headline = element("span", { class: "headline" });
    this._body = element("div", { class: "card-body" });
    this.root = element("details", { class: "card" },
      element("summary", {}, element("h3", {}, this._kind, " ", this._name), " ", this._badge.root, " ", this._headline), this._body);
    this.root.open = open;
    this.root.addEventListener("toggle", () => this._draw());
    this._parts = null;
  }

  update(item) {
    this._item = item;
    const { workload, spacious } = item;
    setText(this._kind, workload.kind);
    setName(this._name, spacious ? `${workload.namespace}/${workload.name}` : workload.name);
    this._badge.update(workload.phase === "" ? "not handled" : workload.phase);
    setText(this._headline, headline(workload));
    this._draw();
  }

  /** What is folded costs nothing. */
  _draw() {
    if (!this.root.open || this._item === undefined) return;
    if (this._parts === null) {
      this._parts = [new Summary(), new Conditions(), new Members()];
      this._body.append(...this._parts.map((part) => part.root));
    }
    for (const part of this._parts) part.update(this._item);
  }
}

/** A duration in a narrow column. */
function brief(seconds) {
  if (seconds < 119.5) return `${Math.max(0, seconds).toFixed(0)} s`;
  if (seconds < 7170) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${figure(seconds / 86400)} d`;
}

function headline(workload) {
  if (workload.phase === "") return "";
  const noun = workload.kind === "job" ? "worker" : "teacher";
  const words = [`${count(workload.ready)} of ${plural(workload.wanted, noun)} ready`];
  if (workload.progress !== null && workload.kind === "job") words.push(`${count(workload.progress)}%`);
  const ill = workload.members.filter((member) => !HEALTHY.has(member.state)).length;
  if (ill > 0 && workload.ended === null) words.push(`${plural(ill, noun)} not ready`);
  return words.join(" · ");
}

class Summary {
  constructor() {
    this._message = element("p", { class: "message" });
    this._trace = element("pre", { class: "trace" });
    this._facts = new FactList();
    this.root = element("div", {}, this._message, this._trace, this._facts.root);
  }

  update({ workload, now }) {
    const failed = workload.conditions.find((item) => item.type === "Failed" && item.status === "True");
    const trace = failed === undefined ? "" : (failed.message || failed.reason).trim();
    this._trace.hidden = trace === "";
    setText(this._trace, trace);
    const waits = "No operator has handled it yet: is edl operator running for this namespace?";
    const message = workload.phase === "" ? waits : workload.message.trim();
    this._message.hidden = message === "" || trace !== "";
    setText(this._message, message);
    const bounds = workload.least === workload.most ? count(workload.least) : `${count(workload.least)} to ${count(workload.most)}`;
    const began = workload.started ?? workload.created;
    const end = workload.ended ?? now;
    const facts = [
      ["ready", count(workload.ready)],
      ["wanted", count(workload.wanted), workload.scaling === "external" ? "Set from outside: scaling is external" : "Decided by EDL: scaling is auto"],
      ["may be", bounds],
    ];
    if (workload.kind === "job") {
      facts.push(["progress", workload.progress === null ? UNKNOWN : `${count(workload.progress)}%`]);
      facts.push(["left", workload.ended !== null || workload.remainingS === null ? UNKNOWN : `~${brief(workload.remainingS)}`]);
    } else {
      facts.push(["borrowed", count(workload.borrowed), "Teachers beyond the minimum, on idle GPUs"]);
    }
    facts.push([workload.ended === null ? "running for" : "ran for", began === null || end === null ? UNKNOWN : brief(end - began),
      began === null ? "" : `Began ${fullTime(began)}`]);
    facts.push(["scaling", workload.scaling]);
    if (workload.queue !== "") facts.push(["queue", workload.queue]);
    this._facts.update(facts);
  }
}

class Conditions {
  constructor() {
    this._table = new BoundedTable("Conditions", [
      column("condition", "heading", (cell, { condition }) => setNameCell(cell, condition.type)),
      column("is", "word", (cell, { condition }) => setText(cell, condition.status === "" ? UNKNOWN : condition.status)),
      column("since", "when", (cell, { condition, now }) => {
        setText(cell, time(condition.since, now));
        setTitle(cell, condition.since === null ? "" : fullTime(condition.since));
      }),
      column("reason", "", (cell, { condition }) => setNameCell(cell, condition.reason)),
      column("why", "wide", (cell, { condition }) => setNameCell(cell, lastLine(condition.message))),
    ], (item) => item.condition.type, { noun: "conditions" });
    this.root = this._table.root;
  }

  update({ workload, now }) {
    this.root.hidden = workload.conditions.length === 0;
    this._table.update(workload.conditions.map((condition) => ({ condition, now })));
  }
}

class Members {
  constructor() {
    this._table = new BoundedTable("Members", [
      column("member", "heading", (cell, { member }) => setNameCell(cell, member.name, member.pod)),
      column("state", "word", (cell, { member }) => setBadge(cell, member.state)),
      column("node", "", (cell, { member }) => setNameCell(cell, member.node)),
      column("try", "number", (cell, { member }) => {
        setText(cell, count(member.attempt));
        setTitle(cell, "Number of earlier pods of this member");
      }),
      column("failures", "", (cell, { member }) => setNameCell(cell, failures(member))),
      column("why, and how it ended last", "wide", (cell, { member, now }) => setNameCell(cell, explained(member, now), member.end === null ? "" : member.end.message)),
    ], (item) => item.member.name, { noun: "members" });
    this.root = this._table.root;
  }

  update({ workload, now }) {
    this.root.hidden = workload.members.length === 0;
    this._table.update(workload.members.map((member) => ({ member, now })));
  }
}

function failures(member) {
  const words = [...member.failures].map(([cause, times]) => `${count(times)}× ${cause.replaceAll("_", " ")}`);
  if (member.memoryFactor !== null && member.memoryFactor !== 1) words.push(`memory ×${member.memoryFactor.toFixed(2)}`);
  return words.join(", ");
}

function explained(member, now) {
  const words = [];
  if (member.state === "waiting" && member.notBefore !== null && now !== null && member.notBefore > now) {
    words.push(`next try in ${age(member.notBefore - now)}`);
  } else if (member.detail !== "") words.push(member.detail);
  if (member.end !== null) {
    const code = member.end.exitCode === null ? "" : `, exit code ${member.end.exitCode}`;
    const where = member.end.node === "" ? "" : ` on ${member.end.node}`;
    const last = lastLine(member.end.message);
    words.push(`${member.end.cause.replaceAll("_", " ")}${code}${where}${last === "" ? "" : `: ${last}`}`);
  }
  return words.join(" · ");
}

function lastLine(text) {
  return text.trim().split("\n").pop().trim();
}

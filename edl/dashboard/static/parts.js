// What several sections show alike: states, bars of parts with their legend, wanted counts.

import { element, reconcile, setClass, setText, setTitle } from "./dom.js";
import { UNKNOWN, count, fullTime, percent, plural, time } from "./format.js";

// Words of states and events, by what a person is to think of them. Each has a sign beside its colour.
const GOOD = new Set(["running", "ready", "train", "done", "join", "joined", "finished", "leading", "register", "recovered",
  "succeeded"]);
const BUSY = new Set(["forming", "rendezvous", "load", "save", "starting", "loading", "draining", "rollback", "idle",
  "restart", "relaunch", "generation", "leave", "unready", "wanted", "retried", "takeover",
  "pending", "suspended", "deleting", "ending", "unscheduled", "waiting", "not handled"]);
const BAD = new Set(["failed", "down", "lost", "kill", "killed", "exit", "hang", "error", "faulty", "straggler", "poisoned",
  "expired", "gave up", "lapsed", "silent", "stopped", "unreachable", "refused", "oom", "rejected"]);
const OLD_S = 60; // of a wanted count: masters write it every 10 s
const SIGNS = { good: "●", busy: "◐", bad: "▲", plain: "○" };

export function kindOf(word) {
  const key = word.toLowerCase();
  if (BAD.has(key)) return "bad";
  if (GOOD.has(key)) return "good";
  return BUSY.has(key) ? "busy" : "plain";
}

/** A word with a sign and a colour. */
export class Badge {
  constructor() {
    this._sign = element("span", { "aria-hidden": "true" });
    this._word = element("bdi");
    this.root = element("span", { class: "badge" }, this._sign, this._word);
  }

  update(word) {
    const kind = kindOf(word);
    setClass(this.root, `badge ${kind}`);
    setText(this._sign, SIGNS[kind]);
    setText(this._word, word === "" ? "unknown" : word.replaceAll("_", " "));
  }
}

const badges = new WeakMap();

/** Show a state in a table's cell. */
export function setBadge(cell, word) {
  let badge = badges.get(cell);
  if (badge === undefined) {
    badge = new Badge();
    cell.replaceChildren(badge.root);
    badges.set(cell, badge);
  }
  badge.update(word);
}

/** A bar of parts beside one another, and a legend that says each part's name, amount and share. */
export class PartsBar {
  constructor(label) {
    this._label = label;
    this._bar = element("div", { class: "parts", role: "img" });
    this._legend = element("ul", { class: "legend" });
    this.root = element("div", { class: "parts-block" }, this._bar, this._legend);
  }

  /** `parts` are {name, look, amount, shown, help}: `look` is a class, `shown` the amount with its unit. */
  update(given) {
    const total = given.reduce((sum, part) => sum + Math.max(0, part.amount), 0);
    const parts = given.map((part) => ({ ...part, share: total > 0 ? Math.max(0, part.amount) / total : null }));
    reconcile(this._bar, parts, (part) => part.name, () => {
      const root = element("div");
      return {
        root,
        update(part) {
          setClass(root, `part ${part.look}`);
          root.style.flexGrow = String(part.share ?? 0);
          root.hidden = part.amount <= 0;
        },
      };
    });
    reconcile(this._legend, parts, (part) => part.name, () => {
      const swatch = element("span", { "aria-hidden": "true" });
      const [name, amount] = [element("span", { class: "what" }), element("span", { class: "amount" })];
      const root = element("li", {}, swatch, name, " ", amount);
      return {
        root,
        update(part) {
          setClass(root, part.amount > 0 ? "" : "nothing");
          setClass(swatch, `swatch ${part.look}`);
          setText(name, part.name);
          setText(amount, part.share === null ? part.shown : `${part.shown} · ${percent(part.share)}`);
          setTitle(root, part.help ?? "");
        },
      };
    });
    const words = parts.filter((part) => part.amount > 0).map((part) => `${part.name} ${percent(part.share)}`);
    const description = `${this._label}: ${words.join(", ") || "nothing yet"}`;
    if (this._bar.getAttribute("aria-label") !== description) this._bar.setAttribute("aria-label", description);
  }
}

/** "5 workers wanted since 12:03:10 (4 now): reason"; hidden where nothing is wanted. */
export class WantedLine {
  constructor(noun) {
    this._noun = noun;
    this._count = element("strong");
    this._since = element("span");
    this._reason = element("bdi", { class: "reason" });
    this.root = element("p", { class: "wanted" }, this._count, " ", this._since, " ", this._reason);
  }

  update(wanted, now) {
    this.root.hidden = wanted === null;
    if (wanted === null) return;
    const current = wanted.now === null ? "" : ` (${count(wanted.now)} now)`;
    setText(this._count, wanted.count === null ? `${UNKNOWN} ${this._noun}s wanted` : `${plural(wanted.count, this._noun)} wanted`);
    setText(this._since, `${wanted.since === null ? "" : `since ${time(wanted.since, now)}`}${current}:`.trim());
    setTitle(this._since, wanted.since === null ? "" : fullTime(wanted.since));
    const old = wanted.time !== null && now !== null && now - wanted.time > OLD_S;
    const note = old ? ` (as of ${time(wanted.time, now)}: no master decides at present)` : "";
    setText(this._reason, (wanted.reason === "" ? "no reason given" : wanted.reason) + note);
  }
}

/** A term with its value, in a list of such. */
export class FactList {
  constructor() {
    this.root = element("dl", { class: "facts" });
  }

  /** `facts` are [term, value, title]. */
  update(facts) {
    reconcile(this.root, facts, ([term]) => term, () => {
      const [term, value] = [element("dt"), element("dd")];
      const root = element("div", {}, term, value);
      return {
        root,
        update([name, text, title]) {
          setText(term, name);
          setText(value, text);
          setTitle(root, title ?? "");
        },
      };
    });
  }
}

// Joins the stream of events with what draws them.

import { Connection } from "./connection.js";
import { element, nameElement, reconcile, setName, setText, setTitle } from "./dom.js";
import { EmptyView } from "./empty.js";
import { EventsView, eventsOf } from "./events.js";
import { age, count, fullTime, plural } from "./format.js";
import { JobsView } from "./jobs.js";
import { KubernetesView, troubledIn, workloadsOf } from "./kubernetes.js";
import { ServicesView, liveTeachers } from "./services.js";
import { ShardsView, datasetsOf, poisonedIn } from "./shards.js";
import { applyEvent } from "./state.js";

const CLOCKS_DIFFER_S = 5; // below it is the network's, and nobody's trouble

const find = (id) => document.getElementById(id);
const views = [
  ["empty", new EmptyView(find("empty")), () => true],
  ["jobs", new JobsView(find("jobs")), (state) => state.jobs.length > 0],
  ["kubernetes", new KubernetesView(find("kubernetes")), (state) => state.kubernetes !== null],
  ["shards", new ShardsView(find("shards")), (state) => datasetsOf(state).length > 0],
  ["teachers", new ServicesView(find("teachers")), (state) => state.services.length > 0],
  ["events", new EventsView(find("events")), (state) => eventsOf(state).length > 0],
];

let state = null;
let drawn = null;
let status = "connecting";
let reason = "";

const connection = new Connection(
  new URL("api/events", document.baseURI),
  new URL("api/state", document.baseURI),
  (kind, data) => {
    if (kind === "heartbeat") return;
    state = applyEvent(state, kind, data);
    compareClocks(state.time);
    showStatus();
    scheduleDraw();
  },
  (newStatus, newReason) => {
    // Why it was lost stays true until something comes.
    reason = newReason || (newStatus === "lost" ? reason : "");
    status = newStatus;
    showStatus();
  },
);

setInterval(showStatus, 1000);
document.addEventListener("visibilitychange", scheduleDraw);
showStatus();

/** Draw the newest state with the next frame; a page that is not seen draws nothing, and catches up when it is. */
function scheduleDraw() {
  if (state === null || state === drawn || document.visibilityState !== "visible") return;
  requestAnimationFrame(() => {
    if (state === drawn) return;
    drawn = state;
    draw(state);
  });
}

function draw(current) {
  setText(find("store"), current.store);
  setTitle(find("store"), current.store);
  const stale = current.stale === "" ? "" : `Figures are old: ${current.stale}`;
  setText(find("stale"), stale);
  find("stale").hidden = stale === "";
  drawUnreadable(current.unreadable);
  for (const [id, view, shows] of views) {
    const shown = shows(current);
    if (id !== "empty") find(id).hidden = !shown;
    if (shown) view.update(current);
  }
  drawSections(current);
  document.title = titleOf(current);
  find("content").dataset.time = String(current.time);
}

function drawSections(current) {
  const datasets = datasetsOf(current);
  const poisoned = datasets.reduce((sum, item) => sum + poisonedIn(item.dataset), 0);
  const teachers = current.services.reduce((sum, service) => sum + liveTeachers(service), 0);
  const troubled = troubledIn(current);
  const links = [
    ["jobs", plural(current.jobs.length, "job"), current.jobs.length > 0, ""],
    ["kubernetes", plural(workloadsOf(current).length, "Kubernetes resource"), current.kubernetes !== null, troubled > 0 ? `▲ ${count(troubled)} failed` : ""],
    ["shards", plural(datasets.length, "dataset"), datasets.length > 0, poisoned > 0 ? `▲ ${plural(poisoned, "poisoned shard")}` : ""],
    ["teachers", plural(teachers, "teacher"), current.services.length > 0, ""],
    ["events", plural(eventsOf(current).length, "event"), eventsOf(current).length > 0, ""],
  ].filter(([, , shown]) => shown);
  const nav = find("sections");
  nav.hidden = links.length === 0;
  reconcile(nav, links, ([id]) => id, ([id]) => {
    const [words, warning] = [element("span"), element("span", { class: "warning" })];
    const root = element("a", { href: `#${id}` }, words, " ", warning);
    return {
      root,
      update([, text, , trouble]) {
        setText(words, text);
        setText(warning, trouble);
      },
    };
  });
}

/** Records that nobody can read are no reason to show nothing, and none to hide it. */
function drawUnreadable(records) {
  const notice = find("unreadable");
  notice.hidden = records.length === 0;
  setText(notice.querySelector("summary"), `${plural(records.length, "record")} of the store could not be read`);
  reconcile(notice.querySelector("ul"), records, (bad) => bad.key, () => {
    const [key, reason] = [nameElement(), element("bdi", { class: "reason" })];
    return {
      root: element("li", {}, key, ": ", reason),
      update(bad) {
        setName(key, bad.key);
        setText(reason, bad.reason);
      },
    };
  });
}

function titleOf(current) {
  const what = current.job || (current.jobs.length === 1 ? current.jobs[0].job : plural(current.jobs.length, "job"));
  return `${what} · EDL`;
}

/** Say whether the figures are those of now. The seconds stand beside what screen readers are told, not in it. */
function showStatus() {
  const words = { connecting: "connecting", live: "live", lost: "connection lost" }[status];
  document.documentElement.dataset.connection = status;
  setText(find("connection"), reason === "" ? words : `${words}: ${reason}`);
  const silent = age(connection.silentS);
  const updated = find("updated");
  if (state === null) setText(updated, "");
  else setText(updated, status === "live" ? `· updated ${silent} ago` : `· last update ${silent} ago, trying again`);
  setTitle(updated, state === null || state.time === null ? "" : `Figures of ${fullTime(state.time)}`);
}

/** Times are the computers' own: a browser whose clock differs shows other times on its own clock. */
function compareClocks(serverTime) {
  const difference = serverTime === null ? 0 : Date.now() / 1000 - serverTime;
  const differs = Math.abs(difference) > CLOCKS_DIFFER_S;
  const words = `This browser's clock is ${age(Math.abs(difference))} ${difference > 0 ? "ahead of" : "behind"} the server's.`;
  setText(find("clock"), differs ? words : "");
}

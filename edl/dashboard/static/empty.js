// What the page shows of a Store in which nothing is: what to run.

import { element, setText } from "./dom.js";

const STEPS = [
  ["See it all at once: teachers that are killed, and students that never notice.", "edl demo --dashboard"],
  ["Start a job. The same command in another terminal adds a node.", "edl run --nnodes 1:4 --nproc-per-node 2 --rdzv-id first-job train.py"],
  ["Start a teacher.", 'edl serve --callable teacher.py:predict --input "image:float32[1,8,8]" --service digits'],
  ["Hand out a dataset to many workers, shard by shard.", "edl master labels --data lines:corpus.txt --shard-size 1000"],
];

export class EmptyView {
  constructor(section) {
    this._section = section;
    this._store = element("code");
    this._where = element("p", {}, "This page shows what is in ", this._store,
      ". Programs find the store through the variable ", element("code", {}, "EDL_DISCOVERY"), "; without this variable, they use your own file.");
    section.append(
      element("h2", { id: "empty-heading" }, "Nothing is running here yet"), this._where,
      element("p", {}, "Start something, and it shows up here within seconds:"),
      element("ol", { class: "steps" }, ...STEPS.map(([words, command]) =>
        element("li", {}, words, element("pre", {}, element("code", {}, command))))));
  }

  update(state) {
    const empty = state.jobs.length === 0 && state.services.length === 0 && state.kubernetes === null;
    this._section.hidden = !empty;
    this._where.hidden = state.store === "";
    setText(this._store, state.store);
  }
}

// Where a job's time goes: the categories of docs/goodput.md, in the order in which they are stacked.

const KNOWN = [
  ["train", "steps that count"],
  ["save", "the training loop is blocked by a copy of its state"],
  ["load", "what comes before the first step: imports, process group, model, reading a checkpoint"],
  ["rollback", "work that was lost: steps done again, and the part of a step that a restart interrupted"],
  ["rendezvous", "agents agree on the next world; workers that paused for it"],
  ["idle", "an agent is alive and nothing moves: a hang, workers that ended before the others"],
  ["down", "no agent of the job is alive"],
];
const ORDER = KNOWN.map(([name]) => name);
const HELP = new Map(KNOWN);

/** The known categories, then what else a job has. */
export function categoriesOf(seconds) {
  return [...ORDER, ...[...seconds.keys()].filter((name) => !HELP.has(name))];
}

export function helpOf(category) {
  return HELP.get(category) ?? "";
}

/** The class of a category's parts and swatches, and the CSS variable of its colour. */
export function lookOf(category) {
  return HELP.has(category) ? `time-${category}` : "time-other";
}

export function colourOf(category) {
  return `--${lookOf(category)}`;
}

// The state that the server sends: checked field by field, and joined with what came before.
//
// Whatever is missing, of another type or not finite becomes null, "" or [], so that what draws it need not ask. The
// names are those of /api/state. What does not belong here: how anything is shown.

const MAX_POINTS = 600; // of a history: as many as a picture has columns, and 20 minutes of 2 s
const MAX_ITEMS = 5000; // of a list: more freeze a browser, and are read by no person
const LAST_TIME = 1e11; // the year 5138, in seconds
const MAX_CHARS = 2000; // of a text: a longer one hides everything below it

const LARGEST = 2 ** 53; // beyond it figures are nonsense, and pictures of them endless loops

// Control characters, but for tab and newline, and those that turn the direction of what follows: a name that shows as
// another's is written out.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;

const number = (value) => (typeof value === "number" && Math.abs(value) <= LARGEST ? value : null);
const record = (value) => (value !== null && typeof value === "object" && !Array.isArray(value) ? value : {});
const list = (value) => (Array.isArray(value) ? value.slice(0, MAX_ITEMS) : []);
const records = (value) => list(value).map(record);
const names = (value) => list(value).map(text);
const orNull = (value, read) => (value !== null && typeof value === "object" ? read(value) : null);

function text(value) {
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  if (typeof value !== "string") return "";
  const shortened = value.length > MAX_CHARS ? `${value.slice(0, MAX_CHARS)}…` : value;
  return shortened.replace(HIDDEN, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** Amounts by category, in the order in which they came. */
function amounts(value) {
  return new Map(Object.entries(record(value)).filter(([, amount]) => number(amount) !== null));
}

/** Whether a browser has a date for it. */
function isTime(value) {
  return number(value) !== null && Math.abs(value) < LAST_TIME;
}

function readPoint(value) {
  const point = record(value);
  return {
    t: isTime(point.t) ? point.t : null,
    seconds: amounts(point.seconds),
    samplesPerS: number(point.samples_per_s),
    stepsPerS: number(point.steps_per_s),
    worldSize: number(point.world_size),
    unitsPerS: number(point.units_per_s),
    rowsPerS: number(point.rows_per_s),
    teachers: number(point.teachers),
    wanted: number(point.wanted),
    waitShare: number(point.wait_share),
  };
}

function readNode(node) {
  return {
    node: text(node.node),
    began: number(node.began),
    ranks: list(node.ranks).filter((rank) => number(rank) !== null),
    state: text(node.state),
    silentS: number(node.silent_s),
    step: number(node.step),
    stepsPerS: number(node.steps_per_s),
    samplesPerS: number(node.samples_per_s),
    goodput: number(node.goodput),
  };
}

function readEvent(event) {
  return {
    time: number(event.time) ?? number(event.at),
    kind: text(event.kind),
    node: text(event.node),
    text: text(event.text),
    cause: text(event.cause),
    job: text(event.job),
    service: text(event.service),
    decision: event.decision === true,
  };
}

function readWanted(wanted) {
  return {
    count: number(wanted.count),
    now: number(wanted.now),
    reason: text(wanted.reason),
    since: number(wanted.since),
    time: number(wanted.time),
  };
}

function readDataset(dataset) {
  const shards = record(dataset.shards);
  return {
    name: text(dataset.name),
    kind: text(dataset.kind),
    epoch: number(dataset.epoch),
    epochs: number(dataset.epochs),
    units: number(dataset.units),
    todo: number(shards.todo),
    doing: number(shards.doing),
    done: number(shards.done),
    poisonedCount: number(shards.poisoned),
    unitsPerS: number(dataset.units_per_s),
    etaS: number(dataset.eta_s),
    poisoned: records(dataset.poisoned).map((shard) => ({
      shard: number(shard.shard),
      start: number(shard.start),
      stop: number(shard.stop),
      epoch: number(shard.epoch),
      failures: records(shard.failures).map((failure) => ({
        holder: text(failure.holder),
        reason: text(failure.reason),
        time: number(failure.time),
      })),
    })),
    holders: records(dataset.holders).map((holder) => ({
      holder: text(holder.holder),
      leases: number(holder.leases),
      unitsDone: number(holder.units_done),
      unitsPerS: number(holder.units_per_s),
      seenS: number(holder.seen_s),
    })),
  };
}

function readJob(job) {
  return {
    job: text(job.job),
    state: text(job.state),
    message: text(job.message),
    generation: number(job.generation),
    worldSize: number(job.world_size),
    step: number(job.step),
    stepsPerS: number(job.steps_per_s),
    samplesPerS: number(job.samples_per_s),
    goodput: number(job.goodput),
    began: number(job.began) || null, // 0 without a ledger
    masterOnly: job.master_only === true,
    elapsedS: number(job.elapsed_s),
    seconds: amounts(job.seconds),
    nodes: records(job.nodes).map(readNode),
    leftOut: records(job.left_out).map((host) => ({ node: text(host.node), reason: text(host.reason) })),
    events: records(job.events).map(readEvent),
    history: records(job.history).map(readPoint),
    master: orNull(job.master, (master) => ({
      endpoint: text(master.endpoint),
      state: text(master.state),
      journal: text(master.journal),
      term: number(master.term),
      ageS: number(master.age_s),
      datasets: records(master.datasets).map(readDataset),
    })),
    wanted: orNull(job.wanted_workers, readWanted),
  };
}

function readService(service) {
  return {
    service: text(service.service),
    teachers: records(service.teachers).map((teacher) => ({
      id: text(teacher.id),
      endpoint: text(teacher.endpoint),
      model: text(teacher.model),
      version: text(teacher.version),
      state: text(teacher.state),
      rowsPerS: number(teacher.rows_per_s),
      queueRows: number(teacher.queue_rows),
      computeShare: number(teacher.compute_share),
      students: names(teacher.students),
    })),
    students: records(service.students).map((student) => ({
      id: text(student.id),
      job: text(student.job),
      rowsPerS: number(student.rows_per_s),
      waitShare: number(student.wait_share),
      teachers: names(student.teachers),
    })),
    wanted: orNull(service.wanted, readWanted),
    history: records(service.history).map(readPoint),
  };
}

function readWorkload(item) {
  return {
    kind: text(item.kind),
    namespace: text(item.namespace),
    name: text(item.name),
    phase: text(item.phase),
    ready: number(item.ready),
    wanted: number(item.wanted),
    least: number(item.min_replicas),
    most: number(item.max_replicas),
    scaling: text(item.scaling),
    progress: number(item.progress),
    remainingS: number(item.remaining_s),
    created: number(item.created),
    started: number(item.started),
    ended: number(item.ended),
    message: text(item.message),
    borrowed: number(item.borrowed),
    queue: text(item.queue),
    conditions: records(item.conditions).map((condition) => ({
      type: text(condition.type),
      status: text(condition.status),
      reason: text(condition.reason),
      message: text(condition.message),
      since: number(condition.since),
    })),
    members: records(item.members).map((member) => ({
      name: text(member.name),
      pod: text(member.pod),
      state: text(member.state),
      detail: text(member.detail),
      node: text(member.node),
      attempt: number(member.attempt),
      failures: amounts(member.failures),
      memoryFactor: number(member.memory_factor),
      notBefore: number(member.not_before),
      end: orNull(member.last_end, (end) => ({
        cause: text(end.cause),
        exitCode: number(end.exit_code),
        message: text(end.message),
        node: text(end.node),
      })),
    })),
  };
}

function readKubernetes(cluster) {
  return {
    namespaces: names(cluster.namespaces),
    stale: text(cluster.stale),
    looked: number(cluster.looked),
    jobs: records(cluster.jobs).map(readWorkload),
    pools: records(cluster.pools).map(readWorkload),
    moreJobs: number(cluster.more_jobs) ?? 0,
  };
}

/** Return a checked copy of what the server sent, in the page's own names. */
export function readState(sent) {
  const state = record(sent);
  return {
    time: number(state.time),
    store: text(state.store),
    stale: text(state.stale),
    job: text(state.job),
    moreJobs: number(state.more_jobs) ?? 0,
    unreadable: records(state.unreadable).map((bad) => ({ key: text(bad.key), reason: text(bad.reason) })),
    jobs: records(state.jobs).map(readJob),
    services: records(state.services).map(readService),
    kubernetes: orNull(state.kubernetes, readKubernetes),
    events: records(state.events).map(readEvent),
  };
}

/** Return two histories as one, in the order of time; a point of a time that is known already is left out. */
export function joinHistories(known, added) {
  const points = [];
  let last = -Infinity;
  for (const point of [...known, ...added]) {
    if (point.t === null || point.t <= last) continue;
    points.push(point);
    last = point.t;
  }
  return points.slice(-MAX_POINTS);
}

/** Return the state after an event: a "state" replaces what is known, an "update" adds points to its histories. */
export function applyEvent(known, kind, sent) {
  const state = readState(sent);
  const before = kind === "update" && known !== null ? known : { jobs: [], services: [] };
  const jobs = new Map(before.jobs.map((job) => [job.job, job.history]));
  const services = new Map(before.services.map((service) => [service.service, service.history]));
  for (const job of state.jobs) job.history = joinHistories(jobs.get(job.job) ?? [], job.history);
  for (const service of state.services) {
    service.history = joinHistories(services.get(service.service) ?? [], service.history);
  }
  return state;
}

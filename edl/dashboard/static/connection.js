// The stream of events: says when it stalls, and opens it again until it flows.
//
// The browser itself reconnects after a broken connection, with Last-Event-ID. It does not after an HTTP error, nor
// when a connection stays open and nothing comes: a half-open socket, a proxy that keeps what it should pass on, a
// laptop that slept. What does not belong here: what the events say.

const STALL_S = 15; // three heartbeats of 5 s: fewer would report a busy server as lost
const FIRST_RETRY_S = 1; // a server that restarts is back within seconds
const LAST_RETRY_S = 10; // a page that was left open overnight asks six times a minute
const ASK_S = 10; // how long an answer to "why" may take

const UNAUTHORIZED = 401;
const RELOAD_S = 60; // a server that refuses again must not have the page reload for ever

/** Load the page again, with which the browser asks for a token. */
function signInAgain() {
  const last = Number(sessionStorage.getItem("reloaded") ?? 0);
  if (Math.abs(Date.now() - last) < RELOAD_S * 1000) return;
  sessionStorage.setItem("reloaded", String(Date.now()));
  location.reload();
}

export class Connection {
  /**
   * `onEvent(kind, data)` gets each state, update and heartbeat, `onStatus(status, reason)` what became of the stream:
   * "connecting" before the first event, "live", or "lost" with a reason in words, which may be "".
   */
  constructor(address, stateAddress, onEvent, onStatus) {
    this._address = address;
    this._stateAddress = stateAddress;
    this._onEvent = onEvent;
    this._onStatus = onStatus;
    this._source = null;
    this._lastId = "";
    this._retryS = FIRST_RETRY_S;
    this._retryTimer = null;
    this._mark();
    setInterval(() => this._watch(), 1000);
    for (const wake of ["online", "pageshow", "resume"]) addEventListener(wake, () => this.check());
    document.addEventListener("visibilitychange", () => this.check());
    this._open();
  }

  /** Seconds since the last event. Two clocks: one may stand still in a computer that sleeps, the other may be set. */
  get silentS() {
    return Math.max(performance.now() - this._markedAt, Date.now() - this._markedDate, 0) / 1000;
  }

  /** Look at once whether the stream stalls, and try again where it waits to. */
  check() {
    if (document.visibilityState !== "visible") return;
    if (this._retryTimer !== null) this._open();
    else this._watch();
  }

  _mark() {
    this._markedAt = performance.now();
    this._markedDate = Date.now();
  }

  _open() {
    clearTimeout(this._retryTimer);
    this._retryTimer = null;
    this._source?.close();
    this._opened = performance.now();
    const address = new URL(this._address);
    // A new EventSource cannot send the header.
    if (this._lastId !== "") address.searchParams.set("last_event_id", this._lastId);
    const source = new EventSource(address);
    this._source = source;
    for (const kind of ["state", "update", "heartbeat"]) {
      source.addEventListener(kind, (event) => {
        if (source === this._source) this._receive(kind, event);
      });
    }
    source.addEventListener("error", () => {
      if (source !== this._source) return;
      this._onStatus("lost", "");
      if (source.readyState === EventSource.CLOSED) this._refused();
    });
  }

  _receive(kind, event) {
    let data;
    try {
      data = JSON.parse(event.data);
    } catch (error) {
      this._onStatus("lost", `the server sent invalid JSON (${error.message})`);
      this._lastId = "";
      this._retry();
      return;
    }
    if (event.lastEventId !== "") this._lastId = event.lastEventId;
    this._retryS = FIRST_RETRY_S;
    this._mark();
    this._onStatus("live", "");
    this._onEvent(kind, data);
  }

  _watch() {
    const waited = (performance.now() - this._opened) / 1000;
    if (this._retryTimer !== null || this.silentS < STALL_S || waited < STALL_S) return;
    this._onStatus("lost", "the server sent nothing, not even a heartbeat");
    this._lastId = "";
    this._open();
  }

  _retry() {
    this._source?.close();
    clearTimeout(this._retryTimer);
    const jitter = 0.75 + Math.random() / 2; // many pages must not come back to a server all at once
    this._retryTimer = setTimeout(() => this._open(), this._retryS * jitter * 1000);
    this._retryS = Math.min(this._retryS * 2, LAST_RETRY_S);
  }

  /** Find out why the stream was refused, which EventSource does not tell. */
  async _refused() {
    this._retry();
    try {
      const answer = await fetch(this._stateAddress, { cache: "no-store", signal: AbortSignal.timeout(ASK_S * 1000) });
      await answer.body?.cancel();
      if (answer.ok || this._retryTimer === null) return;
      this._onStatus("lost", `the server answers ${answer.status} ${answer.statusText}`.trim());
      if (answer.status === UNAUTHORIZED) signInAgain();
    } catch {
      // No answer at all: "connection lost" says it.
    }
  }
}

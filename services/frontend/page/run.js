/** @import {WatchEvent, EpochEvent, RequestEvent, IterationEvent, PoolEvent, Turn} from "./events.js" */

/** Seconds for which iterations, ended requests and figures are kept. */
export const KEPT_S = 300;
const MAX_MARKS = 100;
const MAX_KEPT_ITERATIONS = 20_000;
/** Epochs of a scheduler's term: with another term, numbers of requests begin anew. */
const EPOCHS_PER_TERM = 2 ** 20;

/**
 * @typedef {{number: number, id: string, account: string, priority: number, nPrompt: number, maxNew: number,
 *   nGenerated: number, nCached: number, turn: Turn, reason: string, since: number,
 *   turns: {t: number, turn: Turn}[], firstTokenAt: number, lastTokenAt: number}} Request
 *
 * @typedef {{t: number, kind: string, text: string}} Mark
 *
 * @typedef {{second: number, nTokens: number, nIterations: number, nSpans: number, firsts: number[],
 *   gaps: number[], nAllocated: number}} Second
 */

/**
 * A run as far as it has been told: requests, iterations and figures by the second. It knows no page and
 * no clock; what is older than `keptS` before the latest event is forgotten.
 */
export class Run {
  /** @param {number} keptS */
  constructor(keptS = KEPT_S) {
    this.keptS = keptS;
    /** @type {EpochEvent | null} */
    this.epoch = null;
    /** @type {Map<number, Request>} */
    this.requests = new Map();
    /** @type {IterationEvent[]} in the order in which they returned */
    this.iterations = [];
    /** @type {PoolEvent | null} */
    this.pool = null;
    /** @type {Mark[]} */
    this.marks = [];
    /** @type {Second[]} */
    this.seconds = [];
    /** Iterations that are known, by epoch and number: a stream that begins anew tells some twice. */
    this.known = new Set();
    this.begin = Infinity;
    this.latest = 0;
  }

  /**
   * Takes in what has happened.
   *
   * @param {WatchEvent} event
   */
  apply(event) {
    this.latest = Math.max(this.latest, event.t);
    this.begin = Math.min(this.begin, event.t);
    switch (event.type) {
      case "epoch": this.#opened(event); break;
      case "request": this.#turned(event); break;
      case "iteration": this.#ran(event); break;
      case "pool": this.pool = event; this.#counted(event); break;
      case "mark": this.mark(event.t, event.kind, event.text ?? ""); break;
    }
  }

  /**
   * Notes something that explains what is seen around it.
   *
   * @param {number} t
   * @param {string} kind
   * @param {string} text
   */
  mark(t, kind, text) {
    const isKnown = this.marks.some((mark) => mark.t === t && mark.kind === kind);
    if (isKnown) return;
    this.marks.push({ t, kind, text });
    if (this.marks.length > MAX_MARKS) this.marks.shift();
  }

  /** Forgets requests and what waits, before all is told anew; iterations stay. */
  forgetRequests() {
    for (const request of this.requests.values()) {
      if (request.turn !== "ended") this.#turn(request, this.latest, "ended");
    }
    this.pool = null;
  }

  /** Forgets what is too old. */
  prune() {
    const oldest = this.latest - this.keptS;
    const kept = this.iterations.findIndex((it) => it.sent + it.round_trip_s >= oldest);
    const n = Math.max(kept < 0 ? this.iterations.length : kept, this.iterations.length - MAX_KEPT_ITERATIONS);
    if (n > 0) this.iterations.splice(0, n).forEach((it) => this.known.delete(nameOf(it)));
    for (const [number, request] of this.requests) {
      if (request.turn === "ended" && request.since < oldest) this.requests.delete(number);
    }
    while (this.seconds.length && this.seconds[0].second < oldest) this.seconds.shift();
    while (this.marks.length && this.marks[0].t < oldest) this.marks.shift();
  }

  /** @param {EpochEvent} event */
  #opened(event) {
    const last = this.epoch;
    const isOtherTerm = last !== null
      && Math.floor(last.epoch / EPOCHS_PER_TERM) !== Math.floor(event.epoch / EPOCHS_PER_TERM);
    if (isOtherTerm) this.requests.clear();
    if (last === null || last.epoch !== event.epoch) {
      this.mark(event.t, "epoch", last === null ? `epoch ${event.epoch} serves` : `a new pipeline serves: epoch ${event.epoch}`);
    }
    this.epoch = event;
  }

  /** @param {RequestEvent} event */
  #turned(event) {
    let request = this.requests.get(event.number);
    if (request === undefined || (request.turn === "ended" && event.turn !== "ended")) {
      request = {
        number: event.number, id: "", account: "", priority: 0, nPrompt: 0, maxNew: 0, nGenerated: 0,
        nCached: 0, turn: event.turn, reason: "", since: event.t, turns: [], firstTokenAt: 0, lastTokenAt: 0,
      };
      this.requests.set(event.number, request);
    }
    request.id = event.request_id ?? request.id;
    request.account = event.account ?? request.account;
    request.priority = event.priority ?? request.priority;
    request.nPrompt = event.n_prompt_tokens ?? request.nPrompt;
    request.maxNew = event.max_new_tokens ?? request.maxNew;
    request.nGenerated = event.n_generated_tokens ?? request.nGenerated;
    request.nCached = event.n_cached_tokens ?? request.nCached;
    request.reason = event.reason ?? request.reason;
    this.#turn(request, event.t, event.turn);
  }

  /**
   * @param {Request} request
   * @param {number} t
   * @param {Turn} turn
   */
  #turn(request, t, turn) {
    if (request.turns.at(-1)?.turn === turn) return;
    request.turn = turn;
    request.since = t;
    request.turns.push({ t, turn });
  }

  /** @param {IterationEvent} event */
  #ran(event) {
    const key = nameOf(event);
    if (this.known.has(key)) return;
    this.known.add(key);
    const end = event.sent + event.round_trip_s;
    this.begin = Math.min(this.begin, event.sent);
    this.latest = Math.max(this.latest, end);
    this.iterations.push(event);
    const second = this.#second(Math.floor(end));
    second.nIterations += 1;
    second.nSpans += event.numbers.length;
    second.nAllocated = event.n_allocated_slots;
    event.numbers.forEach((number, i) => {
      const nNew = event.n_new_tokens[i];
      if (nNew === 0) return;
      second.nTokens += nNew;
      const request = this.requests.get(number);
      if (request === undefined) return;
      request.nGenerated = Math.max(request.nGenerated, nSampledBefore(event, i, request.nPrompt) + nNew);
      if (request.firstTokenAt === 0) {
        request.firstTokenAt = end;
        if (request.turns[0]?.turn === "waiting") second.firsts.push(end - request.turns[0].t);
      } else if (request.lastTokenAt > 0) {
        for (let k = 0; k < nNew; k++) second.gaps.push((end - request.lastTokenAt) / nNew);
      }
      request.lastTokenAt = end;
    });
  }

  /** @param {PoolEvent} event */
  #counted(event) {
    event.running.forEach((number, i) => {
      const request = this.requests.get(number);
      if (request) request.nGenerated = Math.max(request.nGenerated, event.n_generated_tokens[i] ?? 0);
    });
  }

  /** @param {number} second */
  #second(second) {
    const last = this.seconds.at(-1);
    if (last && last.second >= second) return this.seconds.findLast((s) => s.second <= second) ?? last;
    const made = { second, nTokens: 0, nIterations: 0, nSpans: 0, firsts: [], gaps: [], nAllocated: 0 };
    this.seconds.push(made);
    return made;
  }
}

/** @param {IterationEvent} event */
function nameOf(event) {
  return `${event.epoch}:${event.iteration}`;
}

/**
 * Returns how many tokens a request had generated before a span: those that the span runs, or all but
 * its first are drafts.
 *
 * @param {IterationEvent} event
 * @param {number} i
 * @param {number} nPrompt
 */
function nSampledBefore(event, i, nPrompt) {
  const nRun = event.kinds[i] === "d" ? 1 : event.n_tokens[i];
  return event.start_positions[i] + nRun - nPrompt;
}

import { pipelineOf } from "./events.js";

/** @import {WatchEvent, EpochEvent, RequestEvent, IterationEvent, PoolEvent, FiguresEvent, MarkEvent, Turn} from "./events.js" */

/** Seconds for which iterations, ended requests and figures are kept. */
export const KEPT_S = 300;
const MAX_MARKS = 100;
const MAX_KEPT_ITERATIONS = 20_000;

/**
 * @typedef {{number: number, request_id: string, account: string, priority: number, n_prompt_tokens: number,
 *   max_new_tokens: number, n_generated_tokens: number, n_cached_tokens: number, turn: Turn, reason: string,
 *   turns: {t: number, turn: Turn, pipeline: number}[], first_token_s: number | null, pipeline: number}} Request
 *
 * @typedef {{t: number, kind: string, text: string}} Mark
 */

/**
 * The state of the pipelines after all changes that have been applied, to be drawn. The server computes all sums.
 * The view does not depend on a page or a clock. `prune` drops what is older than `keptS` seconds before the
 * latest change.
 */
export class View {
  /** @param {number} keptS */
  constructor(keptS = KEPT_S) {
    this.keptS = keptS;
    /** @type {EpochEvent | null} the latest one */
    this.epoch = null;
    /** @type {Map<number, EpochEvent>} of the pipelines that serve, by their numbers; the last one if none does */
    this.epochs = new Map();
    /** @type {Map<number, Request>} */
    this.requests = new Map();
    /** @type {IterationEvent[]} in the order in which they were sent */
    this.iterations = [];
    /** @type {Map<number, number>} when the last one of each pipeline was sent */
    this.sent = new Map();
    /** @type {PoolEvent | null} */
    this.pool = null;
    /** @type {Mark[]} */
    this.marks = [];
    /** @type {FiguresEvent[]} one a second, the latest at the end */
    this.figures = [];
    this.latest = 0;
  }

  /**
   * Applies a change. A change that is known already, since a stream has begun again, has no effect.
   *
   * @param {WatchEvent} event
   */
  apply(event) {
    this.latest = Math.max(this.latest, event.t);
    switch (event.type) {
      case "epoch": this.#begin(event); break;
      case "request": this.#turn(event); break;
      case "iteration": this.#run(event); break;
      case "pool": this.#stand(event); break;
      case "mark": this.#note(event); break;
      case "figures": if (event.t > (this.figures.at(-1)?.t ?? 0)) this.figures.push(event); break;
    }
  }

  /**
   * Adds a mark: an event that explains what the timeline shows around it. An epoch gets only one mark.
   *
   * @param {number} t
   * @param {string} kind
   * @param {string} text
   */
  mark(t, kind, text) {
    const isKnown = this.marks.some((mark) => mark.kind === kind && mark.text === text && (kind === "epoch" || mark.t === t));
    if (isKnown) return;
    this.marks.push({ t, kind, text });
    if (this.marks.length > MAX_MARKS) this.marks.shift();
  }

  /** @returns {EpochEvent[]} the epochs of the pipelines that serve, in the order of their numbers */
  get pipelines() {
    return [...this.epochs.values()].sort((a, b) => pipelineOf(a) - pipelineOf(b));
  }

  /** Drops all requests and pipelines, which the server sends again now. Iterations, marks and figures are kept. */
  forgetState() {
    this.requests.clear();
    this.epochs.clear();
    this.pool = null;
  }

  /** Drops iterations, ended requests, figures and marks that are too old. */
  prune() {
    const oldest = this.latest - this.keptS;
    const kept = this.iterations.findIndex((it) => it.sent + it.round_trip_s >= oldest);
    const n = Math.max(kept < 0 ? this.iterations.length : kept, this.iterations.length - MAX_KEPT_ITERATIONS);
    if (n > 0) this.iterations.splice(0, n);
    for (const [number, request] of this.requests) {
      if (request.turn === "ended" && sinceOf(request) < oldest) this.requests.delete(number);
    }
    while (this.figures.length && this.figures[0].t < oldest) this.figures.shift();
    while (this.marks.length && this.marks[0].t < oldest) this.marks.shift();
  }

  /** @param {EpochEvent} event */
  #begin(event) {
    if (this.epoch !== null && this.epoch.term !== event.term) {
      this.requests.clear();
      this.epochs.clear();
    }
    this.epoch = event;
    this.epochs.set(pipelineOf(event), event);
    this.mark(event.t, "epoch", event.text);
  }

  /**
   * Adds a mark. If the mark says that a pipeline no longer serves, drops the pipeline, unless no other one serves.
   *
   * @param {MarkEvent} event
   */
  #note(event) {
    this.mark(event.t, event.kind, event.text ?? "");
    if (event.kind !== "lost" && event.kind !== "left") return;
    for (const [pipeline, { epoch }] of this.epochs) {
      if (epoch === event.epoch && this.epochs.size > 1) this.epochs.delete(pipeline);
    }
  }

  /** @param {PoolEvent} event */
  #stand(event) {
    this.pool = event;
    this.#count(event.running, event.n_generated);
    event.pipelines?.forEach((pipeline, i) => {
      const request = this.requests.get(event.running[i]);
      if (request) request.pipeline = pipeline;
    });
  }

  /** @param {RequestEvent} event */
  #turn({ t, type: _, ...fields }) {
    const request = this.requests.get(fields.number) ?? {
      number: fields.number, request_id: "", account: "", priority: 0, n_prompt_tokens: 0, max_new_tokens: 0,
      n_generated_tokens: 0, n_cached_tokens: 0, turn: fields.turn, reason: "", turns: [], first_token_s: null, pipeline: 0,
    };
    this.requests.set(fields.number, Object.assign(request, fields));
    if (request.turns.at(-1)?.turn !== fields.turn) request.turns.push({ t, turn: fields.turn, pipeline: pipelineOf(fields) });
  }

  /** @param {IterationEvent} event */
  #run(event) {
    if (event.sent <= (this.sent.get(pipelineOf(event)) ?? 0)) return;
    this.sent.set(pipelineOf(event), event.sent);
    let place = this.iterations.length;
    while (place > 0 && this.iterations[place - 1].sent > event.sent) place -= 1;
    this.iterations.splice(place, 0, event);
    this.#count(event.numbers, event.n_generated);
    for (const [number, seconds] of event.first_tokens) {
      const request = this.requests.get(number);
      if (request) request.first_token_s = seconds;
    }
  }

  /**
   * @param {number[]} numbers
   * @param {number[]} nGenerated
   */
  #count(numbers, nGenerated) {
    numbers.forEach((number, i) => {
      const request = this.requests.get(number);
      if (request) request.n_generated_tokens = nGenerated[i];
    });
  }
}

/**
 * Returns the numbers of the pipelines that have admitted a request, in order and without immediate repetitions.
 *
 * @param {Request} request
 * @returns {number[]}
 */
export function pipelinesOf(request) {
  const admissions = request.turns.filter(({ turn }) => turn === "admitted").map(({ pipeline }) => pipeline);
  return admissions.filter((pipeline, i) => i === 0 || pipeline !== admissions[i - 1]);
}

/**
 * Returns whether a request is for the vector of its prompt, and gets no tokens.
 *
 * @param {Request} request
 */
export function wantsVector(request) {
  return request.n_prompt_tokens > 0 && !request.max_new_tokens;
}

/**
 * Returns the time at which a request entered its present state.
 *
 * @param {Request} request
 * @returns {number}
 */
export function sinceOf(request) {
  return request.turns[request.turns.length - 1].t;
}

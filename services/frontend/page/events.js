/**
 * What the scheduler tells those who watch it, as `services/common/watch_json.py` writes it. Times are
 * seconds since 1970.
 *
 * @typedef {{t: number, type: "epoch", epoch: number, model: string, n_stages: number, tp_size: number,
 *   n_slots: number, block_size: number, max_batch_size: number, max_batch_tokens: number,
 *   pipeline_depth: number, policy: string, order: string, admission: string,
 *   max_requests: number}} EpochEvent
 *
 * @typedef {{t: number, type: "request", number: number, turn: Turn, request_id?: string,
 *   n_prompt_tokens?: number, max_new_tokens?: number, n_generated_tokens?: number,
 *   n_cached_tokens?: number, priority?: number, account?: string, reason?: string}} RequestEvent
 *
 * @typedef {"waiting" | "admitted" | "put_down" | "suspended" | "ended"} Turn
 *
 * @typedef {{t: number, type: "iteration", epoch: number, iteration: number, sent: number,
 *   round_trip_s: number, numbers: number[], start_positions: number[], n_tokens: number[],
 *   kinds: string, n_new_tokens: number[], ended: number[], n_in_flight: number, n_waiting: number,
 *   n_running: number, n_reserved_slots: number, n_allocated_slots: number, n_shared_slots: number,
 *   n_cached_slots: number, stages: [number, number, number, number][]}} IterationEvent
 *
 * @typedef {{account: string, weight: number, counter: number, n_waiting: number,
 *   n_running: number}} Account
 *
 * @typedef {{t: number, type: "pool", waiting: number[], n_waiting: number, running: number[],
 *   n_generated_tokens: number[], accounts: Account[]}} PoolEvent
 *
 * @typedef {{t: number, type: "mark", kind: string, epoch?: number, text?: string,
 *   numbers?: number[]}} MarkEvent
 *
 * @typedef {EpochEvent | RequestEvent | IterationEvent | PoolEvent | MarkEvent} WatchEvent
 *
 * What the frontend adds: events were left out, and the state follows anew; the scheduler is away, or
 * here again. A recording begins with a header and may have an end and decisions.
 *
 * @typedef {{type: "gap"} | {type: "away", text?: string} | {type: "here"}} FeedEvent
 *
 * @typedef {WatchEvent | FeedEvent | {type: "recording", version: number, orcinus: string}
 *   | {type: "end", text?: string} | {type: "decision"}} AnyEvent
 */

const SHOWN = new Set(["epoch", "request", "iteration", "pool", "mark"]);

/**
 * Tells whether an event is one of the scheduler's that a page shows.
 *
 * @param {AnyEvent} event
 * @returns {event is WatchEvent}
 */
export function isShown(event) {
  return SHOWN.has(event.type);
}

/**
 * The changes of the view that a frontend sends to its viewers, as `services/common/watch_view.py` makes
 * them. Times are seconds since 1970.
 *
 * @typedef {{t: number, type: "epoch", epoch: number, term: number, text: string, model: string, n_stages: number, tp_size: number,
 *   n_slots: number, block_size: number, max_batch_size: number, max_batch_tokens: number,
 *   pipeline_depth: number, policy: string, order: string, admission: string,
 *   max_requests: number, pipeline?: number, is_draining?: boolean}} EpochEvent
 *
 * @typedef {{t: number, type: "request", number: number, turn: Turn, request_id?: string,
 *   n_prompt_tokens?: number, max_new_tokens?: number, n_generated_tokens?: number,
 *   n_cached_tokens?: number, priority?: number, account?: string, reason?: string,
 *   pipeline?: number}} RequestEvent
 *
 * @typedef {"waiting" | "admitted" | "put_down" | "suspended" | "ended"} Turn
 *
 * @typedef {{t: number, type: "iteration", epoch: number, iteration: number, sent: number,
 *   round_trip_s: number, numbers: number[], start_positions: number[], n_tokens: number[],
 *   kinds: string, n_new_tokens: number[], ended: number[], n_in_flight: number, n_waiting: number,
 *   n_running: number, stages: [number, number, number, number][], n_generated: number[],
 *   first_tokens: [number, number][], memory: Memory, pipeline?: number}} IterationEvent
 *
 * @typedef {{used: number, shared: number, reserved: number, cached: number, free: number}} Memory
 *
 * @typedef {{account: string, weight: number, counter: number, n_waiting: number,
 *   n_running: number}} Account
 *
 * @typedef {{t: number, type: "pool", waiting: number[], n_waiting: number, running: number[],
 *   n_generated: number[], pipelines?: number[], accounts: Account[]}} PoolEvent
 *
 * @typedef {{t: number, type: "mark", kind: string, epoch?: number, text?: string,
 *   numbers?: number[]}} MarkEvent
 *
 * @typedef {{tokens_per_s: number, iterations_per_s: number, batch_size: number,
 *   first_token_s: number | null, first_token_p90_s: number | null, token_gap_s: number | null,
 *   token_gap_p90_s: number | null, n_allocated_slots: number}} Figures
 *
 * @typedef {{t: number, type: "figures", minute: Figures, recent: Figures}} FiguresEvent
 *
 * @typedef {EpochEvent | RequestEvent | IterationEvent | PoolEvent | MarkEvent | FiguresEvent} WatchEvent
 *
 * Events about the stream. `gap`: changes are missing, and the whole view follows. `away`: no scheduler is watched.
 * `here`: a scheduler is watched, and the whole view follows. A recording begins with an event `recording`, and
 * may have an event `end` and decisions.
 *
 * @typedef {{type: "gap"} | {type: "away", text?: string} | {type: "here"}} FeedEvent
 *
 * @typedef {WatchEvent | FeedEvent | {type: "recording", version: number, orcinus: string}
 *   | {type: "end", text?: string} | {type: "decision"}} AnyEvent
 */

const SHOWN = new Set(["epoch", "request", "iteration", "pool", "mark", "figures"]);

/**
 * Returns the number of the pipeline that an event is about. The number is 0 for events without one, such as
 * events in recordings of a single pipeline.
 *
 * @param {{pipeline?: number}} event
 * @returns {number}
 */
export function pipelineOf(event) {
  return event.pipeline ?? 0;
}

/**
 * Returns whether an event is a change of the view that the page shows.
 *
 * @param {AnyEvent} event
 * @returns {event is WatchEvent}
 */
export function isShown(event) {
  return SHOWN.has(event.type);
}

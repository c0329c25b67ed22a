import { spanWords, tag } from "./details.js";
import { pipelineOf } from "./events.js";
import { html, svg } from "/page/vendor/lit-html.js";
import { wantsVector } from "./view.js";
import { TURN_WORDS, count, duration, plural } from "./words.js";

/** @import {View, Request} from "./view.js" */
/** @import {Figures, EpochEvent, IterationEvent} from "./events.js" */

/** Number of points of a line over the last five minutes, and the seconds between two points. */
const N_POINTS = 60;
const POINT_S = 5;
/** Seconds by which figures may be late. If none come for longer, the line moves on. */
const FIGURES_LAG_S = 2;
const MAX_ROWS = 60;
const MAX_ITERATIONS = 40;

/**
 * Returns the panels under the timeline: figures, memory, pool, accounts, marks and iterations.
 *
 * @param {View} view
 * @param {number} now the time at which the lines of the last minutes end
 */
export function panels(view, now) {
  return html`
    <section class="card wide"><h2>The last minute <small class="quiet">and lines of the last five</small></h2>${figures(view, now)}</section>
    <section class="card"><h2>K/V memory</h2>${memory(view)}</section>
    <section class="card double"><h2>Pool, in its order</h2>${pool(view)}</section>
    ${view.pool?.accounts.length ? html`<section class="card"><h2>Accounts</h2>${accounts(view)}</section>` : ""}
    <section class="card"><h2>Marks</h2>${marks(view)}</section>
    <section class="card wide"><details><summary><strong>Iterations as a table</strong></summary>${iterations(view)}</details></section>`;
}

/**
 * @param {View} view
 * @param {number} now
 */
function figures(view, now) {
  const of = view.figures.at(-1)?.minute;
  const line = (/** @type {(of: Figures) => number} */ value) => sparkline(view, now, value);
  const last = view.iterations.at(-1);
  const seconds = (/** @type {number | null | undefined} */ s) => duration(s ?? NaN);
  return html`<dl class="figures">
    ${figure("Tokens per second", count(of?.tokens_per_s ?? 0), "", line((f) => f.tokens_per_s))}
    ${figure("Iterations per second", count(of?.iterations_per_s ?? 0), "", line((f) => f.iterations_per_s))}
    ${figure("Requests in a batch", count(of?.batch_size ?? 0), `of at most ${view.epoch?.max_batch_size ?? "–"}`, line((f) => f.batch_size))}
    ${figure("First token, median", seconds(of?.first_token_s), `p90 ${seconds(of?.first_token_p90_s)}`, line((f) => f.first_token_s ?? 0))}
    ${figure("Between tokens, median", seconds(of?.token_gap_s), `p90 ${seconds(of?.token_gap_p90_s)}`, line((f) => f.token_gap_s ?? 0))}
    ${figure("Run, wait", `${count(view.pool?.running.length ?? last?.n_running ?? 0)}, ${count(view.pool?.n_waiting ?? last?.n_waiting ?? 0)}`,
      `of at most ${count(view.epoch?.max_requests ?? 0)}`, line((f) => f.n_allocated_slots))}
  </dl>`;
}

/**
 * @param {string} name
 * @param {string} value
 * @param {string} more
 * @param {unknown} line
 */
function figure(name, value, more, line) {
  return html`<div><dt>${name}</dt><dd>${value} <small>${more}</small>${line}</dd></div>`;
}

/**
 * Returns a line of a figure over the last minutes, with a point for every few seconds, as SVG.
 *
 * @param {View} view
 * @param {number} now
 * @param {(of: Figures) => number} value
 */
function sparkline(view, now, value) {
  const end = Math.max(view.figures.at(-1)?.t ?? 0, Math.floor(now) - FIGURES_LAG_S);
  const known = new Map(view.figures.map(({ t, recent }) => [t, recent]));
  const values = Array.from({ length: N_POINTS }, (_, i) => {
    const recent = known.get(end - (N_POINTS - 1 - i) * POINT_S);
    return recent ? value(recent) : 0;
  });
  const most = Math.max(...values, 1e-9);
  const path = values.map((v, i) => `${i ? "L" : "M"}${i} ${(24 - (22 * v) / most).toFixed(1)}`).join("");
  return html`<svg viewBox="0 0 ${N_POINTS - 1} 26" preserveAspectRatio="none" aria-hidden="true">${svg`<path d=${path}></path>`}</svg>`;
}

/** @param {View} view */
function memory(view) {
  if (view.epochs.size > 1) {
    return view.pipelines.map((epoch) => html`<h3>Pipeline ${pipelineOf(epoch)}</h3>
      ${memoryOf(epoch, view.iterations.findLast((it) => pipelineOf(it) === pipelineOf(epoch)))}`);
  }
  return memoryOf(view.epoch, view.iterations.at(-1));
}

/**
 * @param {EpochEvent | null} epoch of a pipeline
 * @param {IterationEvent | undefined} last iteration of the pipeline
 */
function memoryOf(epoch, last) {
  const total = epoch?.n_slots ?? 0;
  if (!last || total === 0) return html`<p class="quiet">Nothing has run yet.</p>`;
  const { used, shared, reserved, cached, free } = last.memory;
  const all = /** @type {[string, string, number][]} */ ([
    ["used", "used by one request", used],
    ["shared", "shared by requests", shared],
    ["reserved", "reserved, not used yet", reserved],
    ["cached", "kept for those that begin alike", cached],
    ["free", "free", free],
  ]);
  const words = all.map(([, name, n]) => `${count(n)} ${name}`).join(", ");
  return html`
    <div class="memory" role="img" aria-label=${`K/V slots: ${words}`}>
      ${all.map(([name, , n]) => html`<span class=${name} .style=${`flex:${n}`}></span>`)}
    </div>
    <dl class="key">${all.map(([name, text, n]) => html`
      <dt><span class="swatch ${name}"></span></dt><dt>${text}</dt><dd>${count(n)}</dd>`)}
    </dl>
    <p class="quiet">${count(total)} slots of one token, in blocks of ${epoch?.block_size}.</p>`;
}

/** @param {View} view */
function pool(view) {
  const numbers = view.pool ? [...view.pool.running, ...view.pool.waiting] : [...view.requests.values()].filter((r) => r.turn !== "ended").map((r) => r.number);
  if (numbers.length === 0) return html`<p class="quiet">No request is in the pool.</p>`;
  const shown = numbers.slice(0, MAX_ROWS);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Requests in the pool"><table>
    <thead><tr><th>Request</th><th>State</th><th class="number">Prompt</th><th class="number">Generated</th><th class="number">Priority</th><th>Account</th><th>Name</th></tr></thead>
    <tbody>${shown.map((number) => poolRow(number, view.requests.get(number), view.epochs.size > 1))}</tbody>
  </table></div>
  ${numbers.length > shown.length ? html`<p class="quiet">and ${count(numbers.length - shown.length)} more</p>` : ""}`;
}

/**
 * @param {number} number
 * @param {Request | undefined} request
 * @param {boolean} areSeveral whether several pipelines serve
 */
function poolRow(number, request, areSeveral) {
  if (!request) return html`<tr><td>${tag(number)}</td><td colspan="6"></td></tr>`;
  return html`<tr><td>${tag(number)}</td><td>${TURN_WORDS[request.turn]}${areSeveral && request.turn === "admitted" ? ` in pipeline ${request.pipeline}` : ""}</td>
    <td class="number">${count(request.n_prompt_tokens)}${request.n_cached_tokens ? ` (${count(request.n_cached_tokens)} cached)` : ""}</td>
    <td class="number">${wantsVector(request) ? "vector" : `${count(request.n_generated_tokens)} / ${count(request.max_new_tokens)}`}</td>
    <td class="number">${request.priority}</td><td>${request.account || "–"}</td>
    <td class="mono">${request.request_id}</td></tr>`;
}

/** @param {View} view */
function accounts(view) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Accounts"><table>
    <thead><tr><th>Account</th><th class="number">Weight</th><th class="number">Virtual counter</th><th class="number">Run</th><th class="number">Wait</th></tr></thead>
    <tbody>${view.pool?.accounts.map((a) => html`<tr><td>${a.account || "no key"}</td><td class="number">${count(a.weight)}</td>
      <td class="number">${count(a.counter)}</td><td class="number">${a.n_running}</td><td class="number">${a.n_waiting}</td></tr>`)}</tbody>
  </table></div><p class="quiet">The account with the lowest counter comes next.</p>`;
}

/** @param {View} view */
function marks(view) {
  if (view.marks.length === 0) return html`<p class="quiet">Nothing unusual.</p>`;
  return html`<ol class="marks">${view.marks.toReversed().slice(0, 12).map((mark) => html`
    <li class=${mark.kind}><time>${new Date(mark.t * 1000).toTimeString().slice(0, 8)}</time>
      <strong>${mark.kind}</strong> ${mark.text}</li>`)}</ol>`;
}

/** @param {View} view */
function iterations(view) {
  const areSeveral = view.epochs.size > 1;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Iterations"><table>
    <thead><tr>${areSeveral ? html`<th class="number">Pipeline</th>` : ""}<th class="number">Iteration</th><th class="number">Took</th><th class="number">Tokens</th><th>Requests</th></tr></thead>
    <tbody>${view.iterations.slice(-MAX_ITERATIONS).toReversed().map((it) => html`
      <tr>${areSeveral ? html`<td class="number">${pipelineOf(it)}</td>` : ""}<td class="number">${it.iteration}</td><td class="number">${duration(it.round_trip_s)}</td>
        <td class="number">${count(it.n_tokens.reduce((a, b) => a + b, 0))}</td>
        <td>${it.numbers.map((number, i) => html`${tag(number)} ${spanWords(it, i)}; `)}</td></tr>`)}</tbody>
  </table></div><p class="quiet">${plural(view.iterations.length, "iteration")} kept.</p>`;
}

import { spanWords, tag } from "./details.js";
import { html, svg } from "/page/vendor/lit-html.js";
import { TURN_WORDS, count, duration, plural, quantile } from "./words.js";

/** @import {Run, Request, Second} from "./run.js" */

const MINUTE_S = 60;
/** Points of a line of the last five minutes, and the seconds of each. */
const N_POINTS = 60;
const POINT_S = 5;
const MAX_ROWS = 60;
const MAX_ITERATIONS = 40;

/**
 * Returns the panels under the timeline: figures, memory, pool, accounts, marks and iterations.
 *
 * @param {Run} run
 * @param {number} now the time at which the last minute ends
 */
export function panels(run, now) {
  return html`
    <section class="card wide"><h2>The last minute <small class="quiet">and lines of the last five</small></h2>${figures(run, now)}</section>
    <section class="card"><h2>K/V memory</h2>${memory(run)}</section>
    <section class="card double"><h2>Pool, in its order</h2>${pool(run)}</section>
    ${run.pool?.accounts.length ? html`<section class="card"><h2>Accounts</h2>${accounts(run)}</section>` : ""}
    <section class="card"><h2>Marks</h2>${marks(run)}</section>
    <section class="card wide"><details><summary><strong>Iterations as a table</strong></summary>${iterations(run)}</details></section>`;
}

/**
 * @param {Run} run
 * @param {number} now
 */
function figures(run, now) {
  const end = Math.floor(now);
  const begin = Math.max(Math.floor(run.begin), end - MINUTE_S);
  const seconds = run.seconds.filter((s) => s.second >= begin);
  const whole = seconds.filter((s) => s.second < end);
  const sum = (/** @type {(s: Second) => number} */ of) => whole.reduce((total, s) => total + of(s), 0);
  const span = Math.max(1, end - begin);
  const firsts = seconds.flatMap((s) => s.firsts);
  const gaps = seconds.flatMap((s) => s.gaps);
  const line = (/** @type {(s: Second) => number} */ of) => sparkline(run, end, of);
  const last = run.iterations.at(-1);
  return html`<dl class="figures">
    ${figure("Tokens per second", count(sum((s) => s.nTokens) / span), "", line((s) => s.nTokens))}
    ${figure("Iterations per second", count(sum((s) => s.nIterations) / span), "", line((s) => s.nIterations))}
    ${figure("Requests in a batch", count(sum((s) => s.nSpans) / Math.max(1, sum((s) => s.nIterations))),
      `of at most ${run.epoch?.max_batch_size ?? "–"}`, line((s) => s.nSpans / Math.max(1, s.nIterations)))}
    ${figure("First token, median", duration(quantile(firsts, 0.5)), `p90 ${duration(quantile(firsts, 0.9))}`, line((s) => quantile(s.firsts, 0.5) || 0))}
    ${figure("Between tokens, median", duration(quantile(gaps, 0.5)), `p90 ${duration(quantile(gaps, 0.9))}`, line((s) => quantile(s.gaps, 0.5) || 0))}
    ${figure("Run, wait", `${count(run.pool?.running.length ?? last?.n_running ?? 0)}, ${count(run.pool?.n_waiting ?? last?.n_waiting ?? 0)}`,
      `of at most ${count(run.epoch?.max_requests ?? 0)}`, line((s) => s.nAllocated))}
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
 * Returns a line of the last minutes, with a point for every few seconds.
 *
 * @param {Run} run
 * @param {number} end
 * @param {(second: Second) => number} of
 */
function sparkline(run, end, of) {
  /** @type {Second[][]} */
  const parts = Array.from({ length: N_POINTS }, () => []);
  for (const second of run.seconds) {
    const part = N_POINTS - 1 - Math.floor((end - 1 - second.second) / POINT_S);
    parts[part]?.push(second);
  }
  const values = parts.map((part) => (part.length ? of(joined(part)) : 0));
  const most = Math.max(...values, 1e-9);
  const path = values.map((v, i) => `${i ? "L" : "M"}${i} ${(24 - (22 * v) / most).toFixed(1)}`).join("");
  return html`<svg viewBox="0 0 ${N_POINTS - 1} 26" preserveAspectRatio="none" aria-hidden="true">${svg`<path d=${path}></path>`}</svg>`;
}

/**
 * Returns several seconds as if they were one.
 *
 * @param {Second[]} seconds at least one
 * @returns {Second}
 */
function joined(seconds) {
  const sum = (/** @type {(s: Second) => number} */ of) => seconds.reduce((total, s) => total + of(s), 0);
  return {
    second: seconds[0].second,
    nTokens: sum((s) => s.nTokens), nIterations: sum((s) => s.nIterations), nSpans: sum((s) => s.nSpans),
    firsts: seconds.flatMap((s) => s.firsts), gaps: seconds.flatMap((s) => s.gaps),
    nAllocated: Math.max(...seconds.map((s) => s.nAllocated)),
  };
}

/** @param {Run} run */
function memory(run) {
  const last = run.iterations.at(-1);
  const total = run.epoch?.n_slots ?? 0;
  if (!last || total === 0) return html`<p class="quiet">Nothing has run yet.</p>`;
  const shared = Math.min(last.n_shared_slots, last.n_allocated_slots);
  const parts = /** @type {[string, string, number][]} */ ([
    ["private", "used by one request", last.n_allocated_slots - shared],
    ["shared", "shared by requests", shared],
    ["promised", "reserved, not used yet", Math.max(0, last.n_reserved_slots - last.n_allocated_slots)],
    ["cached", "kept for those that begin alike", last.n_cached_slots],
  ]);
  const free = Math.max(0, total - parts.reduce((sum, [, , n]) => sum + n, 0));
  const all = [...parts, /** @type {[string, string, number]} */ (["free", "free", free])];
  const words = all.map(([, name, n]) => `${count(n)} ${name}`).join(", ");
  return html`
    <div class="memory" role="img" aria-label=${`K/V slots: ${words}`}>
      ${all.map(([name, , n]) => html`<span class=${name} .style=${`flex:${n}`}></span>`)}
    </div>
    <dl class="key">${all.map(([name, text, n]) => html`
      <dt><span class="swatch ${name}"></span></dt><dt>${text}</dt><dd>${count(n)}</dd>`)}
    </dl>
    <p class="quiet">${count(total)} slots of one token, in blocks of ${run.epoch?.block_size}.</p>`;
}

/** @param {Run} run */
function pool(run) {
  const numbers = run.pool ? [...run.pool.running, ...run.pool.waiting] : [...run.requests.values()].filter((r) => r.turn !== "ended").map((r) => r.number);
  if (numbers.length === 0) return html`<p class="quiet">No request is in the pool.</p>`;
  const shown = numbers.slice(0, MAX_ROWS);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Requests in the pool"><table>
    <thead><tr><th>Request</th><th>State</th><th class="number">Prompt</th><th class="number">Generated</th><th class="number">Priority</th><th>Account</th><th>Name</th></tr></thead>
    <tbody>${shown.map((number) => poolRow(number, run.requests.get(number)))}</tbody>
  </table></div>
  ${numbers.length > shown.length ? html`<p class="quiet">and ${count(numbers.length - shown.length)} more</p>` : ""}`;
}

/**
 * @param {number} number
 * @param {Request | undefined} request
 */
function poolRow(number, request) {
  if (!request) return html`<tr><td>${tag(number)}</td><td colspan="6"></td></tr>`;
  return html`<tr><td>${tag(number)}</td><td>${TURN_WORDS[request.turn]}</td>
    <td class="number">${count(request.nPrompt)}${request.nCached ? ` (${count(request.nCached)} cached)` : ""}</td>
    <td class="number">${count(request.nGenerated)} / ${count(request.maxNew)}</td>
    <td class="number">${request.priority}</td><td>${request.account || "–"}</td>
    <td class="mono">${request.id}</td></tr>`;
}

/** @param {Run} run */
function accounts(run) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Accounts"><table>
    <thead><tr><th>Account</th><th class="number">Weight</th><th class="number">Virtual counter</th><th class="number">Run</th><th class="number">Wait</th></tr></thead>
    <tbody>${run.pool?.accounts.map((a) => html`<tr><td>${a.account || "no key"}</td><td class="number">${count(a.weight)}</td>
      <td class="number">${count(a.counter)}</td><td class="number">${a.n_running}</td><td class="number">${a.n_waiting}</td></tr>`)}</tbody>
  </table></div><p class="quiet">Who has the least comes next.</p>`;
}

/** @param {Run} run */
function marks(run) {
  if (run.marks.length === 0) return html`<p class="quiet">Nothing unusual.</p>`;
  return html`<ol class="marks">${run.marks.toReversed().slice(0, 12).map((mark) => html`
    <li class=${mark.kind}><time>${new Date(mark.t * 1000).toTimeString().slice(0, 8)}</time>
      <strong>${mark.kind}</strong> ${mark.text}</li>`)}</ol>`;
}

/** @param {Run} run */
function iterations(run) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Iterations"><table>
    <thead><tr><th class="number">Iteration</th><th class="number">Took</th><th class="number">Tokens</th><th>Requests</th></tr></thead>
    <tbody>${run.iterations.slice(-MAX_ITERATIONS).toReversed().map((it) => html`
      <tr><td class="number">${it.iteration}</td><td class="number">${duration(it.round_trip_s)}</td>
        <td class="number">${count(it.n_tokens.reduce((a, b) => a + b, 0))}</td>
        <td>${it.numbers.map((number, i) => html`${tag(number)} ${spanWords(it, i)}; `)}</td></tr>`)}</tbody>
  </table></div><p class="quiet">${plural(run.iterations.length, "iteration")} kept.</p>`;
}

import { colourOf } from "./colours.js";
import { pipelineOf } from "./events.js";
import { html } from "/page/vendor/lit-html.js";
import { pipelinesOf, wantsVector } from "./view.js";
import { KIND_WORDS, TURN_WORDS, count, duration, plural } from "./words.js";

/** @import {View, Request} from "./view.js" */
/** @import {IterationEvent} from "./events.js" */

/**
 * Returns the number of a request and a swatch of its colour, as HTML.
 *
 * @param {number} number
 */
export function tag(number) {
  return html`<span class="swatch" .style=${`background:${colourOf(number)}`}></span>#${number}`;
}

/**
 * Returns the requests, tokens and times of an iteration as HTML, for a tip or a panel.
 *
 * @param {IterationEvent} iteration
 * @param {View} view
 * @param {number} span the index of the span under the pointer, or -1
 */
export function iterationDetails(iteration, view, span = -1) {
  const nTokens = iteration.n_tokens.reduce((sum, n) => sum + n, 0);
  const request = span < 0 ? undefined : view.requests.get(iteration.numbers[span]);
  return html`
    <strong>Iteration ${count(iteration.iteration)}</strong>
    <span class="quiet">of ${view.epochs.size > 1 ? `pipeline ${pipelineOf(iteration)}, ` : ""}epoch ${iteration.epoch}, ${duration(iteration.round_trip_s)} in all</span>
    <div>${plural(iteration.numbers.length, "request")}, ${plural(nTokens, "token")};
      ${plural(iteration.n_in_flight, "batch").replace(/s$/, "es")} in flight</div>
    ${span < 0 ? "" : html`<div><strong>${tag(iteration.numbers[span])}</strong> ${spanWords(iteration, span)}
      ${request ? requestWords(request) : ""}</div>`}
    <table>
      <thead><tr><th>Stage</th><th class="number">waits</th><th class="number">computes</th><th class="number">sends</th></tr></thead>
      <tbody>${iteration.stages.map(([, receive, compute, send], stage) => html`
        <tr><td>${stage}</td><td class="number">${duration(receive)}</td>
          <td class="number">${duration(compute)}</td><td class="number">${duration(send)}</td></tr>`)}
      </tbody>
    </table>`;
}

/**
 * Returns what a span computed, in words.
 *
 * @param {IterationEvent} iteration
 * @param {number} i
 * @returns {string}
 */
export function spanWords(iteration, i) {
  const kind = KIND_WORDS[iteration.kinds[i]] ?? "runs";
  const n = iteration.n_tokens[i];
  const drafts = iteration.kinds[i] === "d" && n > 1 ? `, ${plural(n - 1, "draft")}, ${iteration.n_new_tokens[i]} new` : "";
  const end = iteration.ended.includes(i) ? ", ends" : "";
  return iteration.kinds[i] === "d"
    ? `${kind} at position ${iteration.start_positions[i]}${drafts}${end}`
    : `${kind} of ${plural(n, "token")} from ${iteration.start_positions[i]}${end}`;
}

/** @param {Request} request */
function requestWords(request) {
  const cached = request.n_cached_tokens ? `, ${count(request.n_cached_tokens)} of them cached` : "";
  const generated = wantsVector(request)
    ? "for a vector"
    : `${count(request.n_generated_tokens)} of at most ${count(request.max_new_tokens)} generated`;
  return html`<div class="quiet">${request.request_id ? html`<span class="mono">${request.request_id}</span>, ` : ""}
    ${TURN_WORDS[request.turn]}${request.reason ? ` (${request.reason})` : ""}:
    ${plural(request.n_prompt_tokens, "prompt token")}${cached}, ${generated}${movesWords(request)}</div>`;
}

/**
 * Returns the pipelines that have run a request, in words. The text is empty if only one pipeline has run it.
 *
 * @param {Request} request
 * @returns {string}
 */
function movesWords(request) {
  const pipelines = pipelinesOf(request);
  return pipelines.length > 1 ? `; ran in pipeline ${pipelines.join(", then ")}` : "";
}

/**
 * Returns a duration as a text with a suitable unit, such as `12.0 ms`.
 *
 * @param {number} seconds
 * @returns {string}
 */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : seconds < 0.1 ? 1 : 0)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

/**
 * Returns a number as a text with separated thousands.
 *
 * @param {number} n
 * @returns {string}
 */
export function count(n) {
  return n.toLocaleString("en-GB", { maximumFractionDigits: n < 10 ? 1 : 0 });
}

/**
 * Returns a number and a noun, with an s unless the number is one: `3 requests`.
 *
 * @param {number} n
 * @param {string} noun
 * @returns {string}
 */
export function plural(n, noun) {
  return `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
}

/**
 * Returns the value below which the fraction `part` of the values lies; NaN if there are no values.
 *
 * @param {number[]} values
 * @param {number} part
 * @returns {number}
 */
export function quantile(values, part) {
  if (values.length === 0) return NaN;
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))];
}

/** Names of the kinds of spans. */
export const KIND_WORDS = /** @type {Record<string, string>} */ ({
  p: "prefill", d: "decode", r: "recomputation",
});

/** Names of a request's turns (changes of state). */
export const TURN_WORDS = /** @type {Record<string, string>} */ ({
  waiting: "waits", admitted: "runs", put_down: "preempted", suspended: "suspended", ended: "ended",
});

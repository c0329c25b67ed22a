import { isShown } from "./events.js";
import { View } from "./view.js";

/** @import {AnyEvent, WatchEvent} from "./events.js" */

/** Version of the format of recordings, which is in the first line of each recording. */
const VERSION = 2;

/**
 * Reads a recording: an event per line.
 *
 * @param {string} text
 * @returns {WatchEvent[]}
 * @throws {Error} the text is not a recording; the message says what is wrong.
 */
export function parse(text) {
  const lines = text.split("\n").filter((line) => line.trim());
  /** @type {AnyEvent[]} */
  const events = lines.map((line, i) => {
    try {
      return JSON.parse(line);
    } catch {
      if (i === lines.length - 1) return { type: "end" }; // cut in the middle of its last line
      throw new Error(`line ${i + 1} is no JSON`);
    }
  });
  const head = events[0];
  if (head?.type !== "recording") throw new Error("this is no recording: its first line does not say so");
  if (head.version !== VERSION) throw new Error(`this recording is of version ${head.version}, and ${VERSION} is read here`);
  const shown = events.filter(isShown);
  if (shown.length === 0) throw new Error("nothing happens in this recording");
  return shown.sort((a, b) => a.t - b.t);
}

/**
 * Returns the view at the end of a recording.
 *
 * @param {WatchEvent[]} events
 * @returns {View}
 */
export function viewOf(events) {
  const view = new View(Infinity);
  for (const event of events) view.apply(event);
  return view;
}

/** The latest events that the page has received, at most `limit`, to be saved as a recording. */
export class Tape {
  #limit;
  /** @type {string[]} */
  #lines = [];
  /** @type {Map<number, string>} */
  #epochs = new Map();

  /** @param {number} limit */
  constructor(limit = 50_000) {
    this.#limit = limit;
  }

  /** @param {WatchEvent} event */
  add(event) {
    const line = JSON.stringify(event);
    if (event.type === "epoch") this.#epochs.set(event.epoch, line);
    this.#lines.push(line);
    if (this.#lines.length > this.#limit) this.#lines.splice(0, this.#limit / 10);
  }

  /** @returns {string} */
  text() {
    const head = JSON.stringify({ type: "recording", version: VERSION, orcinus: "page" });
    const known = new Set(this.#lines);
    const epochs = [...this.#epochs.values()].filter((line) => !known.has(line));
    return `${[head, ...epochs, ...this.#lines].join("\n")}\n`;
  }
}

/** A recording that is played: the view after all events up to a time. */
export class Player {
  #next = 0;

  /** @param {WatchEvent[]} events */
  constructor(events) {
    this.events = events;
    this.begin = events[0].t;
    this.end = events[events.length - 1].t;
    this.at = this.begin;
    this.view = new View(Infinity);
  }

  /**
   * Moves to the time `t`, forward or back.
   *
   * @param {number} t
   */
  seek(t) {
    const to = Math.min(this.end, Math.max(this.begin, t));
    if (to < this.at) {
      this.view = new View(Infinity);
      this.#next = 0;
    }
    while (this.#next < this.events.length && this.events[this.#next].t <= to) {
      this.view.apply(this.events[this.#next]);
      this.#next += 1;
    }
    this.at = to;
  }
}

/** Seconds behind the latest news at which a moving window ends, so that blocks come whole. */
const LAG_S = 0.45;
export const SHORTEST_S = 0.05;
export const LONGEST_S = 120;

/**
 * The span of time that is looked at: it moves with the run until it is held, and can then be shifted
 * and narrowed.
 */
export class MovingWindow {
  /** @param {number} length in seconds */
  constructor(length) {
    this.length = length;
    this.isHeld = false;
    /** Whether the viewer has chosen the length. */
    this.isChosen = false;
    this.to = 0;
    /** Seconds by which the scheduler's clock is ahead of the page's. */
    this.offset = -Infinity;
  }

  /** @returns {{from: number, to: number}} */
  get span() {
    return { from: this.to - this.length, to: this.to };
  }

  /**
   * Learns the scheduler's clock from an event that has just come.
   *
   * @param {number} t
   */
  heard(t) {
    this.offset = Math.max(this.offset, t - performance.now() / 1000);
  }

  /** @returns {number} the scheduler's time; before anything was heard, long ago */
  get now() {
    return performance.now() / 1000 + this.offset;
  }

  /** Moves to now, unless it is held. */
  follow() {
    if (!this.isHeld && this.offset > -Infinity) this.to = this.now - LAG_S;
  }

  /**
   * Moves the window by a part of its length, and holds it there.
   *
   * @param {number} part
   */
  shift(part) {
    this.isHeld = true;
    this.to += part * this.length;
  }

  /**
   * Makes the window longer or shorter, around a place in it from 0 to 1.
   *
   * @param {number} length
   * @param {number} place
   */
  zoom(length, place = 1) {
    this.isChosen = true;
    const bounded = Math.min(LONGEST_S, Math.max(SHORTEST_S, length));
    if (this.isHeld) this.to += (bounded - this.length) * (1 - place);
    this.length = bounded;
  }
}

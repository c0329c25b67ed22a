/** Seconds between the end of a moving window and the latest events, so that blocks are shown when they are complete. */
const LAG_S = 0.45;
export const SHORTEST_S = 0.05;
export const LONGEST_S = 120;

/**
 * The span of time that the viewer sees. The window moves with the clock until it is held. A held window can be
 * shifted and zoomed.
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
   * Updates the estimate of the scheduler's clock from the time `t` of an event that has just arrived.
   *
   * @param {number} t
   */
  heard(t) {
    this.offset = Math.max(this.offset, t - performance.now() / 1000);
  }

  /** @returns {number} the time of the scheduler's clock; minus infinity before the first event */
  get now() {
    return performance.now() / 1000 + this.offset;
  }

  /** Moves the window to the present time, unless the window is held. */
  follow() {
    if (!this.isHeld && this.offset > -Infinity) this.to = this.now - LAG_S;
  }

  /**
   * Moves the window by `part` times its length, and holds the window there.
   *
   * @param {number} part
   */
  shift(part) {
    this.isHeld = true;
    this.to += part * this.length;
  }

  /**
   * Changes the length of the window, in seconds. In a held window the time at `place` stays where it is: 0 is the
   * beginning of the window, and 1 the end.
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

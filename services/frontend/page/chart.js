import { iterationDetails } from "./details.js";
import { html, render } from "/page/vendor/lit-html.js";
import { Timeline } from "./timeline.js";

/** @import {MovingWindow} from "./moving_window.js" */
/** @import {View} from "./view.js" */
/** @import {IterationEvent} from "./events.js" */

const WHEEL_ZOOM = 1.0015;
const KEYS = "Left and right move in time, plus and minus change the scale, comma and full stop choose an iteration, and space pauses.";

/**
 * A timeline that the viewer can move, zoom and inspect with the pointer and with keys. The owner of the chart
 * calls `draw` with the view to show.
 */
export class Chart {
  /** @type {{x: number, y: number} | null} */
  #pointer = null;
  #dragFrom = NaN;

  /**
   * @param {HTMLElement} parent
   * @param {MovingWindow} window
   * @param {{hasStages: boolean, rows: number | null, label: string}} shape
   * @param {() => void} onMoved called when the viewer has moved the window
   */
  constructor(parent, window, shape, onMoved) {
    this.window = window;
    this.onMoved = onMoved;
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${shape.label} ${KEYS}`);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.news = document.createElement("div");
    this.news.className = "skip";
    this.news.setAttribute("aria-live", "polite");
    parent.classList.add("chart");
    parent.replaceChildren(this.canvas, this.tip, this.news);
    this.timeline = new Timeline(this.canvas, shape);
    /** @type {View | null} */
    this.view = null;
    this.#listen();
  }

  /**
   * Draws a view.
   *
   * @param {View} view
   * @param {number} zero the time that the axis calls 0, or NaN for times of the day
   */
  draw(view, zero = NaN) {
    this.view = view;
    this.timeline.draw(view, this.window.span, zero);
    this.#showTip();
  }

  #listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => {
      this.#pointer = { x: event.offsetX, y: event.offsetY };
      if (!Number.isNaN(this.#dragFrom)) {
        this.window.shift((this.#dragFrom - event.offsetX) / canvas.clientWidth);
        this.#dragFrom = event.offsetX;
      }
      this.onMoved();
    });
    canvas.addEventListener("pointerdown", (event) => {
      this.#dragFrom = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => { this.#dragFrom = NaN; });
    canvas.addEventListener("pointerleave", () => {
      this.#pointer = null;
      this.onMoved();
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.window.shift((event.deltaX || event.deltaY) / canvas.clientWidth);
      } else {
        this.window.zoom(this.window.length * WHEEL_ZOOM ** event.deltaY, event.offsetX / canvas.clientWidth);
      }
      this.onMoved();
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    canvas.addEventListener("blur", () => { this.timeline.chosen = null; this.onMoved(); });
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const actions = /** @type {Record<string, () => void>} */ ({
      "ArrowLeft": () => this.window.shift(-0.1),
      "ArrowRight": () => this.window.shift(0.1),
      "+": () => this.window.zoom(this.window.length / 1.5),
      "=": () => this.window.zoom(this.window.length / 1.5),
      "-": () => this.window.zoom(this.window.length * 1.5),
      " ": () => { this.window.isHeld = !this.window.isHeld; },
      ",": () => this.#choose(-1),
      ".": () => this.#choose(1),
    });
    const action = actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
    this.onMoved();
  }

  /** @param {-1 | 1} step */
  #choose(step) {
    const iterations = this.view?.iterations ?? [];
    if (iterations.length === 0) return;
    this.window.isHeld = true;
    const { from, to } = this.window.span;
    const at = this.timeline.chosen ? iterations.indexOf(this.timeline.chosen) : -1;
    const index = at < 0
      ? iterations.findLastIndex((it) => it.sent + it.round_trip_s <= to)
      : Math.min(iterations.length - 1, Math.max(0, at + step));
    const chosen = iterations[Math.max(0, index)];
    this.timeline.chosen = chosen;
    if (chosen.sent < from || chosen.sent + chosen.round_trip_s > to) {
      this.window.to = chosen.sent + this.window.length / 2;
    }
    render(iterationDetails(chosen, /** @type {View} */ (this.view)), this.news);
  }

  #showTip() {
    const box = this.#pointer && Number.isNaN(this.#dragFrom) ? this.timeline.at(this.#pointer.x, this.#pointer.y) : null;
    const chosen = this.timeline.chosen;
    this.tip.hidden = box === null && chosen === null;
    if (this.tip.hidden || !this.view) return;
    const iteration = /** @type {IterationEvent} */ (box?.iteration ?? chosen);
    render(html`${iterationDetails(iteration, this.view, box?.span ?? -1)}`, this.tip);
    const x = box ? /** @type {{x: number}} */ (this.#pointer).x : this.canvas.clientWidth / 2;
    const room = this.canvas.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(4, Math.min(x + 14, room))}px`;
    this.tip.style.top = `${(box ? /** @type {{y: number}} */ (this.#pointer).y : 10) + 16}px`;
  }
}

/** Returns a legend of the signs in a chart, as HTML. */
export function legend() {
  return html`<ul class="legend">
    <li><svg width="30" height="13" aria-hidden="true"><rect width="14" height="13" fill="oklch(0.7 0.13 215)"/><rect x="16" width="14" height="13" fill="oklch(0.7 0.13 352)"/></svg> a colour is a request</li>
    <li><svg width="24" height="13" aria-hidden="true"><rect width="24" height="13" fill="oklch(0.7 0.13 215)"/><path d="M-2 13L9 0M4 13L15 0M10 13L21 0M16 13L27 0" stroke="#0007" stroke-width="1.3"/></svg> prefill</li>
    <li><svg width="24" height="13" aria-hidden="true"><rect width="24" height="13" fill="oklch(0.7 0.13 215)"/></svg> decode</li>
    <li><svg width="24" height="13" aria-hidden="true"><rect width="24" height="13" fill="oklch(0.7 0.13 215)"/><path d="M-2 13L9 0M6 13L17 0M14 13L25 0M-2 0L9 13M6 0L17 13M14 0L25 13" stroke="#fffc" stroke-width="1.3"/></svg> recomputation</li>
    <li><svg width="24" height="13" aria-hidden="true"><path d="M0 7H24" stroke="currentColor" stroke-width="1.6" stroke-dasharray="2 3"/></svg> waits</li>
    <li><svg width="12" height="13" aria-hidden="true"><circle cx="6" cy="7" r="3.4" fill="currentColor"/></svg> ends</li>
  </ul>`;
}

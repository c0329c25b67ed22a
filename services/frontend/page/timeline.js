import { colourOf, themeOf } from "./colours.js";
import { sinceOf } from "./view.js";

/** @import {View, Request} from "./view.js" */
/** @import {IterationEvent} from "./events.js" */

const GUTTER = 74;
const AXIS = 22;
const LANE = 44;
const LANE_GAP = 8;
const MIN_ROW = 7;
const MAX_ROW = 16;
const MAX_ROWS = 40;

/**
 * @typedef {{from: number, to: number}} Span of seconds
 * @typedef {{x: number, y: number, w: number, h: number, iteration: IterationEvent, stage: number,
 *   span: number}} Box
 * @typedef {ReturnType<typeof themeOf>} Theme
 */

/**
 * A drawing of a view over time: a lane for each stage with a block for each iteration, and under them a
 * row for each request. One scale of time holds for both.
 */
export class Timeline {
  /** @type {Box[]} in the order in which they were drawn */
  #boxes = [];
  #theme;

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {{hasStages: boolean, rows: number | null}} shape of the drawing; with `rows` its height is that of so many
   */
  constructor(canvas, shape) {
    this.canvas = canvas;
    this.shape = shape;
    this.context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    this.#theme = themeOf(canvas.parentElement ?? document.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#theme = themeOf(canvas.parentElement ?? document.body);
    });
    /** @type {IterationEvent | null} */
    this.chosen = null;
  }

  /**
   * Draws what happened in a span of time.
   *
   * @param {View} view
   * @param {Span} window
   * @param {number} zero the time that the axis calls 0, or NaN for times of the day
   */
  draw(view, window, zero) {
    const nStages = this.shape.hasStages ? Math.max(view.epoch?.n_stages ?? 1, 1) : 0;
    const requests = rowsOf(view, window);
    const nRows = this.shape.rows ?? Math.min(Math.max(requests.length, 6), MAX_ROWS);
    const rowHeight = Math.max(MIN_ROW, Math.min(MAX_ROW, 320 / nRows));
    const lanes = nStages * (LANE + LANE_GAP);
    const width = this.canvas.clientWidth;
    const height = Math.ceil(AXIS + lanes + (nStages ? 10 : 0) + nRows * rowHeight + 6);
    this.#resize(width, height);
    const c = this.context;
    c.clearRect(0, 0, width, height);
    this.#boxes = [];
    const x = (/** @type {number} */ t) => GUTTER + ((t - window.from) / (window.to - window.from)) * (width - GUTTER);
    this.#axis(window, zero, x, height);
    c.save();
    c.beginPath();
    c.rect(GUTTER, 0, width - GUTTER, height);
    c.clip();
    const iterations = visible(view.iterations, window);
    for (let stage = 0; stage < nStages; stage++) this.#lane(iterations, stage, AXIS + stage * (LANE + LANE_GAP), x, width);
    const top = AXIS + lanes + (nStages ? 10 : 0);
    const shown = requests.slice(Math.max(0, requests.length - nRows));
    this.#rows(shown, iterations, window, top, rowHeight, x);
    this.#marks(view, window, x, height);
    c.restore();
    this.#labels(nStages, shown, requests.length, top, rowHeight);
  }

  /**
   * Returns what is drawn at a point of the canvas.
   *
   * @param {number} x
   * @param {number} y
   * @returns {Box | null}
   */
  at(x, y) {
    return this.#boxes.findLast((b) => x >= b.x - 1 && x <= b.x + b.w + 1 && y >= b.y && y <= b.y + b.h) ?? null;
  }

  /**
   * @param {number} width
   * @param {number} height
   */
  #resize(width, height) {
    const ratio = devicePixelRatio;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
    }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  /**
   * @param {Span} window
   * @param {number} zero
   * @param {(t: number) => number} x
   * @param {number} height
   */
  #axis(window, zero, x, height) {
    const c = this.context;
    const step = stepFor(window.to - window.from);
    const origin = Number.isNaN(zero) ? 0 : zero;
    c.font = `11px ${this.#theme.font}`;
    c.textBaseline = "middle";
    c.textAlign = "center";
    for (let k = Math.ceil((window.from - origin) / step); origin + k * step <= window.to; k++) {
      const t = origin + k * step;
      c.strokeStyle = this.#theme.line;
      c.lineWidth = 1;
      c.beginPath();
      c.moveTo(Math.round(x(t)) + 0.5, AXIS - 4);
      c.lineTo(Math.round(x(t)) + 0.5, height);
      c.stroke();
      c.fillStyle = this.#theme.quiet;
      const text = Number.isNaN(zero) ? timeOfDay(t, step) : `${tidy(k * step, step)} s`;
      if (x(t) > GUTTER + 16) c.fillText(text, x(t), AXIS / 2 - 2);
    }
  }

  /**
   * @param {IterationEvent[]} iterations
   * @param {number} stage
   * @param {number} y
   * @param {(t: number) => number} x
   * @param {number} width
   */
  #lane(iterations, stage, y, x, width) {
    const c = this.context;
    c.fillStyle = this.#theme.ground;
    c.fillRect(GUTTER, y, width - GUTTER, LANE);
    for (const iteration of iterations) {
      const times = iteration.stages[stage];
      if (!times) continue;
      const left = x(iteration.sent + times[0]);
      const w = Math.max(x(iteration.sent + times[0] + times[2]) - left - 0.6, 0.8);
      const n = Math.max(iteration.numbers.length, 1);
      const h = LANE / n;
      iteration.numbers.forEach((number, i) => {
        const box = { x: left, y: y + i * h, w, h, iteration, stage, span: i };
        this.#boxes.push(box);
        this.#block(box, number, iteration.kinds[i]);
      });
      if (iteration === this.chosen) {
        c.strokeStyle = this.#theme.ink;
        c.lineWidth = 2;
        c.strokeRect(left - 1, y - 1, w + 2, LANE + 2);
      }
    }
  }

  /**
   * @param {Box} box
   * @param {number} number
   * @param {string} kind
   */
  #block({ x, y, w, h }, number, kind) {
    const c = this.context;
    c.fillStyle = colourOf(number);
    c.fillRect(x, y, w, Math.max(h - (h > 4 ? 0.6 : 0), 0.5));
    if (kind === "d" || w < 3) return;
    c.save();
    c.beginPath();
    c.rect(x, y, w, h);
    c.clip();
    c.strokeStyle = kind === "p" ? "#0007" : "#fffc";
    c.lineWidth = 1.2;
    c.beginPath();
    for (let k = x - h; k < x + w; k += 5) {
      c.moveTo(k, y + h);
      c.lineTo(k + h, y);
      if (kind === "r") {
        c.moveTo(k, y);
        c.lineTo(k + h, y + h);
      }
    }
    c.stroke();
    c.restore();
  }

  /**
   * @param {Request[]} requests
   * @param {IterationEvent[]} iterations
   * @param {Span} window
   * @param {number} top
   * @param {number} h
   * @param {(t: number) => number} x
   */
  #rows(requests, iterations, window, top, h, x) {
    const c = this.context;
    const rowOf = new Map(requests.map((request, i) => [request.number, i]));
    requests.forEach((request, i) => this.#life(request, window.to, top + i * h, h, x));
    for (const iteration of iterations) {
      const left = x(iteration.sent);
      const w = Math.max(x(iteration.sent + iteration.round_trip_s) - left - 0.6, 0.8);
      iteration.numbers.forEach((number, i) => {
        const row = rowOf.get(number);
        if (row === undefined) return;
        const box = { x: left, y: top + row * h + 1, w, h: h - 2, iteration, stage: -1, span: i };
        this.#boxes.push(box);
        this.#block(box, number, iteration.kinds[i]);
        if (iteration === this.chosen) {
          c.strokeStyle = this.#theme.ink;
          c.lineWidth = 1.5;
          c.strokeRect(box.x, box.y, box.w, box.h);
        }
      });
    }
    requests.forEach((request, i) => this.#end(request, top + (i + 0.5) * h, h, x));
  }

  /**
   * Draws a line from a request's arrival to its end: dotted while it waits, and red where it was put
   * down or suspended.
   *
   * @param {Request} request
   * @param {number} now
   * @param {number} y
   * @param {number} h
   * @param {(t: number) => number} x
   */
  #life(request, now, y, h, x) {
    const c = this.context;
    request.turns.forEach(({ t, turn }, i) => {
      if (turn === "ended") return;
      const until = request.turns[i + 1]?.t ?? now;
      const isLost = turn === "put_down" || turn === "suspended";
      c.strokeStyle = isLost ? this.#theme.bad : this.#theme.quiet;
      c.setLineDash(turn === "admitted" ? [] : [2, 3]);
      c.lineWidth = turn === "admitted" ? 1 : 1.6;
      c.beginPath();
      c.moveTo(x(t), y + h / 2);
      c.lineTo(x(until), y + h / 2);
      c.stroke();
    });
    c.setLineDash([]);
  }

  /**
   * @param {Request} request
   * @param {number} y
   * @param {number} h
   * @param {(t: number) => number} x
   */
  #end(request, y, h, x) {
    if (request.turn !== "ended") return;
    const c = this.context;
    const isDone = ["stop", "length", ""].includes(request.reason);
    c.fillStyle = isDone ? this.#theme.ink : this.#theme.bad;
    c.beginPath();
    c.arc(x(sinceOf(request)) + 3, y, Math.min(h / 3, 3.4), 0, 7);
    c.fill();
  }

  /**
   * @param {View} view
   * @param {Span} window
   * @param {(t: number) => number} x
   * @param {number} height
   */
  #marks(view, window, x, height) {
    const c = this.context;
    for (const mark of view.marks) {
      if (mark.t < window.from || mark.t > window.to) continue;
      c.strokeStyle = c.fillStyle = { lost: this.#theme.bad, away: this.#theme.bad, epoch: this.#theme.good }[mark.kind] ?? this.#theme.warn;
      c.lineWidth = 1.5;
      c.beginPath();
      c.moveTo(x(mark.t), AXIS - 6);
      c.lineTo(x(mark.t), height);
      c.stroke();
      c.textAlign = "left";
      c.textBaseline = "top";
      c.font = `600 11px ${this.#theme.font}`;
      c.fillText(mark.kind, x(mark.t) + 4, AXIS - 6);
    }
  }

  /**
   * @param {number} nStages
   * @param {Request[]} shown
   * @param {number} nRequests
   * @param {number} top
   * @param {number} rowHeight
   */
  #labels(nStages, shown, nRequests, top, rowHeight) {
    const c = this.context;
    c.textAlign = "right";
    c.textBaseline = "middle";
    c.fillStyle = this.#theme.ink;
    c.font = `600 12px ${this.#theme.font}`;
    for (let stage = 0; stage < nStages; stage++) {
      c.fillText(`Stage ${stage}`, GUTTER - 10, AXIS + stage * (LANE + LANE_GAP) + LANE / 2);
    }
    c.font = `${Math.min(11, Math.max(rowHeight - 2, 8))}px ${this.#theme.font}`;
    c.fillStyle = this.#theme.quiet;
    const every = rowHeight < 11 ? 2 : 1;
    shown.forEach((request, i) => {
      if (i % every === 0) c.fillText(`#${request.number}`, GUTTER - 10, top + (i + 0.5) * rowHeight);
    });
    if (shown.length < nRequests) {
      c.textAlign = "left";
      c.fillText(`and ${nRequests - shown.length} earlier`, 2, top - 5);
    }
  }
}

/**
 * Returns the requests that were there in a span of time, by arrival.
 *
 * @param {View} view
 * @param {Span} window
 * @returns {Request[]}
 */
function rowsOf(view, window) {
  return [...view.requests.values()]
    .filter((r) => r.turns[0].t <= window.to && !(r.turn === "ended" && sinceOf(r) < window.from))
    .sort((a, b) => a.turns[0].t - b.turns[0].t || a.number - b.number);
}

/**
 * Returns the iterations that ran in a span of time. They are in the order of their results.
 *
 * @param {IterationEvent[]} iterations
 * @param {Span} window
 */
function visible(iterations, window) {
  const [first, last] = [firstEndingAfter(iterations, window.from), iterations.length];
  return iterations.slice(first, last).filter((it) => it.sent <= window.to);
}

/**
 * @param {IterationEvent[]} iterations
 * @param {number} t
 */
function firstEndingAfter(iterations, t) {
  let [low, high] = [0, iterations.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (iterations[middle].sent + iterations[middle].round_trip_s < t) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 2);
}

/**
 * Returns the seconds between two marks of an axis.
 *
 * @param {number} span
 */
function stepFor(span) {
  const rough = span / 8;
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  const leading = rough / magnitude;
  return magnitude * (leading > 5 ? 10 : leading > 2 ? 5 : leading > 1 ? 2 : 1);
}

/**
 * @param {number} seconds
 * @param {number} step
 */
function tidy(seconds, step) {
  return seconds.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

/**
 * @param {number} t
 * @param {number} step
 */
function timeOfDay(t, step) {
  const date = new Date(t * 1000);
  const clock = date.toTimeString().slice(0, 8);
  return step < 1 ? `${clock}${tidy(t % 1, step).slice(1)}` : clock;
}

import { colourOf, themeOf } from "./colours.js";
import { pipelineOf } from "./events.js";
import { sinceOf } from "./view.js";

/** @import {View, Request} from "./view.js" */
/** @import {IterationEvent, EpochEvent} from "./events.js" */

const GUTTER = 74;
const AXIS = 22;
const LANE = 44;
const LANE_GAP = 8;
/** Height of the name of a pipeline, and of all lanes if several pipelines have many. */
const HEADING = 20;
const MIN_LANE = 14;
const MAX_LANES = 400;
const MIN_ROW = 7;
const MAX_ROW = 16;
const MAX_ROWS = 40;

/**
 * @typedef {{from: number, to: number}} Span of seconds
 * @typedef {{x: number, y: number, w: number, h: number, iteration: IterationEvent, stage: number,
 *   span: number}} Box
 * @typedef {{pipeline: number, stage: number, y: number}} Lane
 * @typedef {{text: string, y: number}} Heading the name of a pipeline
 * @typedef {{lanes: Lane[], headings: Heading[], laneHeight: number, height: number}} Layout
 * @typedef {ReturnType<typeof themeOf>} Theme
 */

/**
 * A drawing of a view over time: a lane for each stage of each pipeline with a block for each iteration,
 * and under them a row for each request. One scale of time holds for both.
 */
export class Timeline {
  /** @type {Box[]} in the order in which they were drawn */
  #boxes = [];
  #theme;

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {{hasStages: boolean, rows: number | null}} shape of the drawing; with `rows`, as high as `rows` requests
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
    const layout = layOut(this.shape.hasStages ? view : null);
    const requests = rowsOf(view, window);
    const nRows = this.shape.rows ?? Math.min(Math.max(requests.length, 6), MAX_ROWS);
    const rowHeight = Math.max(MIN_ROW, Math.min(MAX_ROW, 320 / nRows));
    const width = this.canvas.clientWidth;
    const height = Math.ceil(AXIS + layout.height + nRows * rowHeight + 6);
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
    for (const lane of layout.lanes) {
      this.#lane(iterations.filter((it) => pipelineOf(it) === lane.pipeline), lane, layout.laneHeight, x, width);
    }
    const top = AXIS + layout.height;
    const shown = requests.slice(Math.max(0, requests.length - nRows));
    this.#rows(shown, iterations, window, top, rowHeight, x);
    if (layout.headings.length) shown.forEach((request, i) => this.#moves(request, top + (i + 0.5) * rowHeight, rowHeight, x));
    this.#marks(view, window, x, height);
    c.restore();
    this.#labels(layout, shown, requests.length, top, rowHeight);
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
   * @param {Lane} lane
   * @param {number} laneHeight
   * @param {(t: number) => number} x
   * @param {number} width
   */
  #lane(iterations, { stage, y }, laneHeight, x, width) {
    const c = this.context;
    c.fillStyle = this.#theme.ground;
    c.fillRect(GUTTER, y, width - GUTTER, laneHeight);
    for (const iteration of iterations) {
      const times = iteration.stages[stage];
      if (!times) continue;
      const left = x(iteration.sent + times[0]);
      const w = Math.max(x(iteration.sent + times[0] + times[2]) - left - 0.6, 0.8);
      const n = Math.max(iteration.numbers.length, 1);
      const h = laneHeight / n;
      iteration.numbers.forEach((number, i) => {
        const box = { x: left, y: y + i * h, w, h, iteration, stage, span: i };
        this.#boxes.push(box);
        this.#block(box, number, iteration.kinds[i]);
      });
      if (iteration === this.chosen) {
        c.strokeStyle = this.#theme.ink;
        c.lineWidth = 2;
        c.strokeRect(left - 1, y - 1, w + 2, laneHeight + 2);
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
   * Draws a line from a request's arrival to its end: dotted while the request does not run, and red after it
   * was preempted or suspended.
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
   * Writes the number of a pipeline before each admission of a request, unless the same pipeline has admitted the
   * request the time before.
   *
   * @param {Request} request
   * @param {number} y
   * @param {number} h
   * @param {(t: number) => number} x
   */
  #moves(request, y, h, x) {
    const c = this.context;
    c.textAlign = "right";
    c.textBaseline = "middle";
    c.font = `600 ${Math.min(10, Math.max(h - 2, 7))}px ${this.#theme.font}`;
    let before = -1;
    for (const { t, turn, pipeline } of request.turns) {
      if (turn !== "admitted" || pipeline === before) continue;
      const text = before < 0 ? `${pipeline}` : `→${pipeline}`;
      const width = c.measureText(text).width + 3;
      c.fillStyle = this.#theme.card;
      c.fillRect(x(t) - width, y - h / 2, width, h);
      c.fillStyle = before < 0 ? this.#theme.quiet : this.#theme.warn;
      c.fillText(text, x(t) - 2, y);
      before = pipeline;
    }
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
   * @param {Layout} layout
   * @param {Request[]} shown
   * @param {number} nRequests
   * @param {number} top
   * @param {number} rowHeight
   */
  #labels(layout, shown, nRequests, top, rowHeight) {
    const c = this.context;
    c.textAlign = "right";
    c.textBaseline = "middle";
    c.fillStyle = this.#theme.ink;
    c.font = `600 12px ${this.#theme.font}`;
    for (const { stage, y } of layout.lanes) c.fillText(`Stage ${stage}`, GUTTER - 10, y + layout.laneHeight / 2);
    c.textAlign = "left";
    for (const { text, y } of layout.headings) c.fillText(text, 2, y + HEADING / 2);
    c.textAlign = "right";
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
 * Returns the positions of the lanes of each pipeline that serves. If there are several pipelines, the lanes of each
 * are below its name.
 *
 * @param {View | null} view null for a drawing without lanes
 * @returns {Layout}
 */
function layOut(view) {
  /** @type {Layout} */
  const layout = { lanes: [], headings: [], laneHeight: LANE, height: 0 };
  if (view === null) return layout;
  /** @type {Pick<EpochEvent, "n_stages" | "pipeline" | "epoch" | "is_draining">[]} */
  const epochs = view.epochs.size ? view.pipelines : [view.epoch ?? { n_stages: 1, epoch: 0 }];
  const nLanes = epochs.reduce((sum, epoch) => sum + epoch.n_stages, 0);
  const areSeveral = epochs.length > 1;
  if (areSeveral) layout.laneHeight = Math.min(LANE, Math.max(MIN_LANE, MAX_LANES / nLanes));
  let y = AXIS;
  for (const epoch of epochs) {
    const pipeline = pipelineOf(epoch);
    if (areSeveral) {
      const state = epoch.is_draining ? ", draining" : "";
      layout.headings.push({ text: `Pipeline ${pipeline}, epoch ${epoch.epoch}${state}`, y });
      y += HEADING;
    }
    for (let stage = 0; stage < Math.max(epoch.n_stages, 1); stage++) {
      layout.lanes.push({ pipeline, stage, y });
      y += layout.laneHeight + LANE_GAP;
    }
  }
  layout.height = y - AXIS + 10;
  return layout;
}

/**
 * Returns the requests that had arrived and not ended at some time in a span, ordered by arrival.
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
 * Returns the iterations that ran in a span of time.
 *
 * @param {IterationEvent[]} iterations
 * @param {Span} window
 */
function visible(iterations, window) {
  return iterations.filter((it) => it.sent <= window.to && it.sent + it.round_trip_s >= window.from);
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

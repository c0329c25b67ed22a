import { Chart, legend } from "./chart.js";
import { MovingWindow } from "./moving_window.js";
import { parse, viewOf } from "./recording.js";
import { sinceOf } from "./view.js";
import { html, render } from "/page/vendor/lit-html.js";
import { duration, plural, quantile } from "./words.js";

/** @import {View} from "./view.js" */

/** Real runs of the same arrivals, made by `python -m benchmarks.serving.recordings`. */
const RECORDINGS = [
  { file: "request_level.jsonl", name: "Request by request (the paper's challenge C1)",
    text: "A batch is fixed when it begins. Who is done early waits for the longest, and who comes late for the next batch." },
  { file: "orca.jsonl", name: "Iteration by iteration (Orca, the paper's Figure 8a)",
    text: "The batch is chosen anew for each iteration. Who is done leaves at once, and who comes late joins the next iteration." },
  { file: "chunked.jsonl", name: "Iterations of chunks (what is served by default)",
    text: "Iterations as above; long prompts also run in pieces beside those who generate." },
];

/**
 * Returns figures of a run that can be compared with those of another run: times in seconds, and counts. A
 * request-level batch returns its answers only when it ends. The first token of a request may then arrive
 * together with the last.
 *
 * @param {View} view
 */
function figuresOf(view) {
  const requests = [...view.requests.values()].filter((r) => r.turn === "ended");
  const begin = Math.min(...requests.map((r) => r.turns[0].t));
  const end = Math.max(...requests.map((r) => sinceOf(r)));
  const latencies = requests.map((r) => sinceOf(r) - r.turns[0].t);
  return {
    begin, end, total: end - begin, nRequests: requests.length,
    mean: latencies.reduce((a, b) => a + b, 0) / Math.max(1, latencies.length),
    first: quantile(requests.map((r) => r.first_token_s ?? sinceOf(r) - r.turns[0].t), 0.5),
    nIterations: view.iterations.length,
  };
}

/** Charts of several recorded runs, one below the other, on one scale of time. */
export class CompareView {
  /** @type {{name: string, text: string, view: View, chart: Chart | null}[]} */
  #runs = [];
  #window = new MovingWindow(1);
  #hasBegun = false;

  /** @param {HTMLElement} element */
  constructor(element) {
    this.element = element;
    addEventListener("resize", () => this.#draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTimeout(() => this.#draw(), 50));
  }

  /** Shows the view. Reads the recordings when the view is shown for the first time. */
  async show() {
    if (this.#hasBegun) return this.#draw();
    this.#hasBegun = true;
    render(html`<p class="quiet">Reading recordings…</p>`, this.element);
    try {
      for (const { file, name, text } of RECORDINGS) {
        const response = await fetch(`/page/recordings/${file}`);
        if (!response.ok) throw new Error(`${file}: ${response.status} ${response.statusText}`);
        this.#runs.push({ name, text, view: viewOf(parse(await response.text())), chart: null });
      }
      this.#layOut();
    } catch (error) {
      this.#hasBegun = false;
      this.#runs = [];
      render(html`<p class="error" role="alert">${error instanceof Error ? error.message : error}</p>`, this.element);
    }
  }

  #layOut() {
    const figures = this.#runs.map(({ view }) => figuresOf(view));
    const [slow, fast] = figures;
    const longest = Math.max(...figures.map((f) => f.total));
    this.#window.isHeld = true;
    this.#window.length = longest * 1.06;
    this.#window.to = longest * 1.04;
    const nRows = Math.max(...figures.map((f) => f.nRequests));
    render(html`
      <div class="card">
        <h2>The same requests, scheduled in three ways</h2>
        <p class="verdict">Iteration-level scheduling answers a request in <strong>${duration(fast.mean)}</strong> on average,
          where request-level batches take ${duration(slow.mean)}: ${(slow.mean / fast.mean).toFixed(1)} times as long.</p>
        <p class="quiet">Real runs on one machine, two stages, batches of at most four; a point marks when a client has its answer. Drag to move, scroll to zoom.</p>
        ${legend()}
      </div>
      <div class="runs">${this.#runs.map(({ name, text }, i) => html`
        <section class="card"><h2>${name}</h2><p class="quiet">${text}</p>
          <div></div>
          <p>${plural(figures[i].nRequests, "request")} in ${duration(figures[i].total)}; mean latency ${duration(figures[i].mean)},
            median time to first token ${duration(figures[i].first)}, ${plural(figures[i].nIterations, "iteration")}.</p>
        </section>`)}</div>`, this.element);
    this.element.querySelectorAll(".runs section > div").forEach((place, i) => {
      const run = this.#runs[i];
      run.chart = new Chart(/** @type {HTMLElement} */ (place), this.#window, {
        hasStages: true, rows: nRows, label: `${run.name}: stages as lanes, requests as rows.`,
      }, () => this.#draw());
    });
    this.#draw();
  }

  #draw() {
    if (this.element.hidden) return;
    const shared = this.#window.to;
    for (const { view, chart } of this.#runs) {
      const { begin } = figuresOf(view);
      this.#window.to = begin + shared;
      chart?.draw(view, begin);
    }
    this.#window.to = shared;
  }
}

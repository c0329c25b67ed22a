import { Chart, legend } from "./chart.js";
import { isShown } from "./events.js";
import { Feed } from "./feed.js";
import { LONGEST_S, MovingWindow, SHORTEST_S } from "./moving_window.js";
import { panels } from "./panels.js";
import { Player, Tape, parse } from "./recording.js";
import { View } from "./view.js";
import { html, render } from "/page/vendor/lit-html.js";

/** @import {AnyEvent} from "./events.js" */
/** @import {AppState} from "./app.js" */

const FIRST_WINDOW_S = 4;
/** Iterations that a window shows until the viewer chooses its length, which then lies between two bounds. */
const ITERATIONS_SHOWN = 60;
const SHORTEST_CHOICE_S = 1.5;
const LONGEST_CHOICE_S = 20;
const PANELS_MS = 250;
const SLOW_DRAW_MS = 500;
const SPEEDS = [0.05, 0.1, 0.25, 0.5, 1, 2];

/** The view of the pipelines: live, held at a time, or a recording that is played. */
export class PipelineView {
  #view = new View();
  #tape = new Tape();
  #window = new MovingWindow(FIRST_WINDOW_S);
  /** @type {Player | null} */
  #player = null;
  #isPlaying = false;
  #speed = 0.25;
  #drawnAt = 0;
  #panelsAt = 0;
  #problem = "";
  /** @type {Feed | null} */
  #feed = null;
  #isCalm = matchMedia("(prefers-reduced-motion: reduce)");

  /**
   * @param {HTMLElement} element
   * @param {AppState} state
   */
  constructor(element, state) {
    this.element = element;
    this.state = state;
    const part = () => document.createElement("div");
    this.bar = part();
    this.under = part();
    this.under.className = "grid";
    const chart = part();
    const card = part();
    card.className = "card";
    const title = document.createElement("h2");
    title.textContent = "Stages and requests over time";
    const signs = part();
    render(legend(), signs);
    card.append(title, chart, signs);
    element.replaceChildren(this.bar, card, this.under);
    this.chart = new Chart(chart, this.#window, {
      hasStages: true, rows: null,
      label: "The stages of each pipeline as lanes with a block for each iteration, and a row for each request.",
    }, () => this.#draw());
    requestAnimationFrame((now) => this.#frame(now));
  }

  /** Connects with the current key and model of the page. */
  connect() {
    this.#feed?.close();
    this.#feed = new Feed(this.state.key, this.state.choice.model, (event) => this.#heard(event), (status, text) => {
      if (status === "away" && this.state.status === "live") this.#view.mark(this.#view.latest, "away", text);
      this.state.setStatus(status, text);
    });
  }

  /** @returns {View} the view that is shown */
  get view() {
    return this.#player ? this.#player.view : this.#view;
  }

  /** @param {AnyEvent} event */
  #heard(event) {
    if (event.type === "gap") this.#view = new View(); // all that is known follows
    else if (event.type === "away") {
      this.#view.mark(this.#view.latest, "away", event.text ?? "no scheduler leads");
      this.state.setStatus("away", event.text ?? "");
    } else if (event.type === "here") {
      this.#view.forgetState();
      this.state.setStatus("live", "");
    } else if (isShown(event)) {
      this.#view.apply(event);
      this.#tape.add(event);
      this.#window.heard(event.t);
      if (event.type === "epoch" || event.type === "mark") this.state.setEpoch(this.#view.epoch, this.#view.epochs.size);
    }
  }

  /** @param {number} now */
  #frame(now) {
    requestAnimationFrame((next) => this.#frame(next));
    if (this.element.hidden || document.hidden) return;
    const elapsed = now - this.#drawnAt;
    if (this.#isCalm.matches && elapsed < SLOW_DRAW_MS) return;
    this.#drawnAt = now;
    if (this.#player) {
      if (!this.#isPlaying) return;
      this.#seek(this.#player.at + (Math.min(elapsed, 200) / 1000) * this.#speed);
      if (this.#player.at >= this.#player.end) this.#isPlaying = false;
    } else {
      if (this.#window.isHeld && now - this.#panelsAt < PANELS_MS) return;
      this.#window.follow();
      if (!this.#window.isChosen) this.#suit();
    }
    this.#draw(now);
  }

  /** Sets the length of the window so that it shows about `ITERATIONS_SHOWN` iterations. */
  #suit() {
    const latest = this.#view.iterations.slice(-ITERATIONS_SHOWN);
    if (latest.length < ITERATIONS_SHOWN) return;
    const length = latest[latest.length - 1].sent - latest[0].sent;
    const wanted = Math.min(LONGEST_CHOICE_S, Math.max(SHORTEST_CHOICE_S, length));
    if (wanted > 1.5 * this.#window.length || wanted < this.#window.length / 1.5) this.#window.length = wanted;
  }

  #draw(now = performance.now()) {
    this.chart.draw(this.view, this.#player ? this.#player.begin : NaN);
    if (now - this.#panelsAt < PANELS_MS && this.#isPlaying === (this.#player !== null)) return;
    this.#panelsAt = now;
    this.#view.prune();
    this.redraw();
  }

  /** Draws the bar above the chart and the panels below the chart. */
  redraw() {
    if (this.element.hidden) return;
    render(this.#player ? this.#playerBar(this.#player) : this.#liveBar(), this.bar);
    render(panels(this.view, this.#player ? this.#player.at : Math.max(this.#window.now, this.#view.latest)), this.under);
  }

  #liveBar() {
    return html`<div class="bar">
      <button class="primary" aria-pressed=${this.#window.isHeld} @click=${() => this.#hold()}>${this.#window.isHeld ? "Go live" : "Pause"}</button>
      ${this.#scale()}
      <button @click=${() => this.#save()}>Save as a recording</button>
      ${this.#opener()}
      ${this.#problem ? html`<span class="error" role="alert">${this.#problem}</span>` : ""}
    </div>`;
  }

  /** @param {Player} player */
  #playerBar(player) {
    return html`<div class="bar">
      <button class="primary" @click=${() => this.#play()}>${this.#isPlaying ? "Pause" : "Play"}</button>
      <label>Time <input type="range" min="0" max=${player.end - player.begin} step="any" aria-label="Time in the recording, seconds"
        .value=${String(player.at - player.begin)} @input=${(/** @type {Event} */ e) => this.#toPlace(e)}></label>
      <span class="mono">${(player.at - player.begin).toFixed(2)} s</span>
      <label>Speed <select @change=${(/** @type {Event} */ e) => { this.#speed = Number(valueOf(e)); }}>
        ${SPEEDS.map((s) => html`<option value=${s} ?selected=${s === this.#speed}>${s} ×</option>`)}</select></label>
      ${this.#scale()}
      ${this.#opener()}
      <button @click=${() => this.#leaveRecording()}>Back to live</button>
      ${this.#problem ? html`<span class="error" role="alert">${this.#problem}</span>` : ""}
    </div>`;
  }

  #scale() {
    const [low, high] = [Math.log(SHORTEST_S), Math.log(LONGEST_S)];
    return html`<label>Shown <input type="range" min=${low} max=${high} step="0.01" aria-label="Seconds that are shown"
        .value=${String(Math.log(this.#window.length))}
        @input=${(/** @type {Event} */ e) => { this.#window.zoom(Math.exp(Number(valueOf(e)))); this.#draw(); }}></label>
      <span class="mono">${this.#window.length.toFixed(this.#window.length < 1 ? 2 : 1)} s</span>`;
  }

  #opener() {
    return html`<label class="file"><span>Open a recording…</span>
      <input type="file" accept=".jsonl,.json,.txt" @change=${(/** @type {Event} */ e) => this.#open(e)}></label>`;
  }

  #hold() {
    this.#window.isHeld = !this.#window.isHeld;
    this.#draw(Infinity);
  }

  #play() {
    if (!this.#player) return;
    if (this.#player.at >= this.#player.end) this.#player.seek(this.#player.begin);
    this.#isPlaying = !this.#isPlaying;
    this.redraw();
  }

  /** @param {number} t */
  #seek(t) {
    this.#player?.seek(t);
    this.#window.to = this.#player?.at ?? 0;
  }

  /** @param {Event} event */
  #toPlace(event) {
    if (!this.#player) return;
    this.#isPlaying = false;
    this.#seek(this.#player.begin + Number(valueOf(event)));
    this.#draw(Infinity);
  }

  #save() {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([this.#tape.text()], { type: "application/jsonl" }));
    link.download = `orcinus-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.jsonl`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  /** @param {Event} event */
  async #open(event) {
    const input = /** @type {HTMLInputElement} */ (event.target);
    const file = input.files?.[0];
    if (!file) return;
    try {
      this.play(await file.text(), file.name);
      this.#problem = "";
    } catch (error) {
      this.#problem = `${file.name}: ${error instanceof Error ? error.message : error}`;
    }
    input.value = "";
    this.redraw();
  }

  /**
   * Shows a recording, from its end.
   *
   * @param {string} text
   * @param {string} name
   * @throws {Error} it is no recording.
   */
  play(text, name) {
    this.#player = new Player(parse(text));
    this.#window.isHeld = true;
    this.#window.zoom(Math.min(LONGEST_S, Math.max(0.5, this.#player.end - this.#player.begin) * 1.05));
    this.#seek(this.#player.end);
    this.state.showRecording(name, this.#player.view.epoch, this.#player.view.epochs.size);
    this.#draw(Infinity);
  }

  #leaveRecording() {
    this.#player = null;
    this.#isPlaying = false;
    this.#window.isHeld = this.#window.isChosen = false;
    this.state.showRecording("", this.#view.epoch, this.#view.epochs.size);
  }
}

/**
 * @param {Event} event
 * @returns {string}
 */
function valueOf(event) {
  return /** @type {HTMLInputElement} */ (event.target).value;
}

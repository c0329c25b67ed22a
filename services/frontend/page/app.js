import { CompareView } from "./compare_view.js";
import { ModelChoice } from "./model_choice.js";
import { PipelineView } from "./pipeline_view.js";
import { Playground } from "./playground.js";
import { html, render } from "/page/vendor/lit-html.js";
import { plural } from "./words.js";

/** @import {EpochEvent} from "./events.js" */

const KEY_IN_SESSION = "orcinus-key";

/**
 * @param {string} id
 * @returns {HTMLElement}
 */
function element(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

/** The state that all views share: the API key, the chosen model, and the status of the feed. */
export class AppState {
  key = sessionStorage.getItem(KEY_IN_SESSION) ?? "";
  /** @type {"live" | "away" | "refused"} */
  status = "away";
  #text = "connecting";
  #recording = "";
  /** @type {EpochEvent | null} */
  #epoch = null;
  #nPipelines = 1;
  onKey = () => {};
  choice = new ModelChoice(element("model"), () => this.onModel());
  onModel = () => {};

  /**
   * @param {"live" | "away" | "refused"} status
   * @param {string} text
   */
  setStatus(status, text) {
    this.status = status;
    this.#text = text;
    this.#draw();
  }

  /**
   * @param {EpochEvent | null} epoch the latest one
   * @param {number} nPipelines that serve
   */
  setEpoch(epoch, nPipelines) {
    if (!this.#recording) this.#show(epoch, nPipelines);
    this.#draw();
  }

  /**
   * @param {string} name of the recording that is shown; empty for what is live
   * @param {EpochEvent | null} epoch
   * @param {number} nPipelines
   */
  showRecording(name, epoch, nPipelines) {
    this.#recording = name;
    this.#show(epoch, nPipelines);
    this.#draw();
  }

  /**
   * @param {EpochEvent | null} epoch
   * @param {number} nPipelines
   */
  #show(epoch, nPipelines) {
    this.#epoch = epoch;
    this.#nPipelines = nPipelines;
  }

  #draw() {
    const kind = this.#recording ? "recording" : this.status;
    const words = { recording: `recording ${this.#recording}`, live: "live", away: `away: ${this.#text}`, refused: this.#text }[kind];
    const epoch = this.#epoch;
    render(html`<span><span class="dot ${kind}"></span>${words}</span>
      ${epoch ? html`<span><strong>${epoch.model}</strong></span>
        ${this.#nPipelines > 1 ? html`<span>${plural(this.#nPipelines, "pipeline")}</span>` : ""}
        <span>${plural(epoch.n_stages, "stage")} of ${plural(epoch.tp_size, "rank")}</span>
        <span>${epoch.policy}, ${epoch.order}, ${epoch.admission}</span><span>epoch ${epoch.epoch}</span>` : ""}`, element("status"));
    render(this.status === "refused" || this.key ? this.#keyForm() : html``, element("access"));
  }

  #keyForm() {
    return html`<form class="bar" @submit=${(/** @type {Event} */ event) => this.#useKey(event)}>
      <label>API key <input type="password" name="key" autocomplete="off" .value=${this.key} size="16"></label>
      <button>Use</button></form>`;
  }

  /** @param {Event} event */
  #useKey(event) {
    event.preventDefault();
    this.key = String(new FormData(/** @type {HTMLFormElement} */ (event.target)).get("key") ?? "").trim();
    sessionStorage.setItem(KEY_IN_SESSION, this.key);
    this.onKey();
  }
}

const state = new AppState();
const pipeline = new PipelineView(element("pipeline"), state);
const compare = new CompareView(element("compare"));
const playground = new Playground(element("playground"), state);
const views = /** @type {Record<string, () => void>} */ ({
  pipeline: () => pipeline.redraw(),
  compare: () => void compare.show(),
  playground: () => void playground.show(),
});

function showView() {
  const name = location.hash.slice(1) in views ? location.hash.slice(1) : "pipeline";
  for (const id of Object.keys(views)) element(id).hidden = id !== name;
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.getAttribute("href") === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  views[name]();
}

state.onModel = () => {
  pipeline.connect();
  playground.forget();
};
state.onKey = async () => {
  await state.choice.load(state.key);
  state.onModel();
};
addEventListener("hashchange", showView);
showView();
await state.choice.load(state.key);
pipeline.connect();

import { withKey } from "./feed.js";
import { html, render } from "/page/vendor/lit-html.js";

/** The choice of one of the server's models. It is not shown if the server has only one. */
export class ModelChoice {
  /** Name of the chosen model; empty until the server has listed its models. */
  model = "";
  /** @type {string[]} */
  #names = [];

  /**
   * @param {HTMLElement} element
   * @param {() => void} onChange
   */
  constructor(element, onChange) {
    this.element = element;
    this.onChange = onChange;
  }

  /**
   * Requests the list of models from the server. If the server sends no list, the choice does not change.
   *
   * @param {string} key
   */
  async load(key) {
    try {
      const response = await fetch("/v1/models", { headers: withKey(key) });
      if (!response.ok) return;
      this.#names = (await response.json()).data.map((/** @type {{id: string}} */ model) => model.id);
    } catch {
      return; // the views say why the server cannot be reached
    }
    if (!this.#names.includes(this.model)) this.model = this.#names[0] ?? "";
    this.#draw();
  }

  #draw() {
    render(this.#names.length < 2 ? html`` : html`<label>Model <select @change=${(/** @type {Event} */ event) => this.#choose(event)}>
      ${this.#names.map((name) => html`<option .value=${name} ?selected=${name === this.model}>${name}</option>`)}</select></label>`, this.element);
  }

  /** @param {Event} event */
  #choose(event) {
    this.model = /** @type {HTMLSelectElement} */ (event.target).value;
    this.onChange();
  }
}

import { Answer } from "./answer.js";
import { samples } from "./code_samples.js";
import { explain, withKey } from "./feed.js";
import { COMMON, FORMATS, optionsOf, valueOf } from "./options.js";
import { html, render } from "/page/vendor/lit-html.js";
import { duration } from "./words.js";

/** @import {AppState} from "./app.js" */
/** @import {Choice, Piece, Body, TokenLogprob} from "./answer.js" */
/** @import {Option} from "./options.js" */

const N_TOP = 5;
/** Milliseconds between two drawings of an answer that streams. */
const DRAW_MS = 50;
const PATHS = { chat: "/v1/chat/completions", completion: "/v1/completions" };
const SCHEMAS = { chat: "ChatBody", completion: "CompletionBody" };

/** A page to try the model with conversations and texts and all options, with code samples to copy. */
export class Playground {
  /** @type {"chat" | "completion"} */
  #mode = "chat";
  /** @type {any} */
  #document = null;
  #problem = "";
  #system = "";
  #user = "";
  #prompt = "Once upon a time";
  /** @type {{role: string, content: string}[]} */
  #turns = [];
  /** @type {Answer | null} */
  #answer = null;
  /** @type {Map<string, string>} */
  #values = new Map([["max_tokens", "120"]]);
  #format = FORMATS[0];
  #formatText = "";
  #sample = "curl";
  #copied = false;
  #isDue = false;
  /** @type {Piece | null} */
  #shown = null;

  /**
   * @param {HTMLElement} element
   * @param {AppState} state
   */
  constructor(element, state) {
    this.element = element;
    this.state = state;
  }

  /** Drops the OpenAPI document, which was read with another key, and reads it again if the page is shown. */
  forget() {
    this.#document = null;
    if (!this.element.hidden) void this.show();
  }

  /** Draws the page. Reads the server's OpenAPI document if it has not been read yet. */
  async show() {
    this.#draw();
    if (this.#document) return;
    try {
      this.#document = await this.#get("/openapi.json");
      this.#problem = "";
    } catch (error) {
      this.#problem = error instanceof Error ? error.message : String(error);
    }
    this.#draw();
  }

  /** @param {string} path */
  async #get(path) {
    const response = await fetch(path, { headers: withKey(this.state.key) });
    if (!response.ok) throw new Error(await explain(response));
    return response.json();
  }

  /** @returns {Body} the body of the next request, as a client writes it */
  #body() {
    /** @type {Body} */
    const body = this.#mode === "chat"
      ? { messages: [...(this.#system ? [{ role: "system", content: this.#system }] : []), ...this.#turns,
        ...(this.#user ? [{ role: "user", content: this.#user }] : [])] }
      : { prompt: this.#prompt };
    if (this.state.choice.model) body.model = this.state.choice.model;
    for (const option of this.#options()) {
      const text = this.#values.get(option.name) ?? "";
      if (text !== "") body[option.name] = valueOf(option, text);
    }
    return { ...body, ...this.#format.field(this.#formatText) };
  }

  /** @returns {Option[]} */
  #options() {
    return this.#document ? optionsOf(this.#document.components.schemas[SCHEMAS[this.#mode]]) : [];
  }

  #send() {
    try {
      const body = this.#body();
      const logprobs = this.#mode === "chat" ? { logprobs: true, top_logprobs: N_TOP } : { logprobs: N_TOP };
      if (this.#mode === "chat" && this.#user) {
        this.#turns.push({ role: "user", content: this.#user });
        this.#user = "";
      }
      this.#problem = "";
      this.#shown = null;
      const answer = new Answer(PATHS[this.#mode], { ...body, ...logprobs }, this.state.key, () => this.#changed(answer));
      this.#answer = answer;
      answer.start();
    } catch (error) {
      this.#problem = error instanceof Error ? error.message : String(error);
    }
    this.#draw();
  }

  /** @param {Answer} answer */
  #changed(answer) {
    if (this.#isDue) return;
    this.#isDue = true;
    setTimeout(() => {
      this.#isDue = false;
      if (answer === this.#answer && answer.state === "done" && this.#mode === "chat" && answer.choices[0]) this.#keep(answer);
      this.#draw();
    }, DRAW_MS);
  }

  /** Makes an answer a turn of the conversation. @param {Answer} answer */
  #keep(answer) {
    const last = this.#turns.at(-1);
    if (last?.role === "user") this.#turns.push({ role: "assistant", content: answer.text });
  }

  #draw() {
    if (this.element.hidden) return;
    render(html`
      ${this.#problem ? html`<p class="notice error" role="alert">${this.#problem}</p>` : ""}
      <div class="halves">
        <div class="fields">
          <div class="bar">
            <label>Ask as <select @change=${(/** @type {Event} */ e) => this.#toMode(text(e))}>
              <option value="chat" ?selected=${this.#mode === "chat"}>a conversation</option>
              <option value="completion" ?selected=${this.#mode === "completion"}>a text to continue</option></select></label>
            <span class="quiet">${this.state.choice.model}</span>
          </div>
          ${this.#mode === "chat" ? this.#chat() : this.#completion()}
        </div>
        <div class="fields">
          ${this.#optionFields()}
          ${this.#code()}
        </div>
      </div>`, this.element);
  }

  #chat() {
    const isKept = this.#answer?.state === "done" && this.#turns.at(-1)?.role === "assistant";
    const turns = isKept ? this.#turns.slice(0, -1) : this.#turns;
    return html`
      <label class="field"><span>System prompt</span>
        <textarea rows="2" .value=${this.#system} @input=${(/** @type {Event} */ e) => { this.#system = text(e); this.#draw(); }}></textarea></label>
      ${turns.length || this.#answer ? html`<div class="card" aria-label="Conversation" role="log">
        ${turns.map((turn) => html`<div class="turn"><h3>${turn.role}</h3><p class="text">${turn.content}</p></div>`)}
        ${this.#answer ? this.#answerView(this.#answer) : ""}</div>` : ""}
      <label class="field"><span>Your turn (Ctrl + Enter sends)</span>
        <textarea rows="3" .value=${this.#user} @keydown=${(/** @type {KeyboardEvent} */ e) => this.#maybeSend(e)}
          @input=${(/** @type {Event} */ e) => { this.#user = text(e); this.#draw(); }}></textarea></label>
      ${this.#buttons(this.#user !== "" || this.#turns.at(-1)?.role === "user")}`;
  }

  #completion() {
    return html`
      <label class="field"><span>Text to continue (Ctrl + Enter sends)</span>
        <textarea rows="6" .value=${this.#prompt} @keydown=${(/** @type {KeyboardEvent} */ e) => this.#maybeSend(e)}
          @input=${(/** @type {Event} */ e) => { this.#prompt = text(e); this.#draw(); }}></textarea></label>
      ${this.#buttons(this.#prompt !== "")}
      ${this.#answer ? html`<div class="card" role="log" aria-label="Answer">${this.#answerView(this.#answer)}</div>` : ""}`;
  }

  /** @param {boolean} canSend */
  #buttons(canSend) {
    const isBusy = this.#answer?.state === "streams";
    return html`<div class="bar">
      <button class="primary" ?disabled=${!canSend || isBusy} @click=${() => this.#send()}>Send</button>
      <button ?disabled=${!isBusy} @click=${() => this.#answer?.stop()}>Stop</button>
      <button ?disabled=${!this.#answer?.canResume} @click=${() => this.#answer?.resume()}>Resume</button>
      <button ?disabled=${isBusy} @click=${() => this.#clear()}>Clear</button>
    </div>`;
  }

  /** @param {Answer} answer */
  #answerView(answer) {
    const words = { streams: "", stopped: "stopped", broken: `broke: ${answer.problem}`, done: "" }[answer.state];
    return html`${answer.choices.map((choice) => this.#choice(choice, answer))}
      ${answer.choices.length === 0 && answer.state === "streams" ? html`<p class="quiet cursor">waiting </p>` : ""}
      <p class="quiet" role="status">${words} ${answer.usage}
        ${Number.isNaN(answer.firstTokenMs) ? "" : `first token after ${duration(answer.firstTokenMs / 1000)}`}
        ${answer.seed ? html`<span class="mono">seed ${answer.seed}</span>` : ""}</p>
      ${this.#tokenTable(answer)}`;
  }

  /**
   * @param {Choice} choice
   * @param {Answer} answer
   */
  #choice(choice, answer) {
    const name = answer.choices.length > 1 ? `answer ${choice.index + 1}` : "assistant";
    const isOpen = answer.state === "streams" && !choice.finish;
    return html`<div class="turn"><h3>${name}${choice.finish ? html` <span class="quiet">(${choice.finish})</span>` : ""}</h3>
      ${[true, false].map((isReasoning) => html`<p class="text ${isReasoning ? "reasoning" : isOpen ? "cursor" : ""}"
        ?hidden=${isReasoning && !choice.pieces.some((p) => p.isReasoning)}>${choice.pieces
        .filter((p) => p.isReasoning === isReasoning).map((piece) => this.#piece(piece))}</p>`)}
      ${choice.calls ? html`<pre tabindex="0">${choice.calls.trim()}</pre>` : ""}</div>`;
  }

  /** @param {Piece} piece */
  #piece(piece) {
    if (piece.tokens.length === 0) return piece.text;
    const least = Math.min(...piece.tokens.map((t) => Math.exp(t.logprob)));
    const doubt = Math.round(45 * (1 - least) ** 1.5);
    const title = piece.tokens.map((t) => `${JSON.stringify(t.token)} ${percent(t.logprob)}`).join(", ");
    return html`<span class="token" title=${title} .style=${doubt > 3 ? `background:color-mix(in srgb, #e0902a ${doubt}%, transparent)` : ""}
      @pointerenter=${() => { this.#shown = piece; this.#draw(); }}>${piece.text}</span>`;
  }

  /** @param {Answer} answer */
  #tokenTable(answer) {
    const tokens = (this.#shown ? [this.#shown] : answer.choices[0]?.pieces ?? []).flatMap((piece) => piece.tokens);
    if (tokens.length === 0) return "";
    return html`<details ?open=${this.#shown !== null}><summary>Token probabilities${this.#shown ? " of what is pointed at" : ""}</summary>
      <div class="scroll token-table" tabindex="0" role="region" aria-label="Token probabilities"><table>
        <thead><tr><th>Token</th><th class="number">Probability</th><th>Most likely in its place</th></tr></thead>
        <tbody>${tokens.slice(0, 400).map((t) => this.#tokenRow(t))}</tbody></table></div></details>`;
  }

  /** @param {TokenLogprob} token */
  #tokenRow(token) {
    return html`<tr><td class="mono">${JSON.stringify(token.token)}</td><td class="number">${percent(token.logprob)}</td>
      <td>${token.top.map((other) => html`<span class="mono">${JSON.stringify(other.token)}</span> ${percent(other.logprob)}&emsp;`)}</td></tr>`;
  }

  #optionFields() {
    const options = this.#options();
    const common = options.filter((option) => COMMON.includes(option.name));
    const others = options.filter((option) => !COMMON.includes(option.name));
    return html`<section class="card"><h2>Options</h2>
      <div class="options">${common.map((option) => this.#optionField(option))}</div>
      <div class="options">
        <label class="field"><span>Format of the output</span><select @change=${(/** @type {Event} */ e) => this.#toFormat(text(e))}>
          ${FORMATS.map((f) => html`<option value=${f.id} ?selected=${f === this.#format}>${f.name}</option>`)}</select></label></div>
      ${this.#format.example ? html`<label class="field"><span>${this.#format.name}</span><textarea class="code" rows="4" spellcheck="false"
        .value=${this.#formatText} @input=${(/** @type {Event} */ e) => { this.#formatText = text(e); this.#draw(); }}></textarea></label>` : ""}
      <details><summary>All ${options.length} options</summary><div class="options">${others.map((option) => this.#optionField(option))}</div></details>
    </section>`;
  }

  /** @param {Option} option */
  #optionField(option) {
    const value = this.#values.get(option.name) ?? "";
    const set = (/** @type {Event} */ e) => { this.#values.set(option.name, text(e)); this.#draw(); };
    const choices = option.type === "boolean" ? ["true", "false"] : option.choices;
    return html`<label class="field"><span>${option.name} ${option.hint ? html`<small>(${option.hint})</small>` : ""}</span>
      ${choices.length
        ? html`<select @change=${set}><option value="">default</option>${choices.map((c) => html`<option value=${c} ?selected=${c === value}>${c}</option>`)}</select>`
        : html`<input .value=${value} placeholder="default" @input=${set}
            inputmode=${option.type === "integer" ? "numeric" : option.type === "number" ? "decimal" : "text"}>`}</label>`;
  }

  #code() {
    let code = "";
    try {
      code = samples(PATHS[this.#mode], this.#body(), this.state.key !== "").find((one) => one.name === this.#sample)?.code ?? "";
    } catch (error) {
      code = error instanceof Error ? error.message : String(error);
    }
    return html`<section class="card"><h2>The same as a program</h2>
      <div class="bar">${["curl", "Python", "gRPC"].map((name) => html`<button aria-pressed=${name === this.#sample}
          @click=${() => { this.#sample = name; this.#draw(); }}>${name}</button>`)}
        <button class="primary" @click=${() => this.#copy(code)}>${this.#copied ? "Copied" : "Copy"}</button></div>
      <pre tabindex="0" aria-label="Code">${code}</pre></section>`;
  }

  /** @param {string} code */
  async #copy(code) {
    await navigator.clipboard.writeText(code);
    this.#copied = true;
    this.#draw();
    setTimeout(() => { this.#copied = false; this.#draw(); }, 1500);
  }

  /** @param {KeyboardEvent} event */
  #maybeSend(event) {
    if (event.key === "Enter" && event.ctrlKey && this.#answer?.state !== "streams") this.#send();
  }

  /** @param {string} mode */
  #toMode(mode) {
    this.#answer?.stop();
    this.#mode = mode === "chat" ? "chat" : "completion";
    this.#answer = null;
    this.#draw();
  }

  /** @param {string} id */
  #toFormat(id) {
    this.#format = FORMATS.find((f) => f.id === id) ?? FORMATS[0];
    this.#formatText = this.#format.example;
    this.#draw();
  }

  #clear() {
    this.#turns = [];
    this.#answer = null;
    this.#shown = null;
    this.#draw();
  }
}

/** @param {Event} event */
function text(event) {
  return /** @type {HTMLInputElement} */ (event.target).value;
}

/** @param {number} logprob */
function percent(logprob) {
  const part = Math.exp(logprob);
  return part < 0.001 ? "< 0.1 %" : `${(100 * part).toFixed(1)} %`;
}

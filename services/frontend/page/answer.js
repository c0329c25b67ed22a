import { explain, readEvents, withKey } from "./feed.js";

/**
 * @typedef {{token: string, logprob: number, top: {token: string, logprob: number}[]}} TokenLogprob
 * @typedef {{text: string, isReasoning: boolean, tokens: TokenLogprob[]}} Piece
 * @typedef {{index: number, pieces: Piece[], tokenIds: number[], finish: string, calls: string}} Choice
 * @typedef {Record<string, unknown>} Body
 * @typedef {"streams" | "stopped" | "broken" | "done"} AnswerState
 */

/**
 * An answer that is streamed. A stopped or broken answer can be resumed where it ended. The server stores
 * nothing of the answer, so the request that resumes it has the seed, the id of the last event and the tokens
 * that have been received.
 */
export class Answer {
  /** @type {Choice[]} */
  choices = [];
  /** @type {AnswerState} */
  state = "streams";
  problem = "";
  seed = "";
  usage = "";
  firstTokenMs = NaN;
  #lastId = "";
  #abort = new AbortController();
  #begun = performance.now();

  /**
   * @param {string} path
   * @param {Body} body as a client writes it, without what streams need
   * @param {string} key
   * @param {() => void} onChange
   */
  constructor(path, body, key, onChange) {
    this.path = path;
    this.body = body;
    this.key = key;
    this.onChange = onChange;
  }

  /** Sends the request and reads the stream. */
  start() {
    void this.#run({});
  }

  get canResume() {
    return (this.state === "stopped" || this.state === "broken") && this.#lastId !== "" && this.seed !== "";
  }

  /** @returns {string} the first choice's text, without reasoning */
  get text() {
    return (this.choices[0]?.pieces ?? []).filter((p) => !p.isReasoning).map((p) => p.text).join("");
  }

  stop() {
    if (this.state !== "streams") return;
    this.state = "stopped";
    this.#abort.abort();
    this.onChange();
  }

  /** Resumes an answer that was stopped or whose stream broke. */
  resume() {
    this.state = "streams";
    this.problem = "";
    this.#abort = new AbortController();
    const token_ids = this.choices.map((choice) => choice.tokenIds);
    // A seed may have more digits than a number of JavaScript: it goes back as it came.
    void this.#run({ resumption: { seed: "SEED", token_ids } });
  }

  /** @param {Body} more */
  async #run(more) {
    const body = {
      ...this.body, ...more, stream: true, return_token_ids: true, stream_options: { include_usage: true },
    };
    const text = JSON.stringify(body).replace('"SEED"', this.seed);
    /** @type {Record<string, string>} */
    const headers = { "content-type": "application/json", ...withKey(this.key) };
    if (this.#lastId) headers["last-event-id"] = this.#lastId;
    this.onChange();
    try {
      const response = await fetch(this.path, { method: "POST", headers, body: text, signal: this.#abort.signal });
      if (!response.ok) throw new Error(await explain(response));
      await readEvents(response, (data, id) => this.#take(data, id));
      if (this.state === "streams") this.#fail("the stream ended before the answer did");
    } catch (error) {
      if (this.state === "streams") this.#fail(error instanceof Error ? error.message : String(error));
    }
    this.onChange();
  }

  /** @param {string} problem */
  #fail(problem) {
    this.state = "broken";
    this.problem = problem;
  }

  /**
   * @param {string} data
   * @param {string} id
   */
  #take(data, id) {
    if (data === "[DONE]") {
      this.state = "done";
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) return this.#fail(chunk.error.message);
    this.#lastId = id || this.#lastId;
    if (this.seed === "") this.seed = /"seed":\s*(-?\d+)/.exec(data)?.[1] ?? "";
    if (chunk.usage) this.usage = usageWords(chunk.usage);
    for (const choice of chunk.choices) this.#add(choice);
    this.onChange();
  }

  /** @param {any} chunk */
  #add(chunk) {
    while (this.choices.length <= chunk.index) {
      this.choices.push({ index: this.choices.length, pieces: [], tokenIds: [], finish: "", calls: "" });
    }
    const choice = this.choices[chunk.index];
    const delta = chunk.delta ?? {};
    const text = chunk.text ?? delta.content ?? "";
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    const tokens = logprobsOf(chunk);
    if (Number.isNaN(this.firstTokenMs) && (text || reasoning)) this.firstTokenMs = performance.now() - this.#begun;
    if (reasoning) choice.pieces.push({ text: reasoning, isReasoning: true, tokens: text ? [] : tokens });
    if (text || (tokens.length && !reasoning)) choice.pieces.push({ text, isReasoning: false, tokens });
    for (const call of delta.tool_calls ?? []) {
      choice.calls += call.function?.name ? `\n${call.function.name} ${call.function.arguments ?? ""}` : call.function?.arguments ?? "";
    }
    choice.tokenIds.push(...(chunk.token_ids ?? []));
    choice.finish = chunk.finish_reason ?? choice.finish;
  }
}

/**
 * Reads the log-probabilities of a choice, in the form of chats or of completions. Returns none if the choice has none.
 *
 * @param {any} chunk
 * @returns {TokenLogprob[]}
 */
function logprobsOf(chunk) {
  const given = chunk.logprobs;
  if (!given) return [];
  if (given.content) {
    return given.content.map((/** @type {any} */ one) => ({ token: one.token, logprob: one.logprob, top: one.top_logprobs ?? [] }));
  }
  return (given.tokens ?? []).map((/** @type {string} */ token, /** @type {number} */ i) => ({
    token, logprob: given.token_logprobs[i],
    top: Object.entries(given.top_logprobs?.[i] ?? {}).map(([text, logprob]) => ({ token: text, logprob: Number(logprob) })),
  }));
}

/** @param {any} usage */
function usageWords(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens;
  return `${usage.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""}, ${usage.completion_tokens} generated`;
}

/** @import {AnyEvent} from "./events.js" */

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;

/**
 * Reads the server-sent events of a response, and calls `onData` with the data and the id of each event as soon
 * as the event arrives. The id must come before the data. An event without an id gets the id of the event before.
 *
 * @param {Response} response
 * @param {(data: string, id: string) => void} onData
 */
export async function readEvents(response, onData) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let id = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (line.startsWith("id:")) id = line.slice(3).trim();
      else if (line.startsWith("data:")) onData(line.slice(5).trim(), id);
    }
  }
}

/**
 * Returns the error message in the body of an answer. Without such a message, returns the body or the status.
 *
 * @param {Response} response
 * @returns {Promise<string>}
 */
export async function explain(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

/**
 * Returns the request headers with an API key; none if the key is empty.
 *
 * @param {string} key
 * @returns {Record<string, string>}
 */
export function withKey(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/**
 * The live events of the pipeline. Until the feed is closed or refused, it connects again whenever the connection ends.
 * It calls `onEvent` for each event, and `onStatus` when the connection begins or ends.
 */
export class Feed {
  #abort = new AbortController();

  /**
   * @param {string} key
   * @param {string} model whose scheduler is watched; empty if the server has only one
   * @param {(event: AnyEvent) => void} onEvent
   * @param {(status: "live" | "away" | "refused", text: string) => void} onStatus
   */
  constructor(key, model, onEvent, onStatus) {
    this.key = key;
    this.path = `/pipeline/events${model && `?${new URLSearchParams({ model })}`}`;
    this.onEvent = onEvent;
    this.onStatus = onStatus;
    this.#run();
  }

  close() {
    this.#abort.abort();
  }

  async #run() {
    let wait = FIRST_WAIT_MS;
    while (!this.#abort.signal.aborted) {
      try {
        const isOver = await this.#connect(() => { wait = FIRST_WAIT_MS; });
        if (isOver) return;
      } catch (error) {
        if (this.#abort.signal.aborted) return;
        this.onStatus("away", error instanceof Error ? error.message : String(error));
      }
      await new Promise((resolve) => setTimeout(resolve, wait * (0.5 + Math.random())));
      wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    }
  }

  /**
   * Opens a connection and reads it to its end. Returns true if the server refuses the key, the model or the path,
   * so that connecting again is useless.
   *
   * @param {() => void} onLive
   */
  async #connect(onLive) {
    const signal = this.#abort.signal;
    const response = await fetch(this.path, { headers: withKey(this.key), signal });
    if (!response.ok) {
      const isRefused = [401, 403, 404].includes(response.status);
      this.onStatus(isRefused ? "refused" : "away", await explain(response));
      return isRefused;
    }
    onLive();
    this.onStatus("live", "");
    await readEvents(response, (data) => this.onEvent(JSON.parse(data)));
    this.onStatus("away", "the frontend ended the stream");
    return false;
  }
}

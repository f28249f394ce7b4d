// Asks for the server's state once a second while the page is seen; less often when it fails.

import { byId, setAttribute, setText } from "./dom.js";

const EVERY_MS = 1000;
const MAX_WAIT_MS = 10_000;
const STATES = { 401: "key needed", 403: "key needed", 503: "loading" };

export class Poll {
  #api;
  #store;
  #timer = 0;
  #failures = 0;
  #table = "";
  #inFlight = false;
  #again = false;

  constructor(api, store) {
    this.#api = api;
    this.#store = store;
    document.addEventListener("visibilitychange", () => this.now());
  }

  /** Asks at once, after something was changed. */
  now() {
    if (this.#inFlight) {
      this.#again = true;
      return;
    }
    clearTimeout(this.#timer);
    if (!document.hidden) this.#ask();
  }

  async #ask() {
    this.#inFlight = true;
    try {
      const answer = await this.#api.get(`api/state?table=${encodeURIComponent(this.#table)}`);
      this.#failures = 0;
      this.#store.take(answer);
      this.#table = answer.table;
      show(answer.status);
    } catch (error) {
      this.#failures += 1;
      show(STATES[error.status] ?? "no answer", error.message);
    }
    this.#inFlight = false;
    if (this.#again) {
      this.#again = false;
      this.now();
    } else if (!document.hidden) {
      const wait = Math.min(EVERY_MS * 2 ** this.#failures, MAX_WAIT_MS);
      this.#timer = setTimeout(() => this.#ask(), wait);
    }
  }
}

function show(state, title) {
  const status = byId("status");
  setText(status, state);
  setAttribute(status, "title", title);
  setAttribute(status, "data-state", state);
}

// Calls of the server's API. Addresses are relative to the page, so a proxy's prefix works.

import { LineReader, textOf } from "./sse.js";

const SLOW_MS = 15_000; // for short calls; loading an adapter has more time
const LOAD_MS = 300_000;
const MAX_MESSAGE = 2_000;

/** What the server, or the way to it, answered instead of a result. `status` 0: no answer. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message.length > MAX_MESSAGE ? `${message.slice(0, MAX_MESSAGE)} …` : message);
    this.status = status;
  }
}

/** The server's own words in an error body of any of the shapes in use; null for none. */
export function messageOf(body) {
  const error = body?.error ?? body?.detail ?? body?.message;
  if (typeof error === "string") return error;
  if (Array.isArray(error)) {
    const parts = error.map((one) => (typeof one?.msg === "string" ? one.msg : null));
    return parts.filter(Boolean).join("; ") || null;
  }
  return typeof error?.message === "string" ? error.message : null;
}

/** An error for a status and a body's text, in words. */
export function errorOf(status, text) {
  let message = null;
  try {
    message = messageOf(JSON.parse(text));
  } catch {
    // Not JSON: a proxy's page, or nothing. Only the status can be told.
  }
  if (status === 401) message = `${message ?? "The server wants an API key."} Enter it in the settings.`;
  if (status === 403) message = message ?? "This key may not do that.";
  return new ApiError(message ?? `The server answered with status ${status}.`, status);
}

export class Api {
  #key;

  /** `key`: a function that gives the API key of now, or an empty text. */
  constructor(key) {
    this.#key = key;
  }

  get(path, options) {
    return this.#json("GET", path, undefined, SLOW_MS, options);
  }

  post(path, body, options) {
    return this.#json("POST", path, body, LOAD_MS, options);
  }

  /** The lines of an answer as JSON values, as they arrive. */
  async *lines(path, body, signal) {
    const response = await this.#fetch("POST", path, body, signal);
    const reader = new LineReader();
    try {
      for await (const text of textOf(response.body)) {
        for (const line of reader.push(text)) if (line) yield JSON.parse(line);
      }
    } catch (error) {
      throw this.#translate(error, signal);
    }
  }

  async #json(method, path, body, timeout, { signal } = {}) {
    const limit = AbortSignal.timeout(timeout);
    const both = signal ? AbortSignal.any([signal, limit]) : limit;
    try {
      const response = await this.#fetch(method, path, body, both);
      const text = await response.text();
      try {
        return text ? JSON.parse(text) : null;
      } catch {
        return text; // vLLM's routes answer with a sentence
      }
    } catch (error) {
      if (limit.aborted) throw new ApiError(`No answer within ${timeout / 1000} s.`);
      throw this.#translate(error, signal);
    }
  }

  async #fetch(method, path, body, signal) {
    const headers = { accept: "application/json" };
    if (this.#key()) headers.authorization = `Bearer ${this.#key()}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), {
        method,
        headers,
        signal,
        body: body === undefined ? undefined : JSON.stringify(body),
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
    } catch (error) {
      throw this.#translate(error, signal);
    }
    if (!response.ok) throw errorOf(response.status, await response.text());
    return response;
  }

  #translate(error, signal) {
    if (error instanceof ApiError || signal?.aborted) return error;
    if (error instanceof SyntaxError || error instanceof RangeError) {
      return new ApiError("The server sent what is not JSON.");
    }
    return new ApiError("The server does not answer. Is it still running?");
  }
}

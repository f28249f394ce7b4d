// The columns, and one run through all of them: many requests over one connection.

import { announce, byId, notice, setText } from "./dom.js";
import { plural } from "./format.js";
import { Column } from "./column.js";
import { ApiError, errorOf } from "./api.js";

const MAX_COLUMNS = 32; // as many as the server takes at once
const FIRST_MIXES = 3;
const SAVE_MS = 250;

/** "pirate:0.6,poem" to [["pirate", 0.6], ["poem", 1]]; names are percent-encoded. */
export function parseMix(text) {
  const mix = [];
  for (const part of text.split(",")) {
    const [name, value] = part.split(":");
    const scale = value === undefined ? 1 : Number(value);
    try {
      if (name && Number.isFinite(scale)) mix.push([decodeURIComponent(name), scale]);
    } catch {
      // Not percent-encoding: no name that we wrote.
    }
  }
  return mix;
}

export const formatMix = (mix) =>
  mix.map(([name, scale]) => `${encodeURIComponent(name)}:${scale}`).join(",");

export class Columns {
  #api;
  #store;
  #picker;
  #settings;
  #columns = [];
  #run = null; // AbortController of the run at hand
  #started = false;
  #saving = 0; // timer

  constructor(api, store, picker, settings) {
    this.#api = api;
    this.#store = store;
    this.#picker = picker;
    this.#settings = settings;
    this.element = byId("columns");
    this.#append(new Column(true, {}));
    byId("add-column").addEventListener("click", () => this.#addAndPick());
    store.subscribe((_state, changed) => this.#update(changed));
  }

  get running() {
    return this.#run !== null;
  }

  /** Asks every column; ends when all have answered, failed or been stopped. */
  async ask(question, keep) {
    if (this.running) return;
    const run = new AbortController();
    this.#run = run;
    const columns = [...this.#columns];
    for (const column of columns) column.begin(question, keep);
    const requests = columns.map((column) => this.#request(column));
    notice(byId("ask-error"), "");
    announce(`Asked ${plural(columns.length, "column")}.`);
    try {
      for await (const line of this.#api.lines("api/compare", { requests }, run.signal)) {
        take(columns[line.index], line);
      }
    } catch (error) {
      if (!run.signal.aborted) this.#failed(columns, error);
    } finally {
      for (const column of columns) column.end(run.signal.aborted);
      this.#run = null;
    }
    announce(run.signal.aborted ? "Stopped." : "All columns have answered.");
  }

  stop() {
    this.#run?.abort();
  }

  add(mix) {
    if (this.#columns.length >= MAX_COLUMNS) return null;
    const column = new Column(false, {
      changed: (moves) => (moves ? this.#saveSoon() : this.#save()),
      pick: (one) => this.#pick(one),
      remove: (one) => this.#remove(one),
    });
    for (const [name, scale] of mix) column.editor.add(name, scale);
    this.#append(column);
    return column;
  }

  #request(column) {
    return {
      model: this.#store.state?.base?.name,
      messages: [...this.#settings.system(), ...column.history],
      stream: true,
      stream_options: { include_usage: true },
      lora: column.mix.map(([name, scale]) => ({ name, scale })),
      ...this.#settings.sampling(),
    };
  }

  /** The whole run failed: why stands above the columns, once. */
  #failed(columns, error) {
    const known = error instanceof ApiError;
    notice(byId("ask-error"), known ? error.message : "The server's answer cannot be read.");
    for (const column of columns) if (column.element.classList.contains("busy")) column.fail("No answer.");
    if (error.status === 401) this.#settings.wantKey();
  }

  #append(column) {
    this.#columns.push(column);
    this.element.append(column.element);
    this.#save();
  }

  #addAndPick() {
    const column = this.add([]);
    if (column) this.#pick(column, () => this.#remove(column));
    else notice(byId("ask-error"), `More than ${MAX_COLUMNS} columns are too many.`);
  }

  #pick(column, cancelled) {
    this.#picker.open(
      (name) => column.editor.has(name),
      (name) => {
        column.editor.add(name);
        column.element.querySelector("li:last-of-type input[type=range]")?.focus();
      },
      cancelled,
    );
  }

  #remove(column) {
    const at = this.#columns.indexOf(column);
    this.#columns.splice(at, 1);
    column.element.remove();
    this.#save();
    byId("add-column").focus();
  }

  #update(changed) {
    if (!this.#started) {
      this.#started = true;
      this.#start();
    }
    if (changed) {
      for (const column of this.#columns) column.editor.mark((name) => !!this.#store.adapter(name));
    }
  }

  /** The columns of the address, or one for each of the first adapters. */
  #start() {
    const mixes = new URLSearchParams(location.hash.slice(1)).getAll("mix").map(parseMix);
    const first = this.#store.adapters.slice(0, FIRST_MIXES).map((row) => [[row.name, 1]]);
    for (const mix of mixes.length || location.hash === "#base" ? mixes : first) this.add(mix);
    this.#save();
  }

  /** A slider on the move changes mixes more often than browsers let the address change. */
  #saveSoon() {
    clearTimeout(this.#saving);
    this.#saving = setTimeout(() => this.#save(), SAVE_MS);
  }

  /** Keeps the mixes in the address: a reload, or a link, shows the same columns. */
  #save() {
    clearTimeout(this.#saving);
    const mixes = this.#mixes();
    setText(byId("batch-note"), note(mixes.length));
    if (!this.#started) return;
    const hash = `#${mixes.map((mix) => `mix=${encodeURIComponent(formatMix(mix))}`).join("&") || "base"}`;
    if (location.hash !== hash) history.replaceState(null, "", hash);
  }

  #mixes() {
    return this.#columns.filter((column) => !column.isBase).map((column) => column.mix);
  }
}

const note = (n) => (n ? `the base and ${plural(n, "mix", "mixes")}, in one batch` : "the base alone");

/** One line of the answer: a status, a piece of a body, or an end. */
function take(column, line) {
  if (!column) return;
  if (line.error !== undefined) {
    column.fail(errorOf(line.status, line.error).message);
  } else if (line.body !== undefined) {
    column.push(line.body);
  }
  if (line.end) column.end();
}

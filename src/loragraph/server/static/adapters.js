// The table of adapters. Rows are kept by name and changed in place, so that focus stays.

import { announce, byId, h, notice, setAttribute, setText } from "./dom.js";
import { bytes, count, plural, scale } from "./format.js";
import { LoadForm } from "./load.js";
import { parseScale } from "./mix.js";
import { tint } from "./store.js";

const FIRST_SHOWN = 100; // of a longer table
const MORE_SHOWN = 500; // each time that more are asked for

// Key, heading, text of a row.
const CELLS = [
  ["rank", "Rank", (row) => count(row.rank)],
  ["targets", "Targets", (row) => count(row.n_targets)],
  ["coverage", "Coverage", (row) => coverage(row)],
  ["size", "Size", (row) => bytes(row.nbytes)],
  ["state", "State", (row) => stateOf(row)],
  ["generation", "Gen.", (row) => count(row.generation)],
  ["users", "In use by", (row) => count(row.n_users)],
  ["tokens", "Tokens", (row) => count(row.tokens)],
];

/** The share of the base's weights that an adapter changes. */
export function coverage({ n_targets, n_base_targets }) {
  return n_targets && n_base_targets ? `${Math.round((100 * n_targets) / n_base_targets)} %` : "–";
}

export function stateOf({ state, pinned }) {
  if (state === "resident") return pinned ? "pinned" : "in memory";
  return state === "loading" ? "loading" : "on disk";
}

/** Rows whose name holds the text, and how many of them are not among the first `limit`. */
export function select(rows, text, limit) {
  const wanted = text.trim().toLowerCase();
  const fit = wanted ? rows.filter((row) => row.name.toLowerCase().includes(wanted)) : rows;
  return { shown: fit.slice(0, limit), n_hidden: Math.max(fit.length - limit, 0), n_fit: fit.length };
}

export class AdapterTable {
  #api;
  #store;
  #poll;
  #rows = new Map(); // name -> row's parts
  #limit = FIRST_SHOWN;
  #filter = byId("adapters-filter");

  constructor(api, store, poll) {
    this.#api = api;
    this.#store = store;
    this.#poll = poll;
    this.body = h("tbody", { role: "rowgroup" });
    this.table = h("table", { role: "table", "aria-labelledby": "adapters-title" }, head(), this.body);
    this.empty = h("p", { class: "placeholder" });
    this.more = h("button", { type: "button", class: "quiet more", hidden: true });
    this.more.addEventListener("click", () => {
      this.#limit += MORE_SHOWN;
      this.#show();
    });
    byId("adapters-table").append(this.table, this.empty, this.more);
    this.#filter.addEventListener("input", () => this.#show());
    this.form = new LoadForm((fields) => this.#load(fields));
    store.subscribe((_state, changed) => changed && this.#show());
  }

  #show() {
    const all = this.#store.adapters;
    const { shown, n_hidden, n_fit } = select(all, this.#filter.value, this.#limit);
    const names = new Set(shown.map((row) => row.name));
    for (const [name, parts] of this.#rows) {
      if (!names.has(name)) this.#forget(name, parts);
    }
    let previous = null;
    for (const row of shown) {
      const parts = this.#rows.get(row.name) ?? this.#make(row.name);
      update(parts, row);
      const place = previous ? previous.nextSibling : this.body.firstChild;
      if (place !== parts.element) this.body.insertBefore(parts.element, place);
      previous = parts.element;
    }
    this.table.hidden = shown.length === 0;
    const none = all.length ? "No adapter has such a name." : "No adapters yet. Load one from the server's folder.";
    setText(this.empty, shown.length ? "" : none);
    this.more.hidden = n_hidden === 0;
    const next = Math.min(n_hidden, MORE_SHOWN);
    setText(this.more, `Show ${plural(next, "more adapter")}${next < n_hidden ? ` of ${count(n_hidden)}` : ""}`);
    setText(byId("adapters-note"), noteOf(all, n_fit));
  }

  #make(name) {
    const texts = CELLS.map(() => h("span"));
    const cells = CELLS.map(([key, heading], i) =>
      h("td", { role: "cell", class: `cell-${key}`, "data-label": heading }, texts[i]),
    );
    const cover = tint(h("span", { class: "cover", "aria-hidden": "true" }), name);
    cells[2].prepend(cover);
    const dot = tint(h("span", { class: "dot", "aria-hidden": "true" }), name);
    const title = h("span", { class: "name", translate: "no" }, name);
    const badge = h("span", { class: "badge", hidden: true }, "aLoRA");
    const head = h("th", { role: "rowheader", scope: "row" }, dot, title, badge);
    const input = h("input", {
      type: "number",
      step: 0.05,
      class: "default",
      "aria-label": `Default scale of ${name}`,
      onchange: () => this.#setDefault(name, input),
    });
    const button = (action, label) =>
      h("button", { type: "button", class: "small", "aria-label": `${label} ${name}`, onclick: action }, label);
    const pin = button(() => this.#pin(name), "Pin");
    const reload = button(() => this.#reload(name), "Reload");
    const unload = button(() => this.#unload(name, unload), "Unload");
    unload.addEventListener("blur", () => disarm(unload, name));
    const actions = h("td", { role: "cell", class: "actions" }, pin, reload, unload);
    const defaults = h("td", { role: "cell", class: "cell-default", "data-label": "Default scale" }, input);
    const element = h("tr", { role: "row", "data-adapter": name }, head, ...cells, defaults, actions);
    const parts = { element, cells, texts, cover, badge, input, pin, reload, unload };
    this.#rows.set(name, parts);
    return parts;
  }

  #forget(name, parts) {
    const hadFocus = parts.element.contains(document.activeElement);
    parts.element.remove();
    this.#rows.delete(name);
    if (hadFocus) this.#filter.focus();
  }

  #pin(name) {
    const pinned = this.#store.adapter(name)?.pinned;
    const route = pinned ? "v1/unpin_lora_adapter" : "v1/pin_lora_adapter";
    const done = pinned ? `${name} may leave memory.` : `${name} is pinned in memory.`;
    return this.#change(this.#rows.get(name).pin, done, () => this.#api.post(route, { lora_name: name }));
  }

  #reload(name) {
    const { file } = this.#store.adapter(name);
    const body = { lora_name: name, lora_path: file, load_inplace: true };
    const done = `${name} was read from its file.`;
    return this.#change(this.#rows.get(name).reload, done, () => this.#api.post("v1/load_lora_adapter", body));
  }

  /** The first press asks, the second unloads; leaving the button forgets the first. */
  #unload(name, button) {
    if (!button.classList.contains("armed")) {
      button.classList.add("armed");
      setText(button, "Really?");
      button.setAttribute("aria-label", `Really unload ${name}?`);
      return;
    }
    disarm(button, name);
    const file = this.#store.adapter(name)?.file;
    this.#change(button, `${name} is unloaded.`, async () => {
      await this.#api.post("v1/unload_lora_adapter", { lora_name: name });
      this.form.suggest(name, file);
    });
  }

  #load({ name, path, pin }) {
    const body = { lora_name: name, lora_path: path, pinned: pin };
    return this.#change(this.form.button, `${name} is loaded.`, () =>
      this.#api.post("v1/load_lora_adapter", body),
    );
  }

  /** The default of one adapter; the server's route takes the defaults of all. */
  #setDefault(name, input) {
    const value = input.value.trim() === "" ? 0 : parseScale(input.value);
    if (value === null) {
      input.value = this.#store.adapter(name)?.default_scale ?? 0;
      return;
    }
    this.#change(input, `Default scale of ${name}: ${scale(value)}.`, async () => {
      const now = await this.#api.get("lora-adapters"); // others may have changed theirs
      const scales = now.map((one) => ({ id: one.id, scale: one.name === name ? value : one.scale }));
      await this.#api.post("lora-adapters", scales.filter((one) => one.scale !== 0));
    });
  }

  /** Does what changes the server; tells the end of it; true where it went well. */
  async #change(control, done, action) {
    notice(byId("adapters-error"), "");
    control.setAttribute("aria-busy", "true");
    try {
      await action();
      announce(done);
      return true;
    } catch (error) {
      notice(byId("adapters-error"), error.message);
      return false;
    } finally {
      control.removeAttribute("aria-busy");
      this.#poll.now();
    }
  }
}

function head() {
  const heading = (text) => h("th", { role: "columnheader", scope: "col" }, text);
  const names = ["Name", ...CELLS.map(([, text]) => text), "Default scale"].map(heading);
  const actions = h("th", { role: "columnheader", scope: "col" }, h("span", { class: "hidden" }, "Actions"));
  return h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...names, actions));
}

function update(parts, row) {
  CELLS.forEach(([, , text], i) => setText(parts.texts[i], text(row)));
  const state = parts.cells[CELLS.findIndex(([key]) => key === "state")];
  setAttribute(state, "data-state", row.pinned ? "pinned" : row.state);
  showCoverage(parts.cover, row);
  setAttribute(parts.element, "title", row.file);
  parts.badge.hidden = !row.alora;
  if (document.activeElement !== parts.input) {
    const value = String(Number(row.default_scale.toFixed(4)));
    if (parts.input.value !== value) parts.input.value = value;
  }
  setText(parts.pin, row.pinned ? "Unpin" : "Pin");
  setAttribute(parts.pin, "aria-label", `${row.pinned ? "Unpin" : "Pin"} ${row.name}`);
  const verb = row.state === "absent" ? "Load" : "Reload";
  setText(parts.reload, verb);
  setAttribute(parts.reload, "aria-label", `${verb} ${row.name}`);
  setAttribute(parts.reload, "title", row.file ? null : "Its file is not in the server's folder.");
  parts.reload.disabled = !row.file;
}

/** A bar for each kind of weight: how much of it the adapter changes. */
function showCoverage(cover, row) {
  const kinds = Object.entries(row.coverage ?? {});
  const title = kinds.map(([kind, [n, all]]) => `${kind}: ${n} of ${all}`).join("\n");
  if (cover.title === title) return;
  cover.title = title;
  const bars = kinds.map(([, [n, all]]) => {
    const bar = h("span");
    bar.style.setProperty("--part", `${all ? (100 * n) / all : 0}%`);
    return bar;
  });
  cover.replaceChildren(...bars);
}

function disarm(button, name) {
  button.classList.remove("armed");
  setText(button, "Unload");
  button.setAttribute("aria-label", `Unload ${name}`);
}

function noteOf(all, n_fit) {
  const resident = all.filter((row) => row.state === "resident").length;
  const found = n_fit < all.length ? `${count(n_fit)} of ` : "";
  return all.length ? `${found}${plural(all.length, "name")}, ${count(resident)} in memory` : "";
}


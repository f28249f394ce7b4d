// The dialog in which an adapter is chosen for a column. One for the page; shows what fits.

import { h, setText } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { tint } from "./store.js";

const MAX_SHOWN = 60;

export class Picker {
  #store;
  #taken = () => false;
  #done = () => {};
  #cancelled = () => {};

  constructor(store) {
    this.#store = store;
    this.search = h("input", {
      type: "search",
      placeholder: "Name",
      "aria-label": "Search adapters",
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.#show(),
      onkeydown: (event) => this.#key(event),
    });
    this.list = h("ul", { class: "choices" });
    this.note = h("p", { class: "note", role: "status" });
    this.dialog = h(
      "dialog",
      {
        class: "picker",
        "aria-label": "Add an adapter",
        onkeydown: (event) => this.#move(event),
        onclick: (event) => event.target === this.dialog && this.dialog.close(),
        onclose: () => this.#cancelled(),
      },
      h(
        "form",
        { method: "dialog", onsubmit: (event) => event.preventDefault() },
        h("div", { class: "picker-head" }, this.search, this.#closeButton()),
        this.list,
        this.note,
      ),
    );
    document.body.append(this.dialog);
  }

  /**
   * Asks for an adapter; `taken` tells which cannot be chosen, `done` gets the name, `cancelled` is
   * called where none was chosen.
   */
  open(taken, done, cancelled = () => {}) {
    this.#taken = taken;
    this.#done = done;
    this.#cancelled = cancelled;
    this.search.value = "";
    this.#show();
    this.dialog.showModal();
    this.search.focus();
  }

  #closeButton() {
    return h(
      "button",
      { type: "button", class: "icon", "aria-label": "Close", onclick: () => this.dialog.close() },
      "×",
    );
  }

  #show() {
    const wanted = this.search.value.trim().toLowerCase();
    const fit = this.#store.adapters.filter((row) => row.name.toLowerCase().includes(wanted));
    this.list.replaceChildren(...fit.slice(0, MAX_SHOWN).map((row) => this.#choice(row)));
    const more = fit.length - MAX_SHOWN;
    let note = fit.length ? "" : "No adapter has such a name.";
    if (!this.#store.adapters.length) note = "The server has no adapters yet: load one below.";
    if (more > 0) note = `${plural(more, "more adapter")}: type a part of the name.`;
    setText(this.note, note);
  }

  #choice(row) {
    const facts = [row.rank ? `rank ${count(row.rank)}` : null, row.nbytes ? bytes(row.nbytes) : null];
    const button = h(
      "button",
      {
        type: "button",
        disabled: this.#taken(row.name),
        onclick: () => {
          this.#cancelled = () => {};
          this.dialog.close();
          this.#done(row.name);
        },
      },
      h("span", { class: "name", translate: "no" }, row.name),
      h("span", { class: "note" }, facts.filter(Boolean).join(" · ")),
    );
    return h("li", {}, tint(button, row.name));
  }

  /** Enter in the search takes the first choice. */
  #key(event) {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    this.list.querySelector("button:enabled")?.click();
  }

  #move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const stops = [this.search, ...this.list.querySelectorAll("button:enabled")];
    const at = stops.indexOf(document.activeElement);
    stops[Math.min(Math.max(at + step, 0), stops.length - 1)].focus();
    event.preventDefault();
  }
}

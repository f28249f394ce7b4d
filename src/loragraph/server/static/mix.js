// A mix of one column: adapters with scales, each with a slider and a number.

import { h } from "./dom.js";
import { scale as format } from "./format.js";
import { tint } from "./store.js";

const SLIDER_MAX = 2;
const LIMIT = 100; // of the number beside the slider; the server has its own

/** A scale from a text, or null for what is none. */
export function parseScale(text) {
  const value = text.trim() === "" ? NaN : Number(text);
  return Number.isFinite(value) && Math.abs(value) <= LIMIT ? value : null;
}

export class MixEditor {
  #rows = new Map(); // name -> {scale, element, ...}
  #changed;

  /** `changed` gets true while a scale is on the move, and nothing after an addition or removal. */
  constructor(label, changed) {
    this.#changed = changed;
    this.element = h("ul", { class: "mix", "aria-label": `Adapters of ${label}` });
  }

  /** [[name, scale], ...] in the order of the rows. */
  get mix() {
    return [...this.#rows].map(([name, row]) => [name, row.scale]);
  }

  has(name) {
    return this.#rows.has(name);
  }

  add(name, scale = 1) {
    if (this.#rows.has(name)) return;
    const row = { scale };
    this.#rows.set(name, row);
    this.#build(name, row);
    this.element.append(row.element);
    this.#changed();
  }

  remove(name) {
    const row = this.#rows.get(name);
    const next = row.element.nextElementSibling ?? row.element.previousElementSibling;
    row.element.remove();
    this.#rows.delete(name);
    next?.querySelector("input")?.focus();
    this.#changed();
  }

  /** Marks the adapters that the server does not have. */
  mark(isKnown) {
    for (const [name, row] of this.#rows) {
      const missing = !isKnown(name);
      row.element.classList.toggle("missing", missing);
      row.element.title = missing ? "The server has no adapter of this name now." : "";
    }
  }

  #build(name, row) {
    row.slider = h("input", {
      type: "range",
      min: 0,
      max: SLIDER_MAX,
      step: 0.05,
      value: row.scale,
      "aria-label": `Scale of ${name}`,
      oninput: () => this.#set(row, Number(row.slider.value), row.slider),
    });
    row.number = h("input", {
      type: "number",
      step: 0.05,
      min: -LIMIT,
      max: LIMIT,
      value: format(row.scale),
      "aria-label": `Scale of ${name} as a number`,
      oninput: () => this.#typed(row),
      onblur: () => this.#settle(row),
    });
    const remove = h(
      "button",
      { type: "button", class: "icon small", "aria-label": `Take ${name} out of the mix` },
      "×",
    );
    remove.addEventListener("click", () => this.remove(name));
    row.element = tint(
      h(
        "li",
        { "data-adapter": name },
        h("span", { class: "name", translate: "no", title: name }, name),
        row.number,
        remove,
        row.slider,
      ),
      name,
    );
    this.#fill(row);
  }

  #set(row, scale, from) {
    row.scale = scale;
    if (from !== row.number) row.number.value = String(scale);
    if (from !== row.slider) row.slider.value = String(scale);
    row.number.removeAttribute("aria-invalid");
    this.#fill(row);
    this.#changed(true);
  }

  #typed(row) {
    const scale = parseScale(row.number.value);
    if (scale === null) row.number.setAttribute("aria-invalid", "true");
    else this.#set(row, scale, row.number);
  }

  /** A number that is none gives way to the scale that counts. */
  #settle(row) {
    row.number.value = String(row.scale);
    row.number.removeAttribute("aria-invalid");
  }

  #fill(row) {
    const share = Math.min(Math.max(row.scale / SLIDER_MAX, 0), 1);
    row.slider.style.setProperty("--fill", `${100 * share}%`);
    row.element.classList.toggle("off", row.scale === 0);
  }
}

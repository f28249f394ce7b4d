// Sampling, the system prompt and the API key. The key stays in this tab's session.

import { byId, h, setText, toggle } from "./dom.js";
import { count, scale } from "./format.js";

const STORED = "loragraph.settings";
const KEY = "loragraph.key";
const DEFAULTS = { temperature: "0", top_p: "1", max_tokens: "200", seed: "", system: "" };

/** Storage that may be forbidden or full; the page works without it. */
function stored(name, value) {
  try {
    if (value === undefined) return sessionStorage.getItem(name);
    if (value === "") sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, value);
  } catch {
    return null;
  }
  return value;
}

export class Settings {
  #fields = {};
  #toggle = byId("settings-toggle");
  #panel = byId("settings");

  /** `keyChanged` is called when another API key was entered. */
  constructor(keyChanged) {
    const saved = { ...DEFAULTS, ...readSaved() };
    const number = (name, label, attributes) =>
      this.#field(name, label, h("input", { type: "number", ...attributes }), saved[name]);
    const system = h("textarea", { rows: 2, maxlength: 100_000, placeholder: "None" });
    this.key = h("input", {
      type: "password",
      autocomplete: "off",
      spellcheck: "false",
      placeholder: "Only if the server asks for one",
      oninput: () => {
        stored(KEY, this.key.value);
        keyChanged();
      },
    });
    this.key.value = stored(KEY) ?? "";
    this.#panel.append(
      number("temperature", "Temperature", { min: 0, max: 5, step: 0.1, required: true }),
      number("top_p", "Top-p", { min: 0.01, max: 1, step: 0.01, required: true }),
      number("max_tokens", "Max. tokens", { min: 1, max: 1_000_000, step: 1, required: true }),
      number("seed", "Seed", { min: 0, max: 4294967295, step: 1, placeholder: "any" }),
      labelled("API key", this.key, "of this tab only, never stored on disk"),
      this.#field("system", "System prompt", system, saved.system, "wide"),
    );
    this.#toggle.addEventListener("click", () => toggle(this.#toggle, this.#panel));
    this.#summarise();
  }

  get apiKey() {
    return this.key.value.trim();
  }

  /** Fields of a request. Empty ones are left to the server. */
  sampling() {
    const fields = {};
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      const value = this.#fields[name].value;
      if (value !== "") fields[name] = Number(value);
    }
    return fields;
  }

  /** The system message, if there is one. */
  system() {
    const content = this.#fields.system.value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  /** Whether all fields hold what they may; shows the first that does not. */
  check() {
    const wrong = Object.values(this.#fields).find((field) => !field.checkValidity());
    if (!wrong) return true;
    toggle(this.#toggle, this.#panel, true);
    wrong.reportValidity();
    return false;
  }

  /** Opens the settings at the key: the server wants one. */
  wantKey() {
    toggle(this.#toggle, this.#panel, true);
    this.key.focus();
  }

  #field(name, label, input, value, extra = "") {
    input.value = value;
    input.id = `setting-${name}`;
    input.addEventListener("input", () => this.#changed());
    this.#fields[name] = input;
    return labelled(label, input, "", extra);
  }

  #changed() {
    const values = Object.entries(this.#fields).map(([name, field]) => [name, field.value]);
    stored(STORED, JSON.stringify(Object.fromEntries(values)));
    this.#summarise();
  }

  #summarise() {
    const { temperature, max_tokens: tokens, seed } = this.sampling();
    const parts = [
      `temperature ${scale(temperature)}`,
      `${count(tokens)} tokens`,
      seed === undefined ? null : `seed ${seed}`,
      this.system().length ? "system prompt" : null,
    ];
    setText(byId("settings-summary"), parts.filter(Boolean).join(" · "));
  }
}

function labelled(text, input, hint = "", extra = "") {
  const label = h("label", { class: `field ${extra}` }, h("span", {}, text), input);
  if (hint) label.append(h("small", { class: "note" }, hint));
  return label;
}

function readSaved() {
  try {
    const saved = JSON.parse(stored(STORED) ?? "{}");
    const strings = Object.entries(saved).filter(([, value]) => typeof value === "string");
    return Object.fromEntries(strings);
  } catch {
    return {};
  }
}

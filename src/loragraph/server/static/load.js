// The form that loads an adapter from the server's folder.

import { byId, h, toggle } from "./dom.js";

export class LoadForm {
  #form = byId("load-form");
  #toggle = byId("load-toggle");

  /** `load({name, path, pin})` gives true where it went well. */
  constructor(load) {
    this.path = h("input", { required: true, maxlength: 1000, placeholder: "poem.gguf", ...plain });
    this.name = h("input", { maxlength: 128, placeholder: "as the file", ...plain });
    this.pin = h("input", { type: "checkbox" });
    this.button = h("button", { type: "submit", class: "primary" }, "Load");
    this.#form.append(
      h("label", { class: "field wide" }, h("span", {}, "File in the server's folder"), this.path),
      h("label", { class: "field" }, h("span", {}, "Name"), this.name),
      h("label", { class: "check" }, this.pin, h("span", {}, "Keep in memory")),
      this.button,
    );
    this.#toggle.addEventListener("click", () => {
      toggle(this.#toggle, this.#form);
      if (!this.#form.hidden) this.path.focus();
    });
    this.#form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (await load(this.#fields())) {
        this.#form.reset();
        toggle(this.#toggle, this.#form, false);
        this.#toggle.focus();
      }
    });
  }

  /** Fills the form with what was unloaded, so that it is easily taken back. */
  suggest(name, path) {
    this.name.value = name;
    this.path.value = path ?? "";
  }

  #fields() {
    const path = this.path.value.trim();
    return { path, name: this.name.value.trim() || nameOf(path), pin: this.pin.checked };
  }
}

const plain = { type: "text", autocomplete: "off", autocapitalize: "off", spellcheck: "false" };

/** The name of a file without its folders and ending. */
export const nameOf = (path) => path.replace(/^.*[/\\]/, "").replace(/\.gguf$/i, "");

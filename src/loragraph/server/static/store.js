// What the server said last, for those who show it. One state, replaced as a whole.

export class Store {
  #listeners = new Set();
  state = null;
  adapters = []; // rows of the table, by name
  #byName = new Map();

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Takes an answer of `api/state`: figures, and the rows that changed since the last one. */
  take(answer) {
    if (answer.all) this.#byName.clear();
    for (const name of answer.removed) this.#byName.delete(name);
    for (const row of answer.adapters) this.#byName.set(row.name, row);
    const changed = answer.all || answer.removed.length > 0 || answer.adapters.length > 0;
    if (changed) this.adapters = [...this.#byName.values()].sort(byName);
    this.state = answer;
    for (const listener of this.#listeners) listener(answer, changed);
  }

  adapter(name) {
    return this.#byName.get(name);
  }
}

const byName = (a, b) => (a.name < b.name ? -1 : 1);

const GOLDEN_ANGLE = 137.508;
const hues = new Map();

/** A hue of its own for each adapter's name, the same for as long as the page is open. */
export function hueOf(name) {
  if (!hues.has(name)) hues.set(name, Math.round((250 + hues.size * GOLDEN_ANGLE) % 360));
  return hues.get(name);
}

/** Gives an element an adapter's colour; through the object model, which the policy allows. */
export function tint(element, name) {
  element.classList.add("tinted");
  element.style.setProperty("--hue", hueOf(name));
  return element;
}

// One column: a mix, its answer as it streams, and what made it.

import { h, notice, setText } from "./dom.js";
import { count, percent, rate, scale, seconds } from "./format.js";
import { MixEditor } from "./mix.js";
import { EventReader } from "./sse.js";
import { messageOf } from "./api.js";
import { tint } from "./store.js";

let made = 0;

export class Column {
  history = []; // messages of the conversation so far, without the system prompt
  #answer = null; // of the run at hand
  #events = null;
  #frame = 0;
  #facts = new Map(); // name -> its element

  /** `isBase`: the column without adapters. `on`: changed(moves), pick(column), remove(column). */
  constructor(isBase, on) {
    this.isBase = isBase;
    made += 1;
    const label = isBase ? "the base" : `column ${made}`;
    this.title = h("h3", { id: `column-${made}`, translate: "no" });
    this.bar = h("div", { class: "mixbar", "aria-hidden": "true" });
    this.editor = new MixEditor(label, (moves) => {
      this.#name();
      on.changed(moves);
    });
    this.turns = h("div", { class: "turns" });
    this.error = h("p", { class: "notice", role: "alert", hidden: true });
    this.facts = h("dl", { class: "facts" });
    this.element = h(
      "article",
      { class: isBase ? "column panel is-base" : "column panel", "aria-labelledby": `column-${made}` },
      this.bar,
      h("header", {}, this.title, isBase ? null : this.#removeButton(label, on)),
      isBase ? null : this.#mixPart(label, on),
      h("div", { class: "answer" }, this.turns, this.error),
      this.facts,
    );
    this.#name();
    this.#placeholder();
  }

  get mix() {
    return this.editor.mix;
  }

  get name() {
    return this.title.textContent;
  }

  /** A run starts: the question stands, the answer is empty. */
  begin(question, keep) {
    if (!keep) this.history = [];
    if (!this.history.length) this.turns.replaceChildren();
    this.history.push({ role: "user", content: question });
    if (this.history.length > 1) this.turns.append(h("p", { class: "asked" }, question));
    const text = document.createTextNode("");
    this.#answer = {
      text,
      pending: "",
      started: performance.now(),
      first: null,
      pieces: 0,
      error: null,
      last: {},
      finish: null,
    };
    this.#events = new EventReader();
    this.#answer.element = h("p", { class: "text", "aria-busy": "true", dir: "auto" }, text);
    this.turns.append(this.#answer.element);
    this.element.classList.add("busy");
    notice(this.error, "");
    this.#showFacts();
  }

  /** A piece of the answer's body, in any cut. */
  push(text) {
    for (const data of this.#events.push(text)) {
      if (data === "[DONE]") continue;
      this.#take(JSON.parse(data));
    }
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#paint());
  }

  fail(message) {
    if (this.#answer) this.#answer.error = message;
    notice(this.error, message);
  }

  /** The run is over. `stopped`: by the person. */
  end(stopped = false) {
    const answer = this.#answer;
    if (!answer || !this.element.classList.contains("busy")) return;
    cancelAnimationFrame(this.#frame);
    this.#paint();
    answer.element.setAttribute("aria-busy", "false");
    this.element.classList.remove("busy");
    const content = answer.text.data;
    if (stopped && !answer.finish && !answer.error) answer.finish = "stopped";
    if (!answer.finish && !answer.error) this.fail("The answer broke off: the server went away.");
    // An unanswered question is no turn: the next one must not build on it.
    const unanswered = content === "" && (answer.error || answer.finish === "stopped");
    if (unanswered) this.history.pop();
    else this.history.push({ role: "assistant", content });
    answer.element.classList.toggle("empty", content === "" && !answer.error);
    this.#showFacts();
  }

  #take(chunk) {
    const answer = this.#answer;
    if (chunk.error) {
      this.fail(messageOf(chunk) ?? "The server failed while it answered.");
      return;
    }
    const choice = chunk.choices?.[0];
    const piece = choice?.delta?.content ?? "";
    if (piece) {
      answer.first ??= performance.now();
      answer.pieces += 1;
      answer.pending += piece;
    }
    answer.finish = choice?.finish_reason ?? answer.finish;
    for (const key of ["usage", "timings", "adapters"]) {
      if (chunk[key]) answer.last[key] = chunk[key];
    }
  }

  #paint() {
    this.#frame = 0;
    const answer = this.#answer;
    answer.text.appendData(answer.pending);
    answer.pending = "";
    this.#showFacts();
  }

  #showFacts() {
    const answer = this.#answer;
    const { usage, timings, adapters } = answer.last;
    const elapsed = answer.first === null ? null : (performance.now() - answer.first) / 1000;
    const streamed = answer.pieces > 1 && elapsed > 0.2 ? (answer.pieces - 1) / elapsed : null;
    const busy = this.element.classList.contains("busy");
    const prompt = usage?.prompt_tokens;
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n;
    this.facts.hidden = Boolean(answer.error) && answer.first === null;
    const rows = [
      ["tokens/s", rate(timings?.predicted_per_second ?? (busy ? streamed : null))],
      ["first token", seconds(answer.first === null ? null : (answer.first - answer.started) / 1000)],
      ["tokens", count(usage?.completion_tokens ?? (answer.pieces || null))],
      ["prompt", count(prompt)],
      ["from cache", prompt ? `${count(cached)} (${percent(cached, prompt)})` : "–"],
      ["end", busy ? "…" : endOf(answer)],
    ];
    rows.push(["made by", Array.isArray(adapters) ? madeBy(adapters) : ""]);
    for (const [name, value] of rows) this.#showFact(name, value);
  }

  #showFact(name, value) {
    if (!this.#facts.has(name)) {
      const fact = h("dd");
      this.#facts.set(name, fact);
      this.facts.append(h("div", { "data-fact": name }, h("dt", {}, name), fact));
    }
    const fact = this.#facts.get(name);
    setText(fact, value);
    fact.parentElement.hidden = value === "";
  }

  #name() {
    const mix = this.mix;
    const text = mix
      .map(([name, value]) => (value === 1 ? name : `${name} × ${scale(value)}`))
      .join(" + ");
    setText(this.title, this.isBase ? "base" : text || "base (no adapter yet)");
    this.bar.replaceChildren(
      ...mix
        .filter(([, value]) => value !== 0)
        .map(([name, value]) => {
          const part = tint(h("span"), name);
          part.style.setProperty("flex-grow", String(Math.max(Math.abs(value), 0.02)));
          return part;
        }),
    );
  }

  #mixPart(label, on) {
    const add = h("button", { type: "button", class: "quiet small add" }, "+ adapter");
    add.setAttribute("aria-label", `Add an adapter to ${label}`);
    add.addEventListener("click", () => on.pick(this));
    return h("div", { class: "mix-part" }, this.editor.element, add);
  }

  #removeButton(label, on) {
    const button = h("button", { type: "button", class: "icon small" }, "×");
    button.setAttribute("aria-label", `Remove ${label}`);
    button.addEventListener("click", () => on.remove(this));
    return button;
  }

  #placeholder() {
    const text = this.isBase ? "The base model, as it is." : "The base with this mix.";
    this.turns.replaceChildren(h("p", { class: "placeholder" }, text));
  }
}

function endOf(answer) {
  if (answer.error) return "error";
  const reasons = { stop: "complete", length: "at the limit", stopped: "stopped" };
  return reasons[answer.finish] ?? answer.finish ?? "–";
}

function madeBy(adapters) {
  if (!adapters.length) return "the base alone";
  return adapters
    .map((use) => {
      const off = use.active_from === null ? ", not invoked" : "";
      return `${use.name} × ${scale(use.scale)} (generation ${count(use.generation)}${off})`;
    })
    .join(", ");
}

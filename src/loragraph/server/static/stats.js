// Live figures: throughput over the last seconds, cells, cache hits, requests.

import { byId, h, setText, svg } from "./dom.js";
import { bytes, count, percent, plural, rate } from "./format.js";

const N_SAMPLES = 60;
const WIDTH = 120;
const HEIGHT = 28;
const WINDOW_S = 3; // a figure is the mean of these last seconds

/** Tokens a second between the newest sample and the one `window` seconds before it. */
export function recentRate(samples, key, window = WINDOW_S) {
  const last = samples.at(-1);
  if (!last) return null;
  const first = samples.findLast((one) => last.time_s - one.time_s >= window) ?? samples[0];
  const seconds = last.time_s - first.time_s;
  return seconds > 0 ? (last[key] - first[key]) / seconds : null;
}

/** Rates between neighbours, for the curve. */
export const rates = (samples, key) =>
  samples.slice(1).map((one, i) => {
    const seconds = one.time_s - samples[i].time_s;
    return seconds > 0 ? Math.max(one[key] - samples[i][key], 0) / seconds : 0;
  });

/** Points of a curve in a box of WIDTH by HEIGHT, newest at the right. */
export function points(values, most) {
  const step = WIDTH / (N_SAMPLES - 1);
  const left = WIDTH - (values.length - 1) * step;
  return values
    .map((value, i) => {
      const y = HEIGHT - 1 - (value / Math.max(most, 1)) * (HEIGHT - 3);
      return `${(left + i * step).toFixed(1)},${y.toFixed(1)}`;
    })
    .join(" ");
}

export class Stats {
  #samples = [];

  constructor(store) {
    this.line = svg("polyline", { fill: "none", stroke: "currentColor", "stroke-width": 1.5 });
    this.area = svg("polygon", { class: "area" });
    const curve = svg(
      "svg",
      { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area,
      this.line,
    );
    this.parts = ["in-use", "shared", "kept"].map((name) => h("span", { class: name }));
    this.speed = tile("tokens/s", curve);
    this.cells = tile("cells", h("div", { class: "cellbar", "aria-hidden": "true" }, ...this.parts));
    this.cache = tile("cache hits");
    this.requests = tile("requests");
    byId("stats").append(...[this.speed, this.cells, this.cache, this.requests].map((one) => one.element));
    store.subscribe((state) => this.#show(state));
  }

  #show({ time_s, counters, cells, requests, pool }) {
    const sample = { time_s, ...counters };
    // A server that was started again counts from zero.
    if (this.#samples.length && sample.time_s < this.#samples.at(-1).time_s) this.#samples = [];
    if (sample.time_s !== this.#samples.at(-1)?.time_s) this.#samples.push(sample);
    this.#samples = this.#samples.slice(-N_SAMPLES);
    this.#showSpeed();
    this.#showCells(cells);
    const detail = `${count(counters.hit)} of ${count(counters.prompt)} prompt tokens`;
    this.cache.set(percent(counters.hit, counters.prompt), detail);
    const waiting = requests.waiting ? `, ${count(requests.waiting)} waiting` : "";
    this.requests.set(
      `${count(requests.running)} running${waiting}`,
      `${plural(pool.resident, "adapter")}, ${bytes(pool.nbytes)}`,
    );
  }

  #showSpeed() {
    const values = rates(this.#samples, "generated");
    const curve = points(values, Math.max(...values, 0));
    this.line.setAttribute("points", curve);
    this.area.setAttribute("points", values.length ? `${firstX(curve)},${HEIGHT} ${curve} ${WIDTH},${HEIGHT}` : "");
    const prompt = recentRate(this.#samples, "prompt");
    this.speed.set(rate(recentRate(this.#samples, "generated")), `${rate(prompt)} of prompts`);
  }

  #showCells(cells) {
    const own = cells.in_use - cells.shared;
    const kept = Math.max(cells.used - cells.in_use, 0);
    [own, cells.shared, kept].forEach((n, i) => {
      this.parts[i].style.setProperty("flex-basis", `${(100 * n) / cells.total}%`);
    });
    this.cells.set(
      `${count(cells.used)} of ${count(cells.total)}`,
      `${count(cells.in_use)} in use, ${count(cells.shared)} shared, ${count(cells.total - cells.used)} free`,
    );
  }
}

const firstX = (curve) => curve.slice(0, curve.indexOf(","));

/** A figure with its name, a line below it, and perhaps a picture. */
function tile(name, picture = null) {
  const value = h("span", { class: "figure" }, "–");
  const detail = h("span", { class: "detail" }, "\u00a0");
  const element = h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, picture, detail));
  return {
    element,
    set(text, more) {
      setText(value, text);
      setText(detail, more);
    },
  };
}

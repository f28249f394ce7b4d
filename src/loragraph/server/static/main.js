// Puts the page together.

import { AdapterTable } from "./adapters.js";
import { Api } from "./api.js";
import { Columns } from "./columns.js";
import { byId, setText } from "./dom.js";
import { count } from "./format.js";
import { Picker } from "./picker.js";
import { Poll } from "./poll.js";
import { Settings } from "./settings.js";
import { Stats } from "./stats.js";
import { Store } from "./store.js";

const store = new Store();
const settings = new Settings(() => poll.now());
const api = new Api(() => settings.apiKey);
const poll = new Poll(api, store);
const columns = new Columns(api, store, new Picker(store), settings);
new Stats(store);
new AdapterTable(api, store, poll);

// -- asking ----------------------------------------------------------------------------------------

const question = byId("question");
const form = byId("ask");
const send = byId("send");
const stop = byId("stop");

async function ask() {
  if (columns.running || !settings.check()) return;
  const text = question.value.trim();
  if (!text) {
    question.focus();
    return;
  }
  send.disabled = true;
  stop.disabled = false;
  await columns.ask(text, byId("follow").checked);
  const stopHadFocus = document.activeElement === stop;
  send.disabled = false;
  stop.disabled = true;
  if (stopHadFocus || document.activeElement === document.body) question.focus();
}

function grow() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

// Not by its address, which holds the mixes.
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  question.focus();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
question.addEventListener("input", grow);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
stop.addEventListener("click", () => columns.stop());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) columns.stop();
});

// -- theme -----------------------------------------------------------------------------------------

const THEMES = { auto: "as the system", light: "light", dark: "dark" };
const theme = byId("theme");

function showTheme() {
  const now = document.documentElement.dataset.theme;
  theme.setAttribute("aria-label", `Theme: ${THEMES[now]}`);
  theme.title = `Theme: ${THEMES[now]}`;
}

theme.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const now = document.documentElement.dataset.theme;
  const next = names[(names.indexOf(now) + 1) % names.length];
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("loragraph.theme", next);
  } catch {
    // It holds until the page is left.
  }
  showTheme();
});
showTheme();

// -- the server's name -----------------------------------------------------------------------------

store.subscribe(({ base, version }) => {
  setText(byId("base"), base.name);
  byId("base").title = `${base.name}: at most ${count(base.n_ctx)} tokens a request`;
  setText(byId("version"), `loragraph ${version}`);
  document.title = `${base.name} · loragraph`;
});

poll.now();

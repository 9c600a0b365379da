// The page: which view is open, the line at the top, the key and the theme.

import { apiKey } from "./api.js";
import * as chat from "./chat/chat.js";
import { $, el } from "./dom.js";
import { EngineView } from "./engine/engine.js";
import { Feed } from "./engine/feed.js";
import { drawIcons } from "./icons.js";

const VIEWS = ["chat", "engine"];
const feed = new Feed();
const engine = new EngineView(feed);

function open() {
  const [named] = location.hash.slice(1).split("/");
  const view = VIEWS.includes(named) ? named : "chat";
  document.body.dataset.view = view;
  for (const each of VIEWS) {
    $(each).hidden = each !== view;
    if (each === view) $(`tab-${each}`).ariaCurrent = "page";
    else $(`tab-${each}`).ariaCurrent = null;
  }
  document.querySelector(".skip").hash = view === "chat" ? "prompt" : "charts";
  feed.watching = view === "engine";
  engine.draw();
  engine.drawExperts();
}

function showState() {
  const { state, phase, samples } = feed, last = samples.at(-1)?.values;
  const missing = state === "ready" && last && last.up < last.engines.length;
  $("state").dataset.state = missing ? "degraded" : state;
  const text = missing ? `${last.up} of ${last.engines.length} engines` : state === "ready" || state === phase ? state : state === "unreachable" ? "reconnecting" : `${state}: ${phase}`;
  if ($("state").textContent !== text) $("state").textContent = text; // only changes are announced
  $("state").title = phase;
  document.body.classList.toggle("stale", state === "unreachable");
}

function showPulse() {
  const last = feed.samples.at(-1)?.values;
  const cells = [
    ["tokens/s", last && (last.tokens < 10 ? last.tokens.toFixed(1) : Math.round(last.tokens).toLocaleString())],
    ["running", last?.running],
    ["waiting", last?.waiting],
    ["KV", last && `${(100 * last.kv).toFixed(0)} %`],
  ];
  $("pulse").replaceChildren(...cells.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value ?? "–")))));
}

function askForKey(why) {
  if ($("key-dialog").open) return;
  if (why) $("key-why").textContent = why;
  $("key-value").value = apiKey.get();
  $("key-dialog").showModal();
  $("key-value").select();
}

function setUpKey() {
  let declined = false;
  addEventListener("key-needed", () => {
    if (declined) return; // once said no, the button is there
    askForKey(apiKey.get() ? "This key is not known to the server." : "This server needs an API key. This tab keeps it until it is closed.");
  });
  $("key").addEventListener("click", () => askForKey());
  $("key-value").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // it would press the first button, which is Cancel
    $("key-save").click();
  });
  $("key-dialog").addEventListener("close", () => {
    declined = $("key-dialog").returnValue !== "save";
    if (!declined) apiKey.set($("key-value").value.trim());
  });
}

$("theme").addEventListener("click", () => {
  const theme = globalThis.moeserveTheme.next();
  $("theme").ariaLabel = `Theme: ${theme || "as the system"}`;
  $("theme").title = $("theme").ariaLabel;
});
feed.addEventListener("state", showState);
feed.addEventListener("sample", () => { showState(); showPulse(); });
feed.addEventListener("models", ({ detail }) => {
  const [first] = detail;
  $("model").textContent = first;
  document.title = `${first} · moeserve`;
  chat.setModels(detail);
});
addEventListener("hashchange", open);
drawIcons();
setUpKey();
showPulse();
open();
chat.setUp();
feed.start();

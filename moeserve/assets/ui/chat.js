// The playground: the conversation, and the one request that may be running.

import { ApiError, events, request } from "./api.js";
import { $, el } from "./dom.js";
import * as settings from "./settings.js";
import { AnswerView, toolTurn, userTurn } from "./turn.js";

const STORED = "moeserve.turns";
const IDEAS = [
  ["Tell a story", "Tell me a story about a fox and a lantern."],
  ["Explain", "What is expert parallelism?"],
  ["Use a tool", "What is the weather in Oslo?"],
];

let turns = [];
let running = null; // AbortController of the request in flight
let model = "";

const composer = $("composer"), prompt = $("prompt"), list = $("turns");

/** Connects the playground with the page. */
export function setUp() {
  settings.setUp();
  try {
    turns = JSON.parse(sessionStorage.getItem(STORED) ?? "[]");
  } catch { /* a new conversation then */ }
  composer.addEventListener("submit", (event) => {
    event.preventDefault();
    ask(prompt.value);
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    composer.requestSubmit();
  });
  prompt.addEventListener("input", grow);
  $("stop").addEventListener("click", stop);
  addEventListener("keydown", (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && stop());
  $("clear").addEventListener("click", () => {
    stop();
    turns = [];
    show();
    prompt.focus();
  });
  show();
}

/** Names the model in requests from now on. */
export function setModel(name) {
  model = name;
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, 220)}px`;
}

function ask(text) {
  if (running || !text.trim() || !settings.valid()) return;
  prompt.value = "";
  grow();
  turns.push({ role: "user", content: text });
  answer();
}

function stop() {
  running?.abort();
}

/** Draws the whole conversation anew. Returns the views of its answers. */
function show() {
  const views = turns.map((turn, at) => {
    if (turn.role === "user") return { node: userTurn(turn, () => edit(at)) };
    if (turn.role === "tool") return { node: toolTurn(turn) };
    const answered = turns[at + 1]?.role === "tool";
    return new AnswerView(Object.assign(turn, { answered }), {
      onRegenerate: () => regenerate(at),
      onResults: (results) => sendResults(at, results),
    });
  });
  list.replaceChildren(...(views.length ? views.map((view) => view.node) : [welcome()]));
  keep();
  return views;
}

function welcome() {
  const ideas = IDEAS.map(([title, text]) => el("button", {
    type: "button", className: "idea",
    onclick: () => {
      if (title === "Use a tool") settings.insertExampleTool();
      prompt.value = text;
      grow();
      prompt.focus();
    },
  }, el("strong", {}, title), text));
  return el("div", { className: "welcome" }, el("h2", {}, "Talk to the model"),
    el("p", { className: "muted" }, "Everything here goes through the same API that programs use; each answer shows its request as curl."),
    el("div", { className: "ideas" }, ...ideas));
}

function edit(at) {
  if (running) return;
  prompt.value = turns[at].content;
  turns = turns.slice(0, at);
  show();
  grow();
  prompt.focus();
}

function regenerate(at) {
  if (running || !settings.valid()) return;
  turns = turns.slice(0, at);
  answer();
}

function sendResults(at, results) {
  if (running || !settings.valid()) return;
  turns = [...turns.slice(0, at + 1), ...results];
  answer();
}

/** Asks for an answer to the conversation as it is, and shows it while it comes. */
async function answer() {
  const { system, fields } = settings.requestFields();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns.filter(sendable).map(asMessage)];
  const body = { ...(model ? { model } : {}), messages, ...fields, stream: true, stream_options: { include_usage: true } };
  const turn = { role: "assistant", content: "", request: body, beganAt: performance.now() };
  turns.push(turn);
  const view = show().at(-1);
  running = new AbortController();
  busy(true);
  list.scrollTop = list.scrollHeight;
  try {
    const response = await request("v1/chat/completions", { method: "POST", body, signal: running.signal });
    for await (const chunk of events(response)) {
      const below = list.scrollHeight - list.scrollTop - list.clientHeight;
      view.add(chunk);
      if (below < 60) requestAnimationFrame(() => { list.scrollTop = list.scrollHeight; });
    }
  } catch (error) {
    if (error.name === "AbortError") turn.stopped = true;
    else turn.error = error instanceof ApiError ? { ...error, message: error.message } : { message: String(error) };
  }
  if (!turn.finish) delete turn.tool_calls; // cut off: their arguments are not whole
  turn.endedAt = performance.now();
  turn.ended = true;
  running = null;
  view.end();
  busy(false);
  keep();
  if (list.scrollHeight - list.scrollTop - list.clientHeight < 400) list.scrollTop = list.scrollHeight;
  $("spoken").textContent = turn.error ? "" : spoken(turn);
  (view.firstInput ?? prompt).focus({ preventScroll: true });
}

function spoken(turn) {
  if (turn.stopped) return "Stopped.";
  const calls = (turn.tool_calls ?? []).map((call) => `The model calls ${call.function.name}.`);
  return [turn.content, ...calls].join(" ");
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
}

const sendable = (turn) => turn.role !== "assistant" || turn.content || turn.tool_calls;

/** Returns a turn as the API takes it. */
function asMessage(turn) {
  if (turn.role === "user") return { role: "user", content: turn.content };
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.tool_call_id, content: turn.content };
  const message = { role: "assistant", content: turn.content };
  if (turn.tool_calls) Object.assign(message, { tool_calls: turn.tool_calls, content: turn.content || null });
  if (turn.reasoning) message.reasoning_content = turn.reasoning;
  return message;
}

/** Keeps the conversation for a reload of this tab, if there is room. */
function keep() {
  try {
    sessionStorage.setItem(STORED, JSON.stringify(turns.filter((turn) => turn.role !== "assistant" || turn.ended)));
  } catch { /* full: it lasts as long as the page then */ }
}

// The view of conversations: connects the open one, the list and the settings with the page.

import { tab } from "../browser-storage.js";
import { $ } from "../dom.js";
import { Drawer } from "../drawer.js";
import { openMenu } from "../menu.js";
import { notice } from "../notice.js";
import * as composer from "./composer.js";
import { answers, Conversation, newRecord } from "./conversation.js";
import * as library from "./library.js";
import { ConversationList } from "./list.js";
import * as settings from "./settings.js";
import { openStore } from "./store.js";
import { listen } from "./tabs.js";
import { Thread } from "./thread.js";
import * as unsaved from "./unsaved.js";
import { welcome } from "./welcome.js";

const DRAFT = "moeserve.draft"; // settings of a conversation that is not kept yet

let store;
let open; // the conversation that is shown
let thread;
let list;
let drawers;

/** Connects the view with the page. */
export async function setUp() {
  store = await openStore();
  drawers = [
    new Drawer({
      panel: $("conversations"),
      button: $("show-conversations"),
      room: "(min-width: 900px)",
      key: "moeserve.list",
    }),
    new Drawer({
      panel: $("panel"),
      button: $("show-settings"),
      room: "(min-width: 1200px)",
      key: "moeserve.panel",
    }),
  ];
  thread = new Thread({ list: $("turns"), toEnd: $("to-end"), welcome, actions: turnActions() });
  list = new ConversationList({
    node: $("conversation-list"),
    search: $("search"),
    actionsOf,
    onRename: (record, title) => rename(record, title),
  });
  settings.setUp({ onChange: keepSettings, onInvalid: () => drawers[1].open() });
  composer.setUp({ onSend: ask, onStop: () => open.stop() });
  listen({
    onChange: (id) => {
      drawList();
      if (id === open.id) open.refresh();
    },
    isAnswering: (id) => answers.has(id),
  });
  setUpButtons();
  addEventListener("keydown", (event) => {
    const free = !document.querySelector("dialog[open], [popover]:popover-open");
    if (event.key === "Escape" && free && !drawers.some((drawer) => drawer.covers)) open.stop();
  });
  await unsaved.restore(store);
  addEventListener("pagehide", () => unsaved.keep(answers));
  addEventListener("pageshow", ({ persisted }) => persisted && unsaved.forget());
  addEventListener("hashchange", () => openFromAddress());
  await openFromAddress();
}

/** Offers the server's models. */
export function setModels(names) {
  settings.offerModels(names);
}

function setUpButtons() {
  $("new").addEventListener("click", () => begin());
  $("title-menu").addEventListener("click", (event) => openMenu(event.currentTarget, [
    ["Rename", async () => rename(open.record, await library.askForTitle(open.record.title))],
    ...actionsOf(open.record),
  ]));
  $("list-menu").addEventListener("click", (event) => openMenu(event.currentTarget, [
    ["Import…", () => $("import").click()],
    ["Export all", () => library.exportAll(store)],
    ["Delete all…", () => removeAll()],
  ]));
  $("import").addEventListener("change", async (event) => {
    await importFiles([...event.target.files]);
    event.target.value = "";
  });
}

function turnActions() {
  const fields = settings.requestFields;
  const checked = (act) => (message, ...rest) => {
    if (!open.isBusy && settings.valid()) {
      thread.follow();
      act(message, ...rest);
    }
  };
  return {
    onEdit: checked((message, text) => open.edit(message, text, fields())),
    onRegenerate: checked((message) => open.regenerate(message, fields())),
    onContinue: checked((message) => open.continueAnswer(message, fields())),
    onResults: checked((message, results) => open.sendResults(message, results, fields())),
    onRewrite: (message, text) => open.rewrite(message, text),
    onBranch: (message) => open.choose(message),
    bodyOf: (message) => open.bodyOf(message),
    elsewhere: (message) => (open.isElsewhere(message) ? "another tab receives this answer" : ""),
  };
}

function ask(text) {
  if (open.isBusy || !settings.valid()) return false;
  thread.follow();
  open.ask(text, settings.requestFields());
  return true;
}

/** Opens the conversation that the address names, or a new one. */
async function openFromAddress() {
  const [view, id] = location.hash.slice(1).split("/");
  if (open && view === "engine") return; // nothing of it is shown
  if (open && (id === open.id || (!id && !open.isKept))) return;
  const found = id ? await Conversation.open(store, id) : null;
  if (id && !found) {
    notice("There is no such conversation in this browser.");
    history.replaceState(null, "", "#chat");
  }
  if (found) show(found);
  else begin();
  drawList();
}

/** Shows a new conversation. */
function begin() {
  if (location.hash.includes("/")) history.pushState(null, "", "#chat");
  const draft = JSON.parse(tab.get(DRAFT));
  show(new Conversation(store, newRecord(draft ?? settings.defaults())));
  drawList();
  composer.focus();
}

function show(conversation) {
  open = conversation;
  thread.clear();
  settings.show(open.record.settings);
  for (const drawer of drawers) drawer.uncover();
  const only = (act) => (event) => open === conversation && act(event.detail);
  open.addEventListener("change", () => (open === conversation ? draw() : drawList()));
  open.addEventListener("grown", only((message) => thread.grow(message)));
  open.addEventListener("answered", only(answered));
  open.addEventListener("settings", only(() => settings.show(open.record.settings)));
  open.addEventListener("gone", only(() => {
    notice("This conversation was deleted in another tab.");
    begin();
  }));
  draw();
  open.settle();
}

function draw() {
  const address = open.isKept ? `#chat/${open.id}` : "#chat";
  $("tab-chat").href = address;
  if (open.isKept && !location.hash.startsWith("#engine")) {
    history.replaceState(null, "", address);
    tab.remove(DRAFT);
  }
  $("title").textContent = open.record.title || "New conversation";
  $("title-menu").hidden = !open.isKept;
  thread.show(open.path, (message) => open.tree.siblings(message));
  composer.showBusy(open.isBusy, Boolean(open.answer));
  drawList();
}

function answered(message) {
  const calls = (message.tool_calls ?? []).map((call) => `The model calls ${call.function.name}.`);
  const said = message.stopped ? "Stopped." : [message.content, ...calls].join(" ");
  $("spoken").textContent = message.error ? "" : said;
  const active = document.activeElement;
  if (active?.value || active?.closest(".drawer")) return; // somebody is writing
  const input = thread.inputOf(message);
  if (input) input.focus({ preventScroll: true });
  else composer.focus();
}

async function drawList() {
  const busy = new Set([...answers.values()].map(({ message }) => message.conversation));
  list.show(await store.list(), { open: open.id, busy });
}

function keepSettings(values) {
  open.changeSettings(values);
  if (!open.isKept) tab.set(DRAFT, JSON.stringify(values));
}

function actionsOf(record) {
  return [
    ["Export as JSON", () => library.exportJson(store, record)],
    ["Export as Markdown", () => library.exportMarkdown(store, record)],
    ["Delete", () => remove(record)],
  ];
}

async function rename(record, title) {
  if (!title) return;
  if (record.id === open.id) await open.rename(title);
  else await store.patch(record.id, { title, named: true });
  drawList();
}

async function remove(record) {
  stopAnswersOf(record.id);
  await library.remove(store, record, () => {
    location.hash = `chat/${record.id}`;
    drawList();
  });
  if (record.id === open.id) begin();
  drawList();
}

async function removeAll() {
  if (!(await library.removeAll(store))) return;
  for (const { message } of answers.values()) stopAnswersOf(message.conversation);
  begin();
}

function stopAnswersOf(id) {
  for (const answer of answers.values()) {
    if (answer.message.conversation === id) answer.stop();
  }
}

async function importFiles(files) {
  const first = await library.importFiles(store, files);
  if (first) location.hash = `chat/${first}`;
  drawList();
}

// Conversations as files: JSON to keep and to import, Markdown to read.

import { el } from "../dom.js";
import { newId, Tree } from "./tree.js";
import { titleOf } from "./conversation.js";

const FORMAT = "moeserve.conversations";
const VERSION = 1;
const KEPT = { // the fields of messages that are imported, by type
  string: ["content", "reasoning", "finish", "tool_call_id", "name", "prefix"],
  number: ["beganAt", "firstAt", "answeredAt", "endedAt"],
  boolean: ["cut", "edited", "stopped", "interrupted"],
};
const KEPT_OBJECTS = ["fields", "usage", "error"];

/** Saves a text as a file. */
export function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Returns the name of a file for a conversation. */
export function fileName(title, extension) {
  const words = title.normalize("NFKC").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${words.slice(0, 60).toLowerCase() || "conversation"}.${extension}`;
}

/** Returns conversations, {conversation, messages} each, as JSON. */
export function toJson(all) {
  const conversations = all.map(({ conversation, messages }) => ({
    ...conversation,
    messages: new Tree(messages).all().map(({ conversation: _, ...message }) => message),
  }));
  const exported = new Date().toISOString();
  return JSON.stringify({ format: FORMAT, version: VERSION, exported, conversations }, null, 1);
}

/** Returns the branch of a conversation that is shown, as Markdown. */
export function toMarkdown({ conversation, messages }) {
  const path = new Tree(messages, conversation.chosen).path();
  const { system } = conversation.settings;
  const parts = [`# ${conversation.title}`];
  if (system) parts.push("## System", system);
  for (const message of path) parts.push(...sectionOf(message));
  return `${parts.join("\n\n")}\n`;
}

function sectionOf(message) {
  if (message.role === "user") return ["## You", message.content];
  if (message.role === "tool") return [`## Result of ${message.name}`, fenced(message.content)];
  const parts = ["## Assistant"];
  if (message.reasoning) {
    parts.push(`<details><summary>Thoughts</summary>\n\n${message.reasoning}\n\n</details>`);
  }
  if (message.content) parts.push(message.content);
  for (const { function: called } of message.tool_calls ?? []) {
    parts.push(`Calls \`${called.name}\`:`, fenced(called.arguments, "json"));
  }
  return parts;
}

function fenced(text, language = "") {
  const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/**
 * Returns the conversations in a file, {conversation, messages} each, with ids of their own.
 *
 * Reads what `toJson` writes, and the messages of a request: [{role, content}, ...] or {messages}.
 * Throws Error with the reason for anything else.
 */
export function fromJson(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`it is not JSON: ${error.message}`, { cause: error });
  }
  if (value?.format === FORMAT) {
    if (value.version !== VERSION) throw new Error(`version ${value.version} is not known`);
    if (!Array.isArray(value.conversations)) throw new Error("it has no list of conversations");
    return value.conversations.map(conversationOf);
  }
  const messages = Array.isArray(value) ? value : value?.messages;
  if (!Array.isArray(messages)) throw new Error("it has neither conversations nor messages");
  return [conversationOf(chained(messages))];
}

/** Returns the messages of a request as a conversation without branches. */
function chained(messages) {
  if (!messages.every(isObject)) throw new Error("a message is not an object");
  const isSystem = ({ role }) => role === "system" || role === "developer";
  const system = messages.filter(isSystem).map((message) => textOf(message.content)).join("\n\n");
  const rest = messages.filter((message) => !isSystem(message));
  return {
    settings: system ? { system } : {},
    messages: rest.map((message, at) => ({
      ...message,
      id: String(at),
      parent: at ? String(at - 1) : null,
      content: textOf(message.content),
      reasoning: message.reasoning_content ?? message.reasoning,
      name: message.name ?? (message.role === "tool" ? "tool" : undefined),
    })),
  };
}

function textOf(content) {
  if (!Array.isArray(content)) return content ?? "";
  return content.map((part) => part?.text ?? "").join("");
}

function conversationOf(given) {
  if (!Array.isArray(given?.messages) || !given.messages.length) {
    throw new Error("a conversation has no messages");
  }
  const id = newId();
  const ids = new Map(given.messages.map((message) => [message?.id, newId()]));
  const now = Date.now();
  const before = new Set();
  const messages = given.messages.map((message, at) => {
    const kept = messageOf(message);
    const parent = parentOf(message, before, ids);
    before.add(message.id);
    const created = Number.isFinite(message.created) ? message.created : now + at;
    return { ...kept, id: ids.get(message.id), conversation: id, parent, created, ended: true };
  });
  const chosen = Object.entries(isObject(given.chosen) ? given.chosen : {});
  const title = typeof given.title === "string" ? given.title.slice(0, 200) : "";
  const conversation = {
    id,
    title: title || titleOf(messages[0].content),
    named: Boolean(given.named),
    created: Number.isFinite(given.created) ? given.created : now,
    updated: Number.isFinite(given.updated) ? given.updated : now,
    settings: isObject(given.settings) ? given.settings : {},
    chosen: Object.fromEntries(chosen.map(([from, to]) => [ids.get(from) ?? "", ids.get(to)])),
  };
  return { conversation, messages };
}

/** Returns the new id of a message's parent, which has to stand before it: there are no circles. */
function parentOf({ parent }, before, ids) {
  if (parent == null) return null;
  if (before.has(parent)) return ids.get(parent);
  throw new Error("a message does not come after the message that it belongs to");
}

function messageOf(message) {
  if (!isObject(message)) throw new Error("a message is not an object");
  if (!["user", "assistant", "tool"].includes(message.role)) {
    throw new Error(`a message has the role ${JSON.stringify(message?.role)}`);
  }
  if (typeof message.content !== "string") throw new Error("a message has no text");
  const kept = { role: message.role };
  for (const [type, names] of Object.entries(KEPT)) {
    for (const name of names) {
      if (typeof message[name] === type) kept[name] = message[name];
    }
  }
  for (const name of KEPT_OBJECTS) if (isObject(message[name])) kept[name] = message[name];
  if (isListOf(isToken, message.tokens)) kept.tokens = message.tokens;
  if (message.tool_calls?.length) {
    if (!isListOf(isCall, message.tool_calls)) throw new Error("a call has no function");
    kept.tool_calls = message.tool_calls;
  }
  return kept;
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isListOf = (isOne, value) => Array.isArray(value) && value.length > 0 && value.every(isOne);
const isSample = (entry) => typeof entry?.token === "string" && typeof entry.logprob === "number";
const isToken = (entry) => (
  isSample(entry) && (!entry.top_logprobs?.length || isListOf(isSample, entry.top_logprobs)));
const isCall = (call) => (
  typeof call?.function?.name === "string" && typeof call.function.arguments === "string");

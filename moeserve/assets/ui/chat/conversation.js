// The open conversation: what its messages are, what is added to them, and the answers that come.

import { Answer, endAnswer } from "./answer.js";
import { requestBody } from "./request.js";
import { isAnsweredElsewhere } from "./tabs.js";
import { newId, Tree } from "./tree.js";

const TITLE_CHARS = 60;

/** The answers that this tab receives, by the ids of their messages. */
export const answers = new Map();

/** Returns a conversation that nothing was said in. */
export function newRecord(settings) {
  const now = Date.now();
  return { id: newId(), title: "", named: false, created: now, updated: now, settings, chosen: {} };
}

/**
 * Fires "change" when its messages changed, "grown" and "answered" for an answer, and "settings"
 * and "gone" when another tab changed its settings or deleted it.
 */
export class Conversation extends EventTarget {
  #store;
  #elsewhere = new Set(); // answers that other tabs receive
  #isWhole = false; // whether all of it is stored, as far as this tab knows
  isKept = false;

  constructor(store, record, messages = []) {
    super();
    this.#store = store;
    this.record = record;
    this.tree = new Tree(messages, record.chosen);
    for (const { message } of answers.values()) {
      if (message.conversation === record.id) this.tree.put(message);
    }
    for (const answer of this.#answers()) this.#follow(answer);
  }

  /** Returns the conversation of an id; null if there is none. */
  static async open(store, id) {
    const found = await store.load(id);
    if (!found) return null;
    const conversation = new Conversation(store, found.conversation, found.messages);
    conversation.isKept = true;
    conversation.#isWhole = true;
    return conversation;
  }

  get id() {
    return this.record.id;
  }

  get path() {
    return this.tree.path();
  }

  /** The answer that this tab receives at the end of the path. */
  get answer() {
    return answers.get(this.path.at(-1)?.id);
  }

  /** Whether the path ends with an answer that has not ended. */
  get isBusy() {
    const last = this.path.at(-1);
    return last?.role === "assistant" && !last.ended;
  }

  isElsewhere(message) {
    return this.#elsewhere.has(message.id);
  }

  /** Adds a message of the user, and asks for an answer. `fields`: those of the request. */
  async ask(content, fields) {
    const question = this.#message("user", this.path.at(-1)?.id ?? null, { content });
    await this.#add([question]);
    this.#ask(question.id, { fields });
  }

  /** Asks another question in the place of a message. */
  async edit(message, content, fields) {
    const question = this.#message("user", message.parent, { content });
    await this.#add([question]);
    this.#ask(question.id, { fields });
  }

  /** Asks for another answer. */
  regenerate(message, fields) {
    this.#ask(message.parent, { fields });
  }

  /** Asks for the rest of an answer that was cut. The answer so far stays as a branch. */
  continueAnswer(message, fields) {
    this.#ask(message.parent, { fields, prefix: message.content });
  }

  /** Puts a text that the user wrote in the place of an answer. */
  async rewrite(message, content) {
    const { reasoning, tool_calls, fields, finish } = message;
    const kept = { content, reasoning, tool_calls, fields, finish, ended: true, edited: true };
    await this.#add([this.#message("assistant", message.parent, kept)]);
  }

  /** Adds the results of an answer's calls, and asks for the answer to them. */
  async sendResults(message, results, fields) {
    const added = [];
    for (const result of results) {
      added.push(this.#message("tool", added.at(-1)?.id ?? message.id, result));
    }
    await this.#add(added);
    this.#ask(added.at(-1).id, { fields });
  }

  /** Shows another branch. */
  choose(message) {
    this.tree.choose(message);
    this.#changed();
    if (this.isKept) this.#store.patch(this.id, { chosen: this.tree.chosen });
  }

  /** Keeps changed settings, once the conversation itself is kept. */
  changeSettings(settings) {
    this.record.settings = settings;
    if (this.isKept) this.#store.patch(this.id, { settings });
  }

  rename(title) {
    Object.assign(this.record, { title, named: true });
    this.#changed();
    return this.#store.patch(this.id, { title, named: true });
  }

  /** Returns the request that an answer came from. */
  bodyOf(message) {
    return requestBody(this.tree.before(message), message);
  }

  stop() {
    this.answer?.stop();
  }

  /** Takes in what other tabs changed. */
  async refresh() {
    if (!this.isKept) return;
    const found = await this.#store.load(this.id);
    if (!found) {
      for (const answer of this.#answers()) answer.stop();
      this.dispatchEvent(new Event("gone"));
      return;
    }
    const { title, named, settings } = found.conversation;
    const isNew = JSON.stringify(settings) !== JSON.stringify(this.record.settings);
    Object.assign(this.record, { title, named, settings });
    if (isNew) this.dispatchEvent(new Event("settings"));
    for (const message of found.messages) {
      const known = this.tree.messages.get(message.id);
      const isSettled = known && (known.role !== "assistant" || known.ended);
      if (!isSettled && !answers.has(message.id)) this.tree.put(message);
    }
    this.#changed();
    await this.settle();
  }

  /** Takes up the answers that no tab receives any more: those of a page that was closed. */
  async settle() {
    const open = [...this.tree.messages.values()].filter((message) => (
      message.role === "assistant" && !message.ended && !answers.has(message.id)));
    for (const message of open) {
      if (await isAnsweredElsewhere(message.id)) this.#elsewhere.add(message.id);
      else this.#takeUp(message);
    }
    if (open.length) this.#changed();
  }

  #takeUp(message) {
    this.#elsewhere.delete(message.id);
    if (message.eventId) {
      message.resumed = true;
      this.#receive(message);
      return;
    }
    message.interrupted = true;
    endAnswer(message);
    this.#keep([message]);
  }

  #message(role, parent, fields) {
    return { id: newId(), conversation: this.id, parent, role, created: Date.now(), ...fields };
  }

  async #add(messages) {
    for (const message of messages) this.tree.add(message);
    this.#changed();
    const first = this.path.find(({ role }) => role === "user");
    this.record.title ||= titleOf(first.content);
    await this.#keep(messages);
    await this.#keepPlace();
    this.#changed();
  }

  /** Stores messages. After a failure, the next time stores all messages. */
  async #keep(messages, options) {
    if (!this.#isWhole) {
      const all = { conversation: this.record, messages: this.tree.all() };
      this.#isWhole = await this.#store.insert(all);
      this.isKept ||= this.#isWhole;
      return;
    }
    for (const message of messages) {
      this.#isWhole = await this.#store.putMessage(message, options) && this.#isWhole;
    }
  }

  /** Stores when something was said last, and which branches are shown. */
  async #keepPlace() {
    const place = { updated: Date.now(), chosen: this.tree.chosen };
    Object.assign(this.record, place);
    if (this.isKept) await this.#store.patch(this.id, place);
  }

  #ask(parent, { fields, prefix }) {
    const message = this.#message("assistant", parent, {
      content: prefix ?? "", prefix, fields, beganAt: Date.now(), ended: false,
    });
    this.tree.add(message);
    this.#keep([message]);
    this.#keepPlace();
    this.#receive(message);
    this.#changed();
  }

  #receive(message) {
    const save = (saved, options) => this.#keep([saved], options);
    const answer = new Answer(message, { body: this.bodyOf(message), save });
    answers.set(message.id, answer);
    answer.addEventListener("end", () => answers.delete(message.id));
    this.#follow(answer);
    answer.run();
  }

  #follow(answer) {
    answer.addEventListener("change", () => {
      this.dispatchEvent(new CustomEvent("grown", { detail: answer.message }));
    });
    answer.addEventListener("end", () => {
      this.#changed();
      this.dispatchEvent(new CustomEvent("answered", { detail: answer.message }));
    });
  }

  #answers() {
    const all = [...answers.values()];
    return all.filter(({ message }) => message.conversation === this.id);
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

/** Returns a title for a conversation that begins with this text. */
export function titleOf(text) {
  const line = text.trim().split(/\s*\n/)[0].replace(/\s+/g, " ");
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1).trimEnd()}…` : line;
}

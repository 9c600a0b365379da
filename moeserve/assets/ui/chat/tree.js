// A conversation is a tree of messages. What is shown is one path, from a first message to a leaf.
//
// An edited message and a regenerated answer are new siblings: nothing that was said is lost, and
// tabs that add to one conversation at once do not overwrite each other.

/** Returns an id that no other message or conversation has. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16)); // randomUUID needs https
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Messages by id, and which one was last chosen among siblings. */
export class Tree {
  /** `chosen`: the id of the chosen child, by the id of its parent ("" for the first messages). */
  constructor(messages = [], chosen = {}) {
    this.messages = new Map(messages.map((message) => [message.id, message]));
    this.chosen = { ...chosen };
  }

  /** Adds a message or puts a newer state in its place. */
  put(message) {
    this.messages.set(message.id, message);
  }

  /** Adds a message, and shows it. */
  add(message) {
    this.put(message);
    this.choose(message);
  }

  /** Shows the branch of a message. */
  choose(message) {
    this.chosen[message.parent ?? ""] = message.id;
  }

  /** Returns the messages after `parent`, the oldest first. */
  children(parent) {
    const all = [...this.messages.values()];
    const found = all.filter((message) => this.#parentOf(message) === parent);
    return found.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
  }

  /** Returns the message and those that may stand in its place. */
  siblings(message) {
    return this.children(this.#parentOf(message));
  }

  /** A message whose parent was not stored, since the storage was full, is a first one. */
  #parentOf({ parent }) {
    return this.messages.has(parent) ? parent : null;
  }

  /** Returns all messages, each after its parent. */
  all() {
    const found = [];
    const parents = [null];
    for (const parent of parents) {
      for (const child of this.children(parent)) {
        found.push(child);
        parents.push(child.id);
      }
    }
    return found;
  }

  /** Returns the messages that are shown. */
  path() {
    const shown = [];
    let parent = null;
    for (;;) {
      const children = this.children(parent);
      if (!children.length) return shown;
      const chosen = this.chosen[parent ?? ""];
      const next = children.find((child) => child.id === chosen) ?? children.at(-1);
      shown.push(next);
      parent = next.id;
    }
  }

  /** Returns the messages before `message`, the first one first. */
  before(message) {
    const found = [];
    for (let at = this.messages.get(message.parent); at; at = this.messages.get(at.parent)) {
      found.unshift(at);
    }
    return found;
  }
}

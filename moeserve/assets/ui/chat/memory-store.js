// The store's stand-in in a browser without storage: the same methods, while the page is open.

/** Conversations in this tab's memory. */
export class MemoryStore {
  #conversations = new Map();
  #messages = new Map();

  async list() {
    return [...this.#conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  async load(id) {
    const conversation = this.#conversations.get(id);
    return conversation ? { conversation, messages: this.#of(id) } : null;
  }

  async insert({ conversation, messages }) {
    this.#conversations.set(conversation.id, conversation);
    for (const message of messages) this.#messages.set(message.id, message);
    return true;
  }

  async patch(id, fields) {
    const now = this.#conversations.get(id);
    if (now) this.#conversations.set(id, { ...now, ...fields });
    return true;
  }

  async putMessage(message) {
    if (this.#conversations.has(message.conversation)) this.#messages.set(message.id, message);
    return true;
  }

  async remove(id) {
    this.#conversations.delete(id);
    for (const message of this.#of(id)) this.#messages.delete(message.id);
    return true;
  }

  #of(id) {
    return [...this.#messages.values()].filter((message) => message.conversation === id);
  }
}

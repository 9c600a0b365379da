// Where conversations are kept: the browser's IndexedDB, or this tab's memory where there is none.
//
// A conversation is {id, title, named, created, updated, settings, chosen}; its messages are
// records of their own, {id, conversation, parent, role, content, created, ...}. Tabs write single
// records and single fields of a conversation, so that none undoes what another one has changed.

import { storageNotice } from "../notice.js";
import { MemoryStore } from "./memory-store.js";
import { announce } from "./tabs.js";

const DATABASE = "moeserve";
const VERSION = 1;
const STORES = ["conversations", "messages"];
const NO_STORAGE = "This browser does not let the page store anything: conversations last until "
  + "this tab is closed or loaded again. Export what you want to keep.";
const FULL = "The browser's storage for this page is full: what is new is not kept. Export or "
  + "delete conversations.";

/** Returns the store of this browser. */
export async function openStore() {
  try {
    return new Store(await openDatabase());
  } catch {
    storageNotice(NO_STORAGE);
    return new MemoryStore();
  }
}

function openDatabase() {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open(DATABASE, VERSION);
    opening.onupgradeneeded = () => {
      opening.result.createObjectStore("conversations", { keyPath: "id" });
      const messages = opening.result.createObjectStore("messages", { keyPath: "id" });
      messages.createIndex("conversation", "conversation");
    };
    opening.onsuccess = () => {
      opening.result.onversionchange = () => opening.result.close();
      resolve(opening.result);
    };
    opening.onerror = () => reject(opening.error);
  });
}

const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** Conversations in IndexedDB. Writes return whether they were kept; if not, the page says why. */
class Store {
  #database;

  constructor(database) {
    this.#database = database;
  }

  /** Returns all conversations, the last used one first, without their messages. */
  async list() {
    const found = await result(this.#read().conversations.getAll());
    return found.sort((a, b) => b.updated - a.updated);
  }

  /** Returns {conversation, messages}; null if there is none of that id. */
  async load(id) {
    const { conversations, messages } = this.#read();
    const [conversation, found] = await Promise.all([
      result(conversations.get(id)),
      result(messages.index("conversation").getAll(id)),
    ]);
    return conversation ? { conversation, messages: found } : null;
  }

  /** Adds a conversation and its messages. */
  insert({ conversation, messages }) {
    return this.#write(conversation.id, (stores) => {
      stores.conversations.put(conversation);
      for (const message of messages) stores.messages.put(message);
    });
  }

  /** Changes fields of a conversation, unless it was deleted. */
  patch(id, fields) {
    return this.#write(id, async (stores) => {
      const now = await result(stores.conversations.get(id));
      if (now) stores.conversations.put({ ...now, ...fields });
    });
  }

  /** Adds or replaces a message, unless its conversation was deleted. */
  putMessage(message, { silent = false } = {}) {
    return this.#write(message.conversation, async (stores) => {
      const now = await result(stores.conversations.get(message.conversation));
      if (now) stores.messages.put(message);
    }, silent);
  }

  /** Deletes a conversation. */
  remove(id) {
    return this.#write(id, async (stores) => {
      stores.conversations.delete(id);
      const keys = await result(stores.messages.index("conversation").getAllKeys(id));
      for (const key of keys) stores.messages.delete(key);
    });
  }

  #read() {
    const transaction = this.#database.transaction(STORES, "readonly");
    return storesOf(transaction);
  }

  async #write(conversation, work, silent = false) {
    try {
      const transaction = this.#database.transaction(STORES, "readwrite");
      const committed = new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error);
      });
      await Promise.all([work(storesOf(transaction)), committed]);
    } catch (error) {
      storageNotice(reason(error));
      return false;
    }
    storageNotice("");
    if (!silent) announce(conversation);
    return true;
  }
}

function storesOf(transaction) {
  return Object.fromEntries(STORES.map((name) => [name, transaction.objectStore(name)]));
}

function reason(error) {
  if (error?.name === "QuotaExceededError") return FULL;
  const why = error?.message ?? "it gives no reason";
  return `The browser could not store the conversation (${why}). Load the page again; export what `
    + "you want to keep.";
}

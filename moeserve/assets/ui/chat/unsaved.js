// Answers on their way when the page is loaded again: a page that goes away has no time for
// IndexedDB.

import { tab } from "../browser-storage.js";

const STORED = "moeserve.unsaved";

/** Keeps what came of the answers of this tab. */
export function keep(answers) {
  const messages = [...answers.values()].map(({ message }) => message);
  if (messages.length) tab.set(STORED, JSON.stringify(messages));
}

/** Drops what was kept: the page did not go away. */
export function forget() {
  tab.remove(STORED);
}

/** Moves what the page before this one kept to the store. */
export async function restore(store) {
  const messages = JSON.parse(tab.get(STORED)) ?? [];
  forget();
  for (const message of messages) await store.putMessage(message);
}

// What the tabs of this page tell each other: which conversation changed, and who answers what.

const WAIT_MS = 300; // for the other tabs' word

const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("moeserve") : null;
const waiting = new Map(); // what to call when a tab says that it answers this message

/** Tells the other tabs that a conversation changed. */
export function announce(conversation) {
  channel?.postMessage({ changed: conversation });
}

/** Calls `onChange` with each conversation that another tab changed. */
export function listen({ onChange, isAnswering }) {
  channel?.addEventListener("message", ({ data }) => {
    if (data.changed) onChange(data.changed);
    if (data.asked && isAnswering(data.asked)) channel.postMessage({ mine: data.asked });
    if (data.mine) waiting.get(data.mine)?.(true);
  });
}

/** Returns whether another tab receives the answer with this id. */
export async function isAnsweredElsewhere(message) {
  if (!channel) return false;
  const answer = new Promise((resolve) => {
    waiting.set(message, resolve);
    setTimeout(() => resolve(false), WAIT_MS);
  });
  channel.postMessage({ asked: message });
  const elsewhere = await answer;
  waiting.delete(message);
  return elsewhere;
}

// What the page tells beside its content: short notices, and a lasting one about the storage.

import { $, el } from "./dom.js";

const SHOWN_MS = 5000;
const UNDO_MS = 10_000;

/** Shows a text for some seconds, longer while somebody points at it. `undo` offers a way back. */
export function notice(text, undo) {
  const close = () => {
    clearTimeout(timer);
    node.remove();
  };
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(close, undo ? UNDO_MS : SHOWN_MS);
  };
  const button = undo && el("button", {
    type: "button",
    className: "small",
    onclick: () => {
      close();
      undo();
    },
  }, "Undo");
  const node = el("p", {
    className: "notice",
    onpointerenter: () => clearTimeout(timer),
    onpointerleave: wait,
  }, el("span", {}, text), button);
  let timer;
  $("notices").append(node);
  wait();
}

/** Shows what is wrong with the storage, until it is called with "". */
export function storageNotice(text) {
  if ($("storage-note").textContent === text) return;
  $("storage-note").textContent = text;
  $("storage-note").hidden = !text;
}

// The field in which a message is written.

import { $ } from "../dom.js";
import { fit } from "./editor.js";

const field = $("prompt");

/** Calls `onSend` with what was written, which returns whether it was taken, and `onStop`. */
export function setUp({ onSend, onStop }) {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim() && onSend(field.value)) write("");
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  field.addEventListener("input", () => fit(field));
  $("stop").addEventListener("click", onStop);
}

/** Puts a text into the field. */
export function write(text) {
  field.value = text;
  fit(field);
}

/** Moves the keyboard to the field, without scrolling. */
export function focus() {
  if (matchMedia("(hover: none)").matches) return; // a phone's keyboard would cover the page
  field.focus({ preventScroll: true });
}

/** Offers to stop instead of to send. */
export function showBusy(busy, canStop) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("stop").disabled = !canStop;
}

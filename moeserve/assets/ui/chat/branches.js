// The control that switches between a message and those that may stand in its place: ‹ 2/3 ›.

import { el } from "../dom.js";
import { iconButton } from "../icons.js";

/** Returns the control; nothing if the message is the only one. */
export function branches(message, siblings, onBranch) {
  if (siblings.length < 2) return "";
  const at = siblings.findIndex(({ id }) => id === message.id);
  const step = (name, label, other) => {
    const button = iconButton(name, label, () => onBranch(other));
    button.disabled = !other;
    return button;
  };
  const place = `${at + 1}/${siblings.length}`;
  return el("span", { className: "branches", role: "group", "aria-label": `Branch ${place}` },
    step("back", "Previous branch", siblings[at - 1]),
    el("span", { className: "num" }, place),
    step("forward", "Next branch", siblings[at + 1]));
}

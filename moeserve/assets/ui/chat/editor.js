// A message that is edited where it stands.

import { el } from "../dom.js";

/** Makes a field as high as its text, up to a limit that its style sets. */
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

/** Puts an editor in the place of `node` until it is saved or given up. */
export function editor(node, text, { action, onSave }) {
  const area = el("textarea", {
    value: text,
    "aria-label": "Edited message",
    oninput: () => fit(area),
  });
  const close = () => {
    form.replaceWith(node);
    turn.classList.remove("editing");
  };
  const form = el("form", {
    className: "editor",
    onsubmit: (event) => {
      event.preventDefault();
      const edited = area.value;
      close();
      if (edited.trim() && edited !== text) onSave(edited);
    },
    onkeydown: (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    },
  }, area, el("div", { className: "row end" },
    el("span", { className: "muted grow" }, "The message as it was stays as a branch."),
    el("button", { type: "button", className: "small", onclick: close }, "Cancel"),
    el("button", { className: "primary small" }, action)));
  const turn = node.closest(".turn");
  node.replaceWith(form);
  turn.classList.add("editing");
  fit(area);
  area.focus();
}

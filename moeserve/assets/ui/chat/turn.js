// What a conversation shows beside answers: a question, and the result of a tool.

import { el } from "../dom.js";
import { iconButton } from "../icons.js";
import { branches } from "./branches.js";
import { editor } from "./editor.js";

/** A message of the user, which can be edited. */
export class Question {
  constructor(message, { onEdit, onBranch }) {
    this.message = message;
    this.onBranch = onBranch;
    this.text = el("p", { className: "text" }, message.content);
    this.footer = el("footer");
    this.edit = iconButton("edit", "Edit", () => {
      const onSave = (text) => onEdit(message, text);
      editor(this.text, message.content, { action: "Send", onSave });
    });
    this.node = el("article", { className: "turn user", "aria-label": "You" },
      this.text, this.footer);
  }

  /** Shows which of its siblings the message is. */
  place(siblings) {
    this.footer.replaceChildren(this.edit, branches(this.message, siblings, this.onBranch));
  }
}

/** The result of a tool. */
export class ToolResult {
  constructor({ name, content }) {
    this.node = el("article", { className: "turn result", "aria-label": `Result of ${name}` },
      el("p", { className: "muted" }, `Result of ${name}`),
      el("pre", { className: "code" }, content));
  }

  place() {}
}

// The messages of the open conversation, and what of them is in sight.

import { AnswerView } from "./answer-view.js";
import { Question, ToolResult } from "./turn.js";

const VIEWS = { user: Question, assistant: AnswerView, tool: ToolResult };
const NEAR_PX = 80; // so near to the end, the page follows an answer

/** Shows the path of a conversation in `list`. `actions`: what the buttons of messages do. */
export class Thread {
  #views = new Map();
  #follows = true;

  constructor({ list, toEnd, welcome, actions }) {
    Object.assign(this, { list, toEnd, welcome, actions });
    list.addEventListener("scroll", () => this.look());
    toEnd.addEventListener("click", () => this.follow());
  }

  /** Forgets the conversation that was shown. */
  clear() {
    this.#views.clear();
    this.#follows = true;
  }

  /** Shows the messages of a path. */
  show(path, siblingsOf) {
    const shown = path.map((message, at) => {
      let view = this.#views.get(message.id);
      if (view?.message !== message) {
        view = new VIEWS[message.role](message, this.actions);
        this.#views.set(message.id, view);
      }
      view.place(siblingsOf(message), path[at + 1]?.role === "tool");
      return view;
    });
    const nodes = shown.length ? shown.map(({ node }) => node) : [this.welcome()];
    const same = nodes.length === this.list.children.length
      && nodes.every((node, at) => node === this.list.children[at]);
    if (!same) this.list.replaceChildren(...nodes);
    this.keepUp();
  }

  /** Draws a message that has grown. */
  grow(message) {
    this.#views.get(message.id)?.change(() => this.keepUp());
  }

  /** Returns the first empty field of a message; undefined if it asks for nothing. */
  inputOf(message) {
    return this.#views.get(message.id)?.firstInput;
  }

  /** Shows the end, and keeps it in sight while an answer grows. */
  follow() {
    this.#follows = true;
    this.keepUp();
  }

  keepUp() {
    if (this.#follows) this.list.scrollTop = this.list.scrollHeight;
    this.look();
  }

  look() {
    const below = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight;
    this.#follows = below < NEAR_PX;
    this.toEnd.hidden = this.#follows;
  }
}

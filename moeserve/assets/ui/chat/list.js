// The list of conversations at the side.

import { el } from "../dom.js";
import { iconButton } from "../icons.js";
import { openMenu } from "../menu.js";

const DAY_MS = 86_400_000;

/** The list. `actionsOf(record)` returns the menu of a conversation. */
export class ConversationList {
  #records = [];
  #open = "";
  #busy = new Set();

  constructor({ node, search, actionsOf, onRename }) {
    Object.assign(this, { node, search, actionsOf, onRename });
    search.addEventListener("input", () => this.draw());
  }

  /** Shows these conversations. `open`: the id of the open one; `busy`: those that are answered. */
  show(records, { open, busy }) {
    this.#records = records;
    this.#open = open;
    this.#busy = busy;
    if (!this.node.querySelector("input")) this.draw(); // an edited title is not taken away
  }

  draw() {
    const wanted = this.search.value.trim().toLowerCase();
    const found = this.#records.filter(({ title }) => title.toLowerCase().includes(wanted));
    const groups = Map.groupBy(found, ({ updated }) => ageOf(updated));
    const lists = [...groups].map(([age, records]) => this.#group(age, records));
    const text = wanted ? "No title has this text." : "Conversations appear here.";
    const empty = el("p", { className: "muted empty" }, text);
    this.node.replaceChildren(...(lists.length ? lists : [empty]));
  }

  #group(age, records) {
    const id = `age-${age.replaceAll(" ", "-").toLowerCase()}`;
    return el("section", { "aria-labelledby": id }, el("h3", { id }, age),
      el("ul", {}, ...records.map((record) => this.#item(record))));
  }

  #item(record) {
    const link = el("a", { href: `#chat/${record.id}`, title: record.title }, record.title);
    if (record.id === this.#open) link.ariaCurrent = "page";
    const more = iconButton("more", `Actions for ${record.title}`, () => {
      openMenu(more, [["Rename", () => this.rename(item, record)], ...this.actionsOf(record)]);
    });
    const busy = el("span", { className: "busy", title: "being answered" });
    const item = el("li", {}, link, this.#busy.has(record.id) && busy, more);
    return item;
  }

  /** Lets a title be edited where it stands. */
  rename(item, record) {
    const input = el("input", { value: record.title, maxLength: 200, "aria-label": "Title" });
    const end = (title) => {
      input.onblur = null;
      this.draw();
      if (title && title !== record.title) this.onRename(record, title);
    };
    input.onblur = () => end(input.value.trim());
    input.onkeydown = (event) => {
      if (event.key === "Enter") end(input.value.trim());
      if (event.key === "Escape") end("");
      if (["Enter", "Escape"].includes(event.key)) event.stopPropagation();
    };
    item.replaceChildren(input);
    input.select();
  }
}

function ageOf(time) {
  const days = Math.ceil((new Date().setHours(0, 0, 0, 0) - time) / DAY_MS);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days <= 7) return "Last 7 days";
  if (days <= 30) return "Last 30 days";
  return "Earlier";
}

// What an empty conversation shows: some things to ask.

import { el } from "../dom.js";
import * as composer from "./composer.js";
import * as settings from "./settings.js";

const IDEAS = [
  ["Tell a story", "Tell me a story about a fox and a lantern."],
  ["Explain", "What is expert parallelism?"],
  ["Use a tool", "What is the weather in Oslo?"],
];

/** Returns the node. */
export function welcome() {
  const ideas = IDEAS.map(([title, text]) => el("button", {
    type: "button",
    className: "idea",
    onclick: () => {
      if (title === "Use a tool") settings.insertExampleTool();
      composer.write(text);
      composer.focus();
    },
  }, el("strong", {}, title), text));
  return el("div", { className: "welcome" },
    el("h2", {}, "Talk to the model"),
    el("p", { className: "muted" }, "Everything here goes through the same API that programs use; "
      + "each answer shows its request as curl. Conversations stay in this browser."),
    el("div", { className: "ideas" }, ...ideas));
}

// Maths in Markdown, $…$, $$…$$, \(…\) and \[…\], shown as MathML by Temml.

import { el } from "../dom.js";

const MAX_CHARS = 10_000; // of one formula
const OPTIONS = {
  throwOnError: true, // the source is shown then
  trust: false, // no links, no classes, no styles of the model's own
  maxExpand: 200,
  maxSize: [30, 300], // em, pt
};
// A dollar sign is money beside a space or before a digit: "$5 and $10".
const INLINE = [
  [/^\$\$([^$]+?)\$\$/, "display"],
  [/^\$(?!\s)((?:\\[\s\S]|[^\\$\n])+?)(?<!\s)\$(?!\d)/, "inline"],
  [/^\\\(([\s\S]+?)\\\)/, "inline"],
  [/^\\\[([\s\S]+?)\\\]/, "display"],
];
const BLOCK = [
  [/^ {0,3}\$\$([\s\S]+?)\$\$[ \t]*(?:\n+|$)/, "display"],
  [/^ {0,3}\\\[([\s\S]+?)\\\][ \t]*(?:\n+|$)/, "display"],
];

function tokenizer(name, rules) {
  return (source) => {
    for (const [rule, display] of rules) {
      const match = rule.exec(source);
      if (match) return { type: name, raw: match[0], source: match[0].trim(), display };
    }
    return undefined;
  };
}

const html = ({ source, display }) => {
  const escaped = source.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  return `<span data-maths="${display}">${escaped}</span>`;
};

/** What Markdown's parser has to know. */
export const MATHS = [
  {
    name: "mathsBlock",
    level: "block",
    start: (source) => source.match(/^ {0,3}(?:\$\$|\\\[)/m)?.index,
    tokenizer: tokenizer("mathsBlock", BLOCK),
    renderer: html,
  },
  {
    name: "maths",
    level: "inline",
    start: (source) => source.match(/\$|\\\(|\\\[/)?.index,
    tokenizer: tokenizer("maths", INLINE),
    renderer: html,
  },
];

/** Shows the formula that is the text of `node`; what is not a formula stays as it is. */
export function renderMaths(node) {
  const source = node.textContent;
  const [, open, formula] = /^(\$\$?|\\[([])([\s\S]*?)(?:\$\$?|\\[)\]])$/.exec(source);
  const displayMode = node.dataset.maths === "display";
  const shown = el("span", { className: displayMode ? "maths display" : "maths" });
  try {
    if (formula.length > MAX_CHARS) throw new RangeError(open);
    globalThis.temml.render(formula, shown, { ...OPTIONS, displayMode });
    shown.title = source;
  } catch (error) {
    shown.replaceChildren(el("code", { title: error.message }, source));
  }
  node.replaceWith(shown);
}

// Markdown of a model to elements. A model's text is hostile until shown otherwise:
//
// - Tags are shown as text, but for a few without attributes (<br>, <sub>, ...).
// - Links lead to http, https and mailto only. Pictures become links: nothing is loaded by itself.
// - DOMPurify then removes whatever is not on the short lists below.

import { copyButton, el } from "../dom.js";
import { MATHS, renderMaths } from "./maths.js";

const { DOMPurify, marked } = globalThis; // vendor/

const PLAIN_ATTRIBUTES = ["align", "data-language", "data-maths", "start", "title"];
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr",
    "i", "kbd", "li", "mark", "ol", "p", "pre", "s", "small", "span", "strong", "sub", "sup", "table",
    "tbody", "td", "th", "thead", "tr", "u", "ul",
  ],
  ALLOWED_ATTR: ["href", ...PLAIN_ATTRIBUTES],
  ADD_URI_SAFE_ATTR: PLAIN_ATTRIBUTES,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const PLAIN_TAGS = /&lt;(\/?(?:b|br|del|em|i|kbd|mark|s|small|strong|sub|sup|u)) ?\/?&gt;/gi;
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => text.replace(/[&<>"']/g, (sign) => ENTITIES[sign]);

const renderer = {
  html({ text }) {
    return escape(text).replace(PLAIN_TAGS, "<$1>");
  },
  link({ href, title, tokens }) {
    const text = this.parser.parseInline(tokens);
    if (!ALLOWED.ALLOWED_URI_REGEXP.test(href)) return text;
    return `<a href="${escape(href)}" title="${escape(title ?? href)}">${text}</a>`;
  },
  image({ href, title, text }) {
    const shown = escape(text || title || "picture");
    if (!ALLOWED.ALLOWED_URI_REGEXP.test(href)) return shown;
    return `<a href="${escape(href)}" title="${escape(href)}">${shown}</a>`;
  },
  code({ text, lang }) {
    const language = escape((lang ?? "").trim().split(/\s/)[0]);
    return `<pre data-language="${language}"><code>${escape(text)}</code></pre>`;
  },
  checkbox({ checked }) {
    return checked ? "☑ " : "☐ ";
  },
};
const parser = new marked.Marked({ gfm: true, breaks: true, renderer, extensions: MATHS });

/** Returns the blocks of a text: {raw, token}. Their `raw` in turn are the text. */
export function blocksOf(text) {
  const blocks = [];
  for (const token of tokensOf(text)) {
    if (token.type === "space" && blocks.length) blocks.at(-1).raw += token.raw;
    else blocks.push({ raw: token.raw, token });
  }
  return blocks;
}

function tokensOf(text) {
  try {
    return parser.lexer(text);
  } catch {
    return [{ type: "plain", raw: text }]; // it is nested deeper than the parser can go
  }
}

/** Returns the element of a block. */
export function renderBlock({ raw, token }) {
  const node = el("div", { className: "block" });
  try {
    node.append(token.type === "plain" ? el("p", {}, raw) : clean(parser.parser([token])));
  } catch {
    node.replaceChildren(el("p", {}, raw)); // as above
  }
  return node;
}

function clean(html) {
  const fragment = DOMPurify.sanitize(html, ALLOWED);
  for (const node of fragment.querySelectorAll("[data-maths]")) renderMaths(node);
  for (const node of fragment.querySelectorAll("pre")) {
    node.replaceWith(codeBlock(node.dataset.language, node.textContent));
  }
  for (const node of fragment.querySelectorAll("a")) {
    node.target = "_blank";
    node.rel = "noopener noreferrer nofollow";
  }
  for (const node of fragment.querySelectorAll("li")) {
    if (/^\s*[☑☐] /.test(node.textContent)) node.className = "task";
  }
  for (const node of fragment.querySelectorAll("table")) {
    const region = { role: "region", "aria-label": "Table", tabIndex: 0 };
    const frame = el("div", { className: "scroll", ...region });
    node.replaceWith(frame);
    frame.append(node);
  }
  return fragment;
}

/** Returns a block of code with its language and a button that copies it. */
export function codeBlock(title, code) {
  const text = el("code", {}, code);
  const copy = copyButton("Copy", () => text.textContent);
  const head = el("div", { className: "code-head" }, el("span", {}, title || "text"), copy);
  const label = title ? `Code, ${title}` : "Code";
  const pre = el("pre", { tabIndex: 0, role: "region", "aria-label": label }, text);
  return el("div", { className: "code-block" }, head, pre);
}

// The little Markdown that models write most: fenced code, inline code, bold. The rest stays as it is.

import { copyButton, el } from "./dom.js";

/** Replaces the children of `node` with the text. */
export function renderText(node, text) {
  const pieces = text.split(/^```([^\n`]*)\n([\s\S]*?)(?:^```[ \t]*$\n?|(?![\s\S]))/m); // prose, language, code, prose, ...
  node.replaceChildren();
  for (let at = 0; at < pieces.length; at += 3) {
    const prose = pieces[at].replace(/^\n+|\n+$/g, "");
    if (prose) node.append(el("p", {}, ...inline(prose)));
    if (at + 2 < pieces.length) node.append(codeBlock(pieces[at + 1].trim(), pieces[at + 2].replace(/\n$/, "")));
  }
}

/** Returns a block of code with a button that copies it. */
export function codeBlock(title, code) {
  const head = el("div", { className: "code-head" }, title, copyButton("Copy", () => code));
  return el("div", { className: "code-block" }, head, el("pre", { tabIndex: 0, role: "region", "aria-label": title || "code" }, el("code", {}, code)));
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((piece, at) => {
    if (at % 2 === 0) return piece;
    return piece[0] === "`" ? el("code", {}, piece.slice(1, -1)) : el("strong", {}, piece.slice(2, -2));
  });
}

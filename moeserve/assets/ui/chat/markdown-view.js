// A text of Markdown that grows. Only its last blocks are parsed and drawn again, so that a long
// answer costs no more per token than a short one.

import { blocksOf, renderBlock } from "./markdown.js";

const OPEN_BLOCKS = 2; // the last ones, which further text may change

/** An element with the Markdown of a text. */
export class MarkdownView {
  #text = "";
  #drawn = []; // {raw, token, node}
  #closed = 0; // how many of them no further text can change,
  #length = 0; // and how long their text is
  #isWhole = false;

  constructor(className) {
    this.node = document.createElement("div");
    this.node.className = className;
  }

  /** Shows a text. `whole`: nothing will be added to it. */
  show(text, { whole = false } = {}) {
    const source = text.replace(/\r\n?/g, "\n");
    if (source === this.#text && whole === this.#isWhole) return;
    this.#isWhole = whole;
    const again = whole || !source.startsWith(this.#text.slice(0, this.#length));
    if (again) {
      this.#closed = 0;
      this.#length = 0;
    }
    this.#text = source;
    const blocks = blocksOf(source.slice(this.#length));
    const links = blocks.some(({ token }) => token.type === "def"); // these change other blocks
    this.#draw(blocks, { reuse: !(whole && links) });
    this.#close(blocks);
  }

  #draw(blocks, { reuse }) {
    const before = this.#drawn.splice(this.#closed);
    for (const [at, block] of blocks.entries()) {
      const old = before[at];
      if (old && reuse && (old.raw === block.raw || grow(old, block))) block.node = old.node;
      else block.node = renderBlock(block);
      if (old && old.node !== block.node) old.node.replaceWith(block.node);
      else if (!old) this.node.append(block.node);
      this.#drawn.push(block);
    }
    for (const { node } of before.slice(blocks.length)) node.remove();
  }

  #close(blocks) {
    const known = blocks.reduce((sum, { raw }) => sum + raw.length, 0);
    if (known !== this.#text.length - this.#length) return; // the parser changed the text
    for (const { raw } of blocks.slice(0, -OPEN_BLOCKS)) {
      this.#closed += 1;
      this.#length += raw.length;
    }
  }
}

/**
 * Adds what is new to a block of code, which so keeps its selection and its place.
 *
 * Returns whether it did.
 */
function grow(old, block) {
  const [before, after] = [old.token, block.token];
  if (before.type !== "code" || after.type !== "code" || before.lang !== after.lang) return false;
  const code = old.node.querySelector("code");
  if (!code || !after.text.startsWith(before.text)) return false;
  code.append(after.text.slice(before.text.length));
  code.normalize();
  return true;
}

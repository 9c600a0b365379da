// An answer: its thoughts, text, tokens and calls while they come, and what can be done with it.

import { curl } from "../api.js";
import { copyButton, el } from "../dom.js";
import { icon, iconButton } from "../icons.js";
import { branches } from "./branches.js";
import { editor } from "./editor.js";
import { codeBlock } from "./markdown.js";
import { MarkdownView } from "./markdown-view.js";
import { outcome, seconds, speed } from "./figures.js";
import { resultForm, shownCalls } from "./tool-calls.js";
import { Tokens } from "./tokens.js";

const BUSY_SHARE = 3; // so many times as long as a drawing took, none follows

/** The view of an answer's message. `actions`: what its buttons do. */
export class AnswerView {
  #frame = null;
  #isStale = false; // whether more came since the last drawing
  #siblings = [];
  #answered = false; // whether results of its calls follow
  #tokensDrawn = 0;

  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.thoughtsTitle = el("summary");
    this.thoughtsText = new MarkdownView("text markdown");
    this.thoughts = el("details", { className: "fold" },
      this.thoughtsTitle, this.thoughtsText.node);
    this.text = new MarkdownView("text markdown");
    this.tokens = new Tokens();
    this.sampled = el("details", { className: "fold" }, el("summary", {}, "Tokens as sampled"));
    this.calls = el("div", { className: "calls" });
    this.problem = el("div", { className: "problem", role: "alert", hidden: true });
    this.footer = el("footer");
    this.node = el("article", { className: "turn assistant", "aria-label": "Answer" },
      this.thoughts, this.text.node, this.sampled, this.calls, this.problem, this.footer);
  }

  /** Shows which of its siblings the answer is, and whether results of its calls follow. */
  place(siblings, answered) {
    this.#siblings = siblings;
    this.#answered = answered;
    this.draw();
  }

  /** Draws what came since the last time, at most once in a frame. `then` is called after it. */
  change(then) {
    this.#isStale = true;
    this.#frame ??= requestAnimationFrame(() => {
      const began = performance.now();
      this.#isStale = false;
      this.drawText();
      this.footer.replaceChildren(muted(speed(this.message)));
      then();
      const rest = BUSY_SHARE * (performance.now() - began);
      setTimeout(() => {
        this.#frame = null;
        if (this.#isStale && !this.message.ended) this.change(then);
      }, rest);
    });
  }

  /** Draws everything. */
  draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    const { message } = this;
    this.drawText();
    this.node.ariaBusy = String(!message.ended);
    this.drawProblem();
    if (message.ended) this.drawEnd();
    else this.footer.replaceChildren(muted(this.actions.elsewhere(message)));
  }

  drawText() {
    const { message } = this;
    const coloured = Boolean(message.tokens);
    const plain = !message.reasoning && !message.tool_calls;
    this.thoughts.hidden = !message.reasoning;
    this.thoughts.classList.toggle("live", !message.ended && !message.answeredAt);
    this.thoughtsTitle.textContent = thought(message);
    this.thoughtsText.show(message.reasoning ?? "", { whole: message.ended });
    if (coloured) {
      this.tokens.push(message.tokens.slice(this.#tokensDrawn));
      this.#tokensDrawn = message.tokens.length;
      this.sampled.append(this.tokens.node);
    }
    const bare = coloured && plain && !message.edited;
    this.sampled.hidden = !coloured || message.edited;
    if (bare) this.sampled.open = true;
    this.sampled.classList.toggle("bare", bare);
    this.text.node.hidden = bare;
    if (!bare) this.text.show(message.content, { whole: message.ended });
    if (!message.ended) this.calls.replaceChildren(shownCalls(message.tool_calls ?? []));
    this.node.classList.toggle("waiting", !message.ended && !message.firstAt && !message.content);
  }

  drawProblem() {
    const { error } = this.message;
    this.problem.hidden = !error;
    if (!error) return;
    const { message, code, param, id } = error;
    const where = [param && `field ${param}`, code, id && `request ${id}`].filter(Boolean);
    const place = where.length ? el("small", {}, where.join(" · ")) : "";
    this.problem.replaceChildren(el("strong", {}, message), place);
  }

  drawEnd() {
    const { message, actions } = this;
    this.drawCalls();
    const can = message.cut && message.content && !message.tool_calls;
    this.footer.replaceChildren(
      branches(message, this.#siblings, actions.onBranch),
      message.content ? copyButton("Copy", () => message.content, icon("copy")) : "",
      message.content ? iconButton("edit", "Edit", () => this.edit()) : "",
      iconButton("retry", "Regenerate", () => actions.onRegenerate(message)),
      can ? iconButton("go", "Continue", () => actions.onContinue(message)) : "",
      muted(outcome(message)),
      message.fields ? this.command() : "",
    );
  }

  edit() {
    this.text.node.hidden = false;
    this.text.show(this.message.content, { whole: true });
    const onSave = (text) => this.actions.onRewrite(this.message, text);
    editor(this.text.node, this.message.content, { action: "Save", onSave });
  }

  drawCalls() {
    const { message } = this;
    this.firstInput = undefined;
    this.calls.replaceChildren();
    if (!message.tool_calls) return;
    if (this.#answered || message.cut) {
      this.calls.replaceChildren(shownCalls(message.tool_calls));
      return;
    }
    const onResults = (results) => this.actions.onResults(message, results);
    const { form, first } = resultForm(message.tool_calls, onResults);
    this.calls.replaceChildren(form);
    this.firstInput = first;
  }

  /** Returns what shows the request as a command. Its text is made when it is first opened. */
  command() {
    const details = el("details", { className: "fold curl" }, el("summary", {}, "curl"));
    details.addEventListener("toggle", () => {
      const text = curl("v1/chat/completions", this.actions.bodyOf(this.message));
      details.append(codeBlock("the same request in a shell", text));
    }, { once: true });
    return details;
  }
}

const muted = (text) => el("span", { className: "muted" }, text);

function thought({ ended, answeredAt, endedAt, firstAt }) {
  const until = answeredAt ?? (ended ? endedAt : undefined);
  if (!until) return "Thinking…";
  return firstAt ? `Thought for ${seconds(until - firstAt)}` : "Thoughts";
}

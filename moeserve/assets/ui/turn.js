// What the conversation shows: a question, an answer with its parts while they arrive, the result of a tool.

import { curl } from "./api.js";
import { copyButton, el } from "./dom.js";
import { codeBlock, renderText } from "./richtext.js";
import { Tokens } from "./tokens.js";

/** Returns the node of a message of the user. */
export function userTurn(turn, onEdit) {
  const edit = el("button", { type: "button", className: "quiet small", onclick: onEdit }, "Edit");
  return el("article", { className: "turn user", "aria-label": "You" }, el("p", { className: "text" }, turn.content), el("footer", {}, edit));
}

/** Returns the node of a tool's result. */
export function toolTurn(turn) {
  return el("article", { className: "turn result", "aria-label": `Result of ${turn.name}` },
    el("p", { className: "muted" }, `Result of ${turn.name}`), el("pre", { className: "code" }, turn.content));
}

/** An answer. `turn` grows by `add`; the node follows once per frame. */
export class AnswerView {
  constructor(turn, { onRegenerate, onResults }) {
    this.turn = turn;
    this.onResults = onResults;
    this.reasoning = el("p", { className: "text" });
    this.thoughts = el("details", { className: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.reasoning);
    this.text = el("div", { className: "text" });
    this.tokens = new Tokens();
    this.sampled = el("details", { className: "reasoning", hidden: true }, el("summary", {}, "Tokens as sampled"));
    this.calls = el("div", { className: "calls" });
    this.problem = el("div", { className: "problem", role: "alert", hidden: true });
    this.footer = el("footer", {});
    this.regenerate = el("button", { type: "button", className: "quiet small", onclick: onRegenerate }, "Regenerate");
    this.node = el("article", { className: "turn assistant", "aria-label": "Answer", "aria-busy": "true" },
      this.thoughts, this.text, this.sampled, this.calls, this.problem, this.footer);
    if (turn.tokens) this.tokens.push(turn.tokens);
    if (turn.ended) this.end();
    else this.draw();
  }

  /** Takes a chunk of the stream. */
  add(chunk) {
    const { turn } = this, choice = chunk.choices.find((each) => !each.index); // one answer is shown, whatever n is
    if (chunk.usage) turn.usage = chunk.usage;
    if (!choice) return;
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning || delta.content || delta.tool_calls) turn.firstAt ??= performance.now();
    if (reasoning) turn.reasoning = (turn.reasoning ?? "") + reasoning;
    if (delta.content) turn.content += delta.content;
    for (const part of delta.tool_calls ?? []) addCall(turn, part);
    if (choice.logprobs?.content) {
      (turn.tokens ??= []).push(...choice.logprobs.content);
      this.tokens.push(choice.logprobs.content);
    }
    if (choice.finish_reason) turn.finish = choice.finish_reason;
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.draw(); });
  }

  draw() {
    const { turn } = this, plain = !turn.reasoning && !turn.tool_calls;
    this.thoughts.hidden = !turn.reasoning;
    this.reasoning.textContent = turn.reasoning ?? "";
    this.thoughts.classList.toggle("live", !turn.ended && !turn.content && !turn.tool_calls);
    this.sampled.hidden = !turn.tokens || plain;
    if (turn.tokens && plain) this.text.replaceChildren(this.tokens.node);
    else renderText(this.text, turn.content);
    if (!this.sampled.hidden) this.sampled.append(this.tokens.node);
    if (!turn.ended) this.calls.replaceChildren(...(turn.tool_calls ?? []).map((call) => callCard(call)));
    this.node.classList.toggle("waiting", !turn.ended && !turn.firstAt);
  }

  /** Shows what is known once the answer has ended, well or not. */
  end() {
    const { turn } = this;
    this.draw();
    this.node.ariaBusy = "false";
    this.calls.replaceChildren();
    if (turn.tool_calls) this.askForResults();
    if (turn.error) {
      const { message, code, param, id } = turn.error;
      const where = [param && `field ${param}`, code, id && `request ${id}`].filter(Boolean).join(" · ");
      this.problem.replaceChildren(el("strong", {}, message), where ? el("small", {}, where) : "");
      this.problem.hidden = false;
    }
    const command = turn.request && el("details", { className: "curl" }, el("summary", {}, "curl"), codeBlock("the same request in a shell", curl("v1/chat/completions", turn.request)));
    this.footer.replaceChildren(
      el("span", { className: "muted" }, summary(turn)),
      turn.content ? copyButton("Copy", () => turn.content) : "",
      this.regenerate,
      command ?? "",
    );
  }

  askForResults() {
    if (this.turn.answered || this.turn.cut) {
      this.calls.replaceChildren(...this.turn.tool_calls.map((call) => callCard(call)));
      return;
    }
    const inputs = this.turn.tool_calls.map((call) => el("textarea", {
      className: "code", rows: 2, "aria-label": `Result of ${call.function.name}`, placeholder: "what the tool returns",
      onkeydown: (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        form.requestSubmit();
      },
    }));
    const form = el("form", {
      onsubmit: (event) => {
        event.preventDefault();
        this.onResults(this.turn.tool_calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, name: call.function.name, content: inputs[i].value })));
      },
    }, ...this.turn.tool_calls.map((call, i) => callCard(call, inputs[i])),
      el("button", { className: "primary small" }, inputs.length > 1 ? "Send the results" : "Send the result"));
    this.calls.replaceChildren(form);
    this.firstInput = inputs[0];
  }
}

/** Adds a delta of a tool call to the calls of a turn. */
function addCall(turn, part) {
  const calls = (turn.tool_calls ??= []);
  const call = (calls[part.index ?? calls.length] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  call.id ||= part.id ?? "";
  call.function.name += part.function?.name ?? "";
  call.function.arguments += part.function?.arguments ?? "";
}

function callCard(call, input) {
  let given = call.function.arguments;
  try {
    given = JSON.stringify(JSON.parse(given), null, 1);
  } catch { /* still on its way, or not JSON: shown as it is */ }
  return el("div", { className: "call" }, el("p", {}, "calls ", el("strong", { className: "code" }, call.function.name)), el("pre", { className: "code" }, given), input);
}

function summary({ usage, firstAt, beganAt, endedAt, finish, stopped }) {
  const parts = [];
  if (usage) parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  if (usage?.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} cached`);
  const drafts = usage?.completion_tokens_details;
  if (drafts?.accepted_prediction_tokens) parts.push(`${drafts.accepted_prediction_tokens} of ${drafts.accepted_prediction_tokens + drafts.rejected_prediction_tokens} drafts right`);
  if (firstAt) parts.push(`first after ${Math.round(firstAt - beganAt)} ms`);
  // What came in one piece, such as a call of a tool, has no rate.
  if (usage?.completion_tokens > 1 && endedAt - firstAt > 5) parts.push(`${(1000 * (usage.completion_tokens - 1) / (endedAt - firstAt)).toFixed(0)} tokens/s`);
  if (stopped) parts.push("stopped by you");
  else if (finish) parts.push({ stop: "complete", length: "cut at the limit", tool_calls: "calls tools" }[finish] ?? finish);
  return parts.join(" · ");
}

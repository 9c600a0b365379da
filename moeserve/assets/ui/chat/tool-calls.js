// The calls of tools in an answer, and the form in which a person answers for the tools.

import { el } from "../dom.js";

/** Returns a node that shows the calls. */
export function shownCalls(calls) {
  return el("div", {}, ...calls.map((call) => card(call)));
}

/** Returns a form that asks for the results of the calls, and its first field. */
export function resultForm(calls, onResults) {
  const fields = calls.map((call) => el("textarea", {
    className: "code",
    rows: 2,
    "aria-label": `Result of ${call.function.name}`,
    placeholder: "what the tool returns",
    onkeydown: (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    },
  }));
  const label = calls.length > 1 ? "Send the results" : "Send the result";
  const form = el("form", {
    onsubmit: (event) => {
      event.preventDefault();
      onResults(calls.map((call, at) => resultOf(call, fields[at].value)));
    },
  }, ...calls.map((call, at) => card(call, fields[at])),
    el("button", { className: "primary small" }, label));
  return { form, first: fields[0] };
}

const resultOf = (call, content) => (
  { role: "tool", tool_call_id: call.id, name: call.function.name, content });

function card(call, field) {
  const name = el("strong", { className: "code" }, call.function.name);
  const given = el("pre", { className: "code" }, pretty(call.function.arguments));
  return el("div", { className: "call" }, el("p", {}, "calls ", name), given, field);
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 1);
  } catch {
    return json; // still on its way, or not JSON
  }
}

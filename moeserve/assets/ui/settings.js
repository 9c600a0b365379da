// The settings of the playground: a form that is kept between visits, and the request fields that it stands for.

import { $ } from "./dom.js";

const STORED = "moeserve.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Returns the weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

const form = $("settings");
const field = (name) => form.elements[name];

/** Fills the form with what the last visit left and keeps it from now on. */
export function setUp() {
  restore();
  form.addEventListener("input", () => {
    check();
    localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(new FormData(form))));
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  $("example-tool").addEventListener("click", insertExampleTool);
  $("reset").addEventListener("click", () => {
    form.reset();
    form.dispatchEvent(new Event("input"));
  });
}

/** Defines the example's tool for the model. */
export function insertExampleTool() {
  field("tools").value = JSON.stringify(EXAMPLE, null, 1);
  form.dispatchEvent(new Event("input"));
}

function restore() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    for (const [name, value] of Object.entries(stored)) {
      if (name === "logprobs") field(name).checked = true;
      else if (field(name) && name !== "tool_choice") field(name).value = value;
    }
    check();
    field("tool_choice").value = stored.tool_choice ?? "";
  } catch { /* an older page's settings: the defaults do */ }
}

/** Marks what is not the JSON that it should be, and offers the tools' names as choices. */
function check() {
  const tools = parse("tools", Array.isArray, "an array");
  parse("more", (value) => value && typeof value === "object" && !Array.isArray(value), "an object");
  const names = (tools ?? []).map((tool) => tool?.function?.name).filter(Boolean);
  const options = [["", "auto"], ["none", "none"], ["required", "required"], ...names.map((name) => [`=${name}`, name])];
  const chosen = field("tool_choice").value;
  field("tool_choice").replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  field("tool_choice").value = options.some(([value]) => value === chosen) ? chosen : "";
}

function parse(name, good, kind) {
  const input = field(name), text = input.value.trim();
  let value, wrong = "";
  if (text) {
    try {
      value = JSON.parse(text);
      if (!good(value)) wrong = `this must be ${kind}`;
    } catch (error) {
      wrong = `this is not JSON: ${error.message}`;
    }
  }
  input.setCustomValidity(wrong);
  input.title = wrong;
  input.ariaInvalid = String(Boolean(wrong));
  return wrong ? undefined : value;
}

/** Returns whether all fields hold what they should; otherwise the browser shows the first that does not. */
export function valid() {
  if (!form.checkValidity()) $("panel").open = true; // a closed panel could not show it
  return form.reportValidity();
}

/** Returns the fields of a request, and the system prompt. Only what was set is in it: the rest are the server's defaults. */
export function requestFields() {
  const fields = {};
  for (const name of NUMBERS) if (field(name).value !== "") fields[name] = Number(field(name).value);
  if (field("reasoning_effort").value) fields.reasoning_effort = field("reasoning_effort").value;
  if (field("logprobs").checked) Object.assign(fields, { logprobs: true, top_logprobs: Number(field("top_logprobs").value || 0) });
  const tools = field("tools").value.trim(), choice = field("tool_choice").value;
  if (tools) fields.tools = JSON.parse(tools);
  if (tools && choice) {
    fields.tool_choice = choice.startsWith("=") ? { type: "function", function: { name: choice.slice(1) } } : choice;
  }
  Object.assign(fields, JSON.parse(field("more").value.trim() || "{}"));
  return { system: field("system").value, fields };
}

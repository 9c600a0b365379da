// The settings of a conversation: a form, and the fields of a request that it stands for.

import { browser } from "../browser-storage.js";
import { $ } from "../dom.js";

const DEFAULTS = "moeserve.settings"; // of new conversations
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
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
let models = [];

/** Calls `onChange` with the settings when they change, and `onInvalid` to show a wrong field. */
export function setUp({ onChange, onInvalid }) {
  form.addEventListener("input", () => {
    check();
    onChange(values());
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("invalid", onInvalid, { capture: true });
  $("example-tool").addEventListener("click", insertExampleTool);
  $("reset-settings").addEventListener("click", () => {
    form.reset();
    form.dispatchEvent(new Event("input"));
  });
  $("make-default").addEventListener("click", () => {
    browser.set(DEFAULTS, JSON.stringify(values()));
  });
}

/** Returns the settings that new conversations begin with. */
export function defaults() {
  try {
    return JSON.parse(browser.get(DEFAULTS)) ?? {};
  } catch {
    return {}; // what another page left
  }
}

/** Shows the settings of a conversation. */
export function show(settings) {
  form.reset();
  for (const [name, value] of Object.entries(settings)) {
    const control = field(name);
    if (control?.type === "checkbox") control.checked = Boolean(value);
    else if (control && !["model", "tool_choice"].includes(name)) control.value = String(value);
  }
  check();
  setOptions("tool_choice", settings.tool_choice, choices());
  setOptions("model", settings.model, modelChoices());
}

/** Offers the server's models. */
export function offerModels(names) {
  models = names;
  setOptions("model", field("model").value, modelChoices());
  $("model-field").hidden = names.length < 2;
}

/** Defines the example's tool for the model. */
export function insertExampleTool() {
  field("tools").value = JSON.stringify(EXAMPLE, null, 1);
  form.dispatchEvent(new Event("input"));
}

function values() {
  const all = Object.entries(Object.fromEntries(new FormData(form)));
  return Object.fromEntries(all.filter(([, value]) => value !== ""));
}

/** Marks what is not the JSON that it should be, and offers the tools' names as choices. */
function check() {
  const isObject = (value) => value && typeof value === "object" && !Array.isArray(value);
  parse("tools", Array.isArray, "an array");
  parse("more", isObject, "an object");
  setOptions("tool_choice", field("tool_choice").value, choices());
}

function choices() {
  const tools = parse("tools", Array.isArray, "an array") ?? [];
  const names = tools.map((tool) => tool?.function?.name).filter(Boolean);
  const fixed = [["", "auto"], ["none", "none"], ["required", "required"]];
  return [...fixed, ...names.map((name) => [`=${name}`, name])];
}

function modelChoices() {
  return [["", models[0] ?? "the server's"], ...models.slice(1).map((name) => [name, name])];
}

function setOptions(name, chosen, options) {
  field(name).replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  field(name).value = options.some(([value]) => value === chosen) ? chosen : "";
}

function parse(name, isGood, kind) {
  const input = field(name);
  const text = input.value.trim();
  let value;
  let wrong = "";
  if (text) {
    try {
      value = JSON.parse(text);
      if (!isGood(value)) wrong = `this must be ${kind}`;
    } catch (error) {
      wrong = `this is not JSON: ${error.message}`;
    }
  }
  input.setCustomValidity(wrong);
  input.title = wrong;
  input.ariaInvalid = String(Boolean(wrong));
  return wrong ? undefined : value;
}

/** Returns whether all fields hold what they should; otherwise shows the first that does not. */
export function valid() {
  return form.reportValidity();
}

/** Returns the fields of a request that are set, `system` among them. The rest are the server's. */
export function requestFields() {
  const model = field("model").value || models[0];
  const fields = { ...(model ? { model } : {}), system: field("system").value };
  for (const name of NUMBERS) {
    if (field(name).value !== "") fields[name] = Number(field(name).value);
  }
  if (field("reasoning_effort").value) fields.reasoning_effort = field("reasoning_effort").value;
  if (field("logprobs").checked) {
    fields.logprobs = true;
    fields.top_logprobs = Number(field("top_logprobs").value || 0);
  }
  return { ...fields, ...toolFields(), ...JSON.parse(field("more").value.trim() || "{}") };
}

function toolFields() {
  const tools = field("tools").value.trim();
  const choice = field("tool_choice").value;
  if (!tools) return {};
  if (!choice) return { tools: JSON.parse(tools) };
  const named = { type: "function", function: { name: choice.slice(1) } };
  return { tools: JSON.parse(tools), tool_choice: choice.startsWith("=") ? named : choice };
}

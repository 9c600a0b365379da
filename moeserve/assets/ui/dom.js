// Small helpers to build elements. Text is always set as text, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** Returns a new element. Properties that begin with "aria-", "data-" or equal "role" become attributes. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (/^(aria-|data-|role$|for$)/.test(name)) node.setAttribute(name, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child != null && child !== false));
  return node;
}

/** Returns a new SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Returns a button that copies what `text()` returns and says so for a moment. */
export function copyButton(label, text, ...content) {
  const shown = content.length ? content : [label];
  const button = el("button", { type: "button", className: "quiet small", "aria-label": label }, ...shown);
  button.addEventListener("click", async () => {
    const said = (await copy(text())) ? "Copied" : "Could not copy";
    button.replaceChildren(said);
    button.ariaLabel = said;
    setTimeout(() => {
      button.replaceChildren(...shown);
      button.ariaLabel = label;
    }, 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text); // exists on https and localhost only
    return true;
  } catch {
    const area = el("textarea", { value: text, className: "sr" });
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return done;
  }
}

/** Places the one tooltip near a point of the window, or hides it if there is no content. */
export function tooltip(content, x = 0, y = 0) {
  let tip = $("tooltip");
  if (!tip) document.body.append(tip = el("div", { id: "tooltip", role: "tooltip", hidden: true }));
  tip.hidden = !content;
  if (!content) return;
  tip.replaceChildren(content);
  const { width, height } = tip.getBoundingClientRect();
  const below = y + 18 + height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - width - 8))}px`;
  tip.style.top = `${below ? y + 18 : Math.max(8, y - height - 10)}px`;
}

export const dark = () => {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

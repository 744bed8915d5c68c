// Elements from data. Text is always set as text: nothing that a server or a model says is read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

export const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const drawn = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

/** Set a node's text, unless it says so already: assistive technology is not told twice. */
export function say(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

export function table(heads, rows, { numeric = [], caption }) {
  const kind = (index) => (numeric.includes(index) ? "number" : null);
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {},
      element("caption", { class: "unseen" }, caption),
      element("thead", {}, element("tr", {}, heads.map((head, index) => element("th", { scope: "col", class: kind(index) }, head)))),
      element("tbody", {}, rows.map((row) =>
        element("tr", {}, row.map((cell, index) => element("td", { class: kind(index) }, cell)))))));
}

export const empty = (text) => element("p", { class: "empty" }, text);

// -- numbers as text ------------------------------------------------------------------------------------------------

export const whole = (value) => Math.round(value).toLocaleString("en");
export const times = (value) => `${value.toFixed(2)}×`;
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
export const rate = (value) => (value && value < 10 ? value.toFixed(1) : whole(value));
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.01) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  return seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}
export const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");
export const many = (count, one, more = `${one}s`) => `${whole(count)} ${count === 1 ? one : more}`;

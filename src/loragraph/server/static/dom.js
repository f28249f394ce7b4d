// Elements from calls. Children that are strings become text nodes: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `on...` properties are listeners, booleans set or leave out an attribute. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets a text only where it differs, so that selections and screen readers are left alone. */
export function setText(element, text) {
  const value = String(text);
  if (element.textContent !== value) element.textContent = value;
}

/** Sets or removes an attribute, only where it differs. */
export function setAttribute(element, name, value) {
  if (value == null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/** Shows a message in a notice, or hides it for an empty one. */
export function notice(element, message) {
  setText(element, message ?? "");
  element.hidden = !message;
}

/** Opens and closes what a button controls, and says so to assistive technology. */
export function toggle(button, panel, open = panel.hidden) {
  panel.hidden = !open;
  button.setAttribute("aria-expanded", String(open));
}

/** Tells screen readers, politely. */
export function announce(text) {
  byId("announce").textContent = text;
}

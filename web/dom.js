/** An element of the page in one call. Used by panel.js and timeline.js. */

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = ["svg", "g", "rect", "text", "title", "line"];

/** Attributes that are functions become properties, such as onclick. */
export function element(name, attributes = {}, ...children) {
  const made = DRAWN.includes(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

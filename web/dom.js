/** Creation of DOM elements. */

const SVG = "http://www.w3.org/2000/svg";
const SVG_ELEMENTS = ["svg", "g", "rect", "text", "title", "line"];

/** Create an HTML or SVG element. Attributes that are functions become properties, such as onclick. */
export function element(name, attributes = {}, ...children) {
  const made = SVG_ELEMENTS.includes(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

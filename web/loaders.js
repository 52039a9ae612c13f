/** Reading of widgets by name, and recognition of loaders. definitions: {type: definition} of the installed nodes, as ComfyUI's /object_info returns them. */

import { LOADERS } from "./packs.js";

const FOLDERS = [["UNETLoader", "unet_name"], ["CheckpointLoaderSimple", "ckpt_name"], ["UnetLoaderGGUF", "unet_name"], ["DiffusersLoader", "model_path"]];
const CONTROL = "control_after_generate", CONTROLS = ["fixed", "increment", "decrement", "randomize"];
const KINDS = ["INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"];
// Sizes in canvas pixels, as LiteGraph computes them: heights of a row of slots and of a widget, a node's margin, widths of a node without and with widgets,
// and of a title: its ends, and a letter on average.
const [SLOT, WIDGET, MARGIN, WIDTH, TITLE, LETTER] = [20, 24, 6, [140, 210], 40, 7.4];

const inputsOf = (definition) => Object.entries({ ...definition?.input?.required, ...definition?.input?.optional });
const isWidget = ([kind, options]) => (Array.isArray(kind) || KINDS.includes(kind)) && !options?.forceInput;
const specsOf = (definition) => inputsOf(definition).filter(([, spec]) => isWidget(spec));

/** Return the choices of a widget of an installed node; undefined if it has none. */
export function choicesOf(definitions, type, widget) {
  const [kind, options] = inputsOf(definitions[type]).find(([name]) => name === widget)?.[1] ?? [];
  return Array.isArray(kind) ? kind : options?.options;
}

/** Return the names of the widgets of a new node of this type, in order. Without a definition: those of `values`. */
export function widgetsOf(definitions, type, values) {
  const names = specsOf(definitions[type]).flatMap(([name, spec]) => (spec[1]?.control_after_generate ? [name, CONTROL] : [name]));
  return names.length ? names : Object.keys(values);
}

/** Return the values of a new node's widgets, in order; `values` are those that differ from the defaults. */
export function valuesOf(definitions, type, values) {
  const standardOf = ([kind, options]) => options?.default ?? (Array.isArray(kind) ? kind : options?.options)?.[0];
  const standards = Object.fromEntries(specsOf(definitions[type]).map(([name, spec]) => [name, standardOf(spec)]));
  return widgetsOf(definitions, type, values).map((name) => values[name] ?? (name === CONTROL ? "fixed" : standards[name]));
}

/**
 * Return the names of a node's widgets in the order of its widgets_values, from its slots, its definition, or one of the layouts: the first that has their
 * number and kinds ({name: type of the value}). Null if the file does not store a list.
 */
export function namesOf(node, definition, layouts = [], kinds = {}) {
  const values = node.widgets_values;
  if (!Array.isArray(values)) return null;
  const slots = (node.inputs ?? []).filter((slot) => slot.widget).map((slot) => slot.widget.name);
  const candidates = [slots, specsOf(definition).map(([name]) => name), ...layouts].filter((names) => names.length).map((names) => withControls(names, values));
  const fits = (names) => names.length === values.length && names.every((name, index) => !kinds[name] || typeof values[index] === kinds[name]);
  return candidates.find(fits) ?? candidates.find((names) => names.length > values.length)?.slice(0, values.length) ?? candidates.at(-1) ?? [];
}

function withControls(names, values) {
  const all = [];
  for (const name of names) {
    all.push(name);
    if (/seed$/.test(name) && !names.includes(CONTROL) && CONTROLS.includes(values[all.length])) all.push(CONTROL);
  }
  return all;
}

/**
 * Recognise a loader of diffusion models: by its type, or by a widget whose choices are the files of ComfyUI's folders of diffusion models.
 * Returns {file, names, values, standards}: the widget of the file, and names, values and defaults of all widgets. {count} if several widgets have such files.
 * Null if it is none.
 */
export function loaderOf(node, definitions) {
  const layout = LOADERS[node.type], definition = definitions[node.type];
  const files = layout ? [layout[0]] : specsOf(definition).map(([name]) => name).filter((name) => hasModels(definitions, node.type, name));
  if (files.length !== 1) return files.length ? { count: files.length } : null;
  const names = namesOf(node, definition, layout ? [layout] : []);
  if (!names?.includes(files[0])) return null;
  return { file: files[0], names, values: Object.fromEntries(names.map((name, index) => [name, node.widgets_values[index]])),
    standards: Object.fromEntries(specsOf(definition).map(([name, spec]) => [name, spec[1]?.default])) };
}

function hasModels(definitions, type, widget) {
  const models = new Set(FOLDERS.flatMap(([loader, name]) => choicesOf(definitions, loader, name) ?? []));
  const choices = choicesOf(definitions, type, widget) ?? [];
  return choices.length > 0 && choices.every((choice) => models.has(choice));
}

/** Return the least size of a node of this type, without its title bar; [0, 0] without a definition. hidden: widgets that are not shown. */
export function sizeOf(definitions, type, numOutputs, hidden = []) {
  const definition = definitions[type], inputs = inputsOf(definition);
  if (!definition) return [0, 0];
  const widgets = widgetsOf(definitions, type, {}).filter((name) => !hidden.includes(name)).length;
  const rows = Math.max(inputs.filter(([, spec]) => !isWidget(spec)).length, numOutputs, 1);
  const width = Math.max(widgets ? WIDTH[1] : WIDTH[0], TITLE + LETTER * (definition.display_name ?? type).length);
  return [width, rows * SLOT + MARGIN + (widgets ? widgets * WIDGET + 8 : 0)];
}

/** The prompt of a run, changed to run on one device, to measure it there. */

const CONFIG = "XDiTParallelConfig";
const LOADER = "XDiTLoadModel";
const ADDED = "xdit-one-device";           // id of the config of loaders that have none

/**
 * Return a prompt in ComfyUI's API format that computes the same on one device.
 *
 * defaults: {input of xDiT Parallel Config: its default}.
 */
export function onOneDevice(prompt, device, defaults) {
  const changed = structuredClone(prompt);
  const degrees = Object.keys(defaults).filter((name) => name.endsWith("_degree"));
  const alone = { devices: device, mode: "auto", ...Object.fromEntries(degrees.map((name) => [name, 1])) };
  for (const node of Object.values(changed)) if (node.class_type === CONFIG) Object.assign(node.inputs, alone);
  const without = Object.values(changed).filter((node) => node.class_type === LOADER && !node.inputs.parallel);
  if (without.length) changed[ADDED] = { class_type: CONFIG, inputs: { ...defaults, ...alone } };
  for (const node of without) node.inputs.parallel = [ADDED, 0];
  return changed;
}

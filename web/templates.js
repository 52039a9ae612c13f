/** In which order the page lists our templates, whose titles are the names of their files. Used by xdit.js, and by tests in Node. */

const FIRST = ["Demo", "Compare"];

/** Titles in the order in which they are shown: those that need no file first, then by letter. */
export function inOrder(titles) {
  const place = (title) => (FIRST.includes(title) ? FIRST.indexOf(title) : FIRST.length);
  return [...titles].sort((one, other) => place(one) - place(other) || one.localeCompare(other, "en"));
}

/** ComfyUI's server tells them in the order of the disk. folder: this pack's, under which the server lists them. */
export function orderTemplates(api, folder) {
  const get = api.getWorkflowTemplates;
  api.getWorkflowTemplates = async function (...given) {
    const listed = await get.apply(this, given);
    return listed[folder] ? { ...listed, [folder]: inOrder(listed[folder]) } : listed;
  };
}

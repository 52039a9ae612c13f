/** Has a page that is opened without a graph in its address open the demo's, the first time; later it has what the person left there. */

import { app } from "../../scripts/app.js";

const OPENED = "xdit.demo";

app.registerExtension({
  name: OPENED,
  init() {
    if (location.search || localStorage.getItem(OPENED)) return;
    localStorage.setItem(OPENED, "opened");
    location.replace(`${location.pathname}?template=Demo&source=xdit-comfyui`);
  },
});

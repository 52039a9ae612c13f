/** Listing of the pack's templates in the template browser. Their titles are their file names. */

const FIRST = ["Demo", "Compare"];

/** Descriptions in the supported ComfyUI languages, keyed by title. The page shows hyphens as spaces. */
export const DESCRIPTIONS = {
  en: {
    "Demo": "Generates emoji right away, with a small bundled model.",
    "Compare": "One seed on a single device and on all, and the difference.",
    "Chroma": "Text to image, with both prompts side by side on two GPUs.",
    "FLUX.2 klein": "Text to image, with both prompts side by side on two GPUs.",
    "Flux.1": "Text to image at cfg 1, with the tokens split across all GPUs.",
    "Flux.1 Kontext": "Edits an image according to a prompt.",
    "Flux.1 larger than one GPU, PipeFusion": "Each GPU has some of the blocks; image patches flow through.",
    "HunyuanDiT": "Text to image from a prompt in English or Chinese.",
    "HunyuanVideo": "Text to video, with the tokens split across all GPUs.",
    "HunyuanVideo 1.5": "Text to video, with both prompts side by side on two GPUs.",
    "LTX-2, video with audio": "Text to video with audio, both on all GPUs.",
    "LTX-Video": "A short video from a single checkpoint.",
    "MiniMax H3, video with audio": "Text to video with audio, tokens split across all GPUs.",
    "Qwen-Image": "Text to image with a 41 GB model, split if it exceeds one GPU.",
    "Qwen-Image-Edit": "Edits an image according to a prompt, with a 41 GB model.",
    "SD 1.5": "Text to image, with both prompts side by side on two GPUs.",
    "SD3.5": "Text to image, with both prompts side by side on two GPUs.",
    "SD3.5, image to image": "Image to image; denoise sets how much of your image changes.",
    "SDXL": "Text to image from one checkpoint, each prompt on its own GPU.",
    "Upscale": "Upscales an image or a video with ESRGAN, tiles on all GPUs.",
    "Wan 2.1, text to video": "Text to video, decoded on all GPUs as well.",
    "Wan 2.2, image to video": "Image to video with two models, one after the other.",
    "Wan 2.2, text to video": "Text to video with two models, one after the other.",
    "Z-Image-Turbo": "Text to image in eight steps, tokens split across all GPUs.",
  },
  zh: {
    "Demo": "用随附的小模型立即生成表情符号。",
    "Compare": "同一个种子在单个设备和全部设备上的图像，以及两者之差。",
    "Chroma": "文生图：两个提示词在两个 GPU 上同时运行。",
    "FLUX.2 klein": "文生图：两个提示词在两个 GPU 上同时运行。",
    "Flux.1": "cfg 为 1 的文生图：token 由全部 GPU 分担。",
    "Flux.1 Kontext": "按提示词编辑图像。",
    "Flux.1 larger than one GPU, PipeFusion": "每个 GPU 有一部分块，图像的各个 patch 依次流过。",
    "HunyuanDiT": "由英文或中文提示词生成图像，只需一个 checkpoint。",
    "HunyuanVideo": "文生视频：token 由全部 GPU 分担。",
    "HunyuanVideo 1.5": "文生视频：两个提示词在两个 GPU 上同时运行。",
    "LTX-2, video with audio": "文生视频和音频，都在全部 GPU 上生成。",
    "LTX-Video": "短视频，只需一个 checkpoint。",
    "MiniMax H3, video with audio": "文生视频和音频：token 由全部 GPU 分担。",
    "Qwen-Image": "用 41 GB 的模型文生图，单个 GPU 放不下时分到各 GPU。",
    "Qwen-Image-Edit": "用 41 GB 的模型按提示词编辑图像。",
    "SD 1.5": "文生图：两个提示词在两个 GPU 上同时运行。",
    "SD3.5": "文生图：两个提示词在两个 GPU 上同时运行。",
    "SD3.5, image to image": "图生图：denoise 设定图像改变的程度。",
    "SDXL": "文生图：只需一个 checkpoint，两个提示词各用一个 GPU。",
    "Upscale": "用 ESRGAN 放大图像或视频，分块由全部 GPU 分担。",
    "Wan 2.1, text to video": "文生视频，解码也在全部 GPU 上进行。",
    "Wan 2.2, image to video": "图生视频，先后使用两个模型。",
    "Wan 2.2, text to video": "文生视频，先后使用两个模型。",
    "Z-Image-Turbo": "八步文生图：token 由全部 GPU 分担。",
  },
};

const IMAGE = ["Text to Image", "Image"];
const VIDEO = ["Text to Video", "Video"];

/** Tags and models, in ComfyUI's words, by which the template browser filters, and GB of the files to download, by which it sorts. */
export const DETAILS = {
  "Demo": { tags: IMAGE, models: ["xDiT demo"], gb: 0 },
  "Compare": { tags: IMAGE, models: ["xDiT demo"], gb: 0 },
  "Chroma": { tags: IMAGE, models: ["Chroma"], gb: 27.9 },
  "FLUX.2 klein": { tags: IMAGE, models: ["Flux.2 Klein"], gb: 16.1 },
  "Flux.1": { tags: IMAGE, models: ["Flux"], gb: 34.2 },
  "Flux.1 Kontext": { tags: ["Image Edit", "Image"], models: ["Flux"], gb: 34.2 },
  "Flux.1 larger than one GPU, PipeFusion": { tags: IMAGE, models: ["Flux"], gb: 34.2 },
  "HunyuanDiT": { tags: IMAGE, models: ["HunyuanDiT"], gb: 8.2 },
  "HunyuanVideo": { tags: VIDEO, models: ["Hunyuan Video"], gb: 35.5 },
  "HunyuanVideo 1.5": { tags: VIDEO, models: ["Hunyuan Video"], gb: 29 },
  "LTX-2, video with audio": { tags: [...VIDEO, "Audio"], models: ["LTX-2"], gb: 52.8 },
  "LTX-Video": { tags: VIDEO, models: ["LTXV"], gb: 19.2 },
  "MiniMax H3, video with audio": { tags: [...VIDEO, "Audio"], models: ["MiniMax H3"], gb: 56.9 },
  "Qwen-Image": { tags: IMAGE, models: ["Qwen-Image"], gb: 57.7 },
  "Qwen-Image-Edit": { tags: ["Image Edit", "Image"], models: ["Qwen-Image-Edit"], gb: 57.7 },
  "SD 1.5": { tags: IMAGE, models: ["SD1.5"], gb: 4.3 },
  "SD3.5": { tags: IMAGE, models: ["SD3.5"], gb: 16.7 },
  "SD3.5, image to image": { tags: ["Image"], models: ["SD3.5"], gb: 16.7 },
  "SDXL": { tags: IMAGE, models: ["SDXL"], gb: 6.9 },
  "Upscale": { tags: ["Image Upscale", "Image"], models: ["Real-ESRGAN"], gb: 0.1 },
  "Wan 2.1, text to video": { tags: VIDEO, models: ["Wan2.1"], gb: 9.8 },
  "Wan 2.2, image to video": { tags: ["Image to Video", "Video"], models: ["Wan2.2"], gb: 35.6 },
  "Wan 2.2, text to video": { tags: VIDEO, models: ["Wan2.2"], gb: 35.6 },
  "Z-Image-Turbo": { tags: IMAGE, models: ["Z-Image-Turbo"], gb: 20.8 },
};

/** Return what the browser lists of a template beyond its title and description. */
function detailsOf(title) {
  const { tags = [], models = [], gb } = DETAILS[title] ?? {};
  return { tags, models, openSource: true, ...(gb === undefined ? {} : { size: gb * 1e9, vram: gb * 1e9 }) };
}

/** Sort titles for display: those that need no download first, then alphabetically. */
export function inOrder(titles) {
  const place = (title) => (FIRST.includes(title) ? FIRST.indexOf(title) : FIRST.length);
  return [...titles].sort((one, other) => place(one) - place(other) || one.localeCompare(other, "en"));
}

/**
 * List the templates as ComfyUI lists its own, with a description each; for those of extensions, it would show the title twice. folder: the
 * pack's folder name, under which the server lists the templates, in the order of the file system.
 */
export function listTemplates(api, folder) {
  const { getWorkflowTemplates, getCoreWorkflowTemplates } = api;
  let titles = null;                       // the page requests those of extensions first
  api.getWorkflowTemplates = async function (...args) {
    const { [folder]: ours, ...others } = await getWorkflowTemplates.apply(this, args);
    titles = ours ?? [];
    return others;
  };
  api.getCoreWorkflowTemplates = async function (locale, ...args) {
    const listed = await getCoreWorkflowTemplates.call(this, locale, ...args);
    if (!titles?.length) return listed;
    const descriptions = DESCRIPTIONS[locale] ?? DESCRIPTIONS.en;
    const templates = inOrder(titles).map((title) => ({ name: title, title, description: descriptions[title] ?? DESCRIPTIONS.en[title] ?? "",
      mediaType: "image", mediaSubtype: "jpg", ...detailsOf(title) }));
    return [...listed, { moduleName: folder, title: "xDiT", templates }];
  };
}

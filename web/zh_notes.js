/** Chinese for the templates' notes, keyed by line, with patterns as in zh.js. */

export const ZH_NOTES = {
  "### {} on all your GPUs":
    "### 在全部 GPU 上运行 {0}",
  "### {} on all your GPUs: video with audio":
    "### 在全部 GPU 上运行 {0}：带音频的视频",
  "### Image to image on all your GPUs":
    "### 在全部 GPU 上图生图",
  "### {}: image editing":
    "### {0}：图像编辑",
  "### {} image to video on all your GPUs":
    "### 在全部 GPU 上运行 {0}：图生视频",
  "### {} text to video on all your GPUs":
    "### 在全部 GPU 上运行 {0}：文生视频",
  "**xDiT Parallel Config** uses all CUDA devices. With two GPUs, the positive and the negative prompt run side by side. The image equals a single-GPU run up to rounding.":
    "**xDiT 并行配置**使用全部 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行。除舍入误差外，图像与单 GPU 运行相同。",
  "### Upscaling on all your GPUs":
    "### 在全部 GPU 上放大图像",
  "**Distributed Upscale Image** distributes the tiles of the image over all CUDA devices. The result equals that of **Upscale Image (using Model)**.":
    "**分布式放大图像**把图像的分块分给全部 CUDA 设备。结果与**使用模型放大图像**相同。",
  "For a video, connect its frames in place of the image: the GPUs share them as well.":
    "要放大视频，请连接视频的各帧来代替图像：它们也由各 GPU 分担。",
  "The same workflow also runs on one GPU.":
    "同一工作流也可在单个 GPU 上运行。",
  "**Files**":
    "**文件**",
  "| file | folder |":
    "| 文件 | 文件夹 |",
  "On Hugging Face: `lodestones/Chroma1-HD` has the model, `comfyanonymous/flux_text_encoders` the text encoder, `Comfy-Org/Lumina_Image_2.0_Repackaged` the VAE.":
    "在 Hugging Face 上：`lodestones/Chroma1-HD` 有模型，`comfyanonymous/flux_text_encoders` 有文本编码器，`Comfy-Org/Lumina_Image_2.0_Repackaged` 有 VAE。",
  "To halve the VRAM of the weights, set `weight_dtype` to `fp8_e4m3fn`.":
    "要使权重的显存占用减半，请把 `weight_dtype` 设为 `fp8_e4m3fn`。",
  "### Is the image the same?":
    "### 图像相同吗？",
  "The same seed, sampled by **Parallel Sampler** on all devices and by ComfyUI's own **KSampler** on one. The third image is their difference: black where they are equal.":
    "同一个种子，由**并行采样器**在全部设备上采样，并由 ComfyUI 自己的**K采样器**在一个设备上采样。第三张图像是两者之差：相同处为黑色。",
  "With CFG, data, Ulysses and Ring parallelism the difference is only rounding. **PipeFusion** and **DistriFusion** use values of the previous step, which changes the image slightly: to see how much, set `mode` of **xDiT Parallel Config** to `manual` and `pipefusion_degree` to the number of devices. More `warmup_steps` reduce the difference.":
    "使用 CFG、数据、Ulysses 和 Ring 并行时，差异只有舍入误差。**PipeFusion** 和 **DistriFusion** 使用上一步的数据，图像略有变化：要查看差异大小，请把 **xDiT 并行配置**的 `mode` 设为 `manual`，并把 `pipefusion_degree` 设为设备数。增加 `warmup_steps` 会减小差异。",
  "If you have one device only, set `devices` to `cpu,cpu` to try two.":
    "只有一个设备时，可把 `devices` 设为 `cpu,cpu` 来试用两个设备。",
  "The model is bundled with the pack. To compare your own model, select its file in both loaders.":
    "模型随本扩展提供。要比较您自己的模型，请在两个加载器中选择它的文件。",
  "### An image right away, without downloads":
    "### 无需下载，立即得到图像",
  "`xdit_demo.safetensors` and `xdit_demo_vae.safetensors` are bundled with the pack. The model is small and generates emoji: one face, person, animal or thing, 128 x 128 pixels.":
    "`xdit_demo.safetensors` 和 `xdit_demo_vae.safetensors` 随本扩展提供。模型很小，生成表情符号：一张脸、一个人、动物或物体，128 x 128 像素。",
  "Type a prompt into **Demo Prompt**, such as `woman astronaut on a purple background`. At most 24 words; backgrounds: white, black, gray, red, orange, yellow, green, blue, purple, pink, brown, cyan.":
    "在**演示提示词**中输入英文提示词，例如 `woman astronaut on a purple background`。最多 24 个词；背景可为 white、black、gray、red、orange、yellow、green、blue、purple、pink、brown、cyan。",
  "Without a GPU, two CPU workers run the model.":
    "没有 GPU 时由两个 CPU 工作进程运行模型。",
  "Use it to try the nodes and their settings. It is too small to run faster on two GPUs than on one: measure speed with your own models.":
    "可用它试用各节点及其设置。模型太小，两个 GPU 不会比一个快：请用您自己的模型比较速度。",
  "**xDiT Parallel Config** uses all CUDA devices. With two GPUs, the positive and the negative prompt run side by side. The image equals a single-GPU run up to rounding. The sampler is ComfyUI's own SamplerCustomAdvanced, which also runs the MODEL on all GPUs.":
    "**xDiT 并行配置**使用全部 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行。除舍入误差外，图像与单 GPU 运行相同。采样器是 ComfyUI 自己的 SamplerCustomAdvanced，它也在全部 GPU 上运行 MODEL。",
  "On Hugging Face: `Comfy-Org/flux2-klein` has the model and the text encoder, `Comfy-Org/flux2-dev` the VAE.":
    "在 Hugging Face 上：`Comfy-Org/flux2-klein` 有模型和文本编码器，`Comfy-Org/flux2-dev` 有 VAE。",
  "For FLUX.2 dev, use its model and text encoder (`mistral_3_small_flux2_bf16.safetensors`), **FluxGuidance** 4 on the prompt, and **BasicGuider** instead of CFGGuider; the image's tokens are then split across the GPUs.":
    "要使用 FLUX.2 dev，请用它的模型和文本编码器（`mistral_3_small_flux2_bf16.safetensors`），在提示词上加值为 4 的 **FluxGuidance**，并用 **BasicGuider** 代替 CFGGuider；图像的 token 由各 GPU 分担。",
  "**Load Image** loads your image; the prompt describes the change. The tokens of both images, yours and the new one, are split across all CUDA devices.":
    "**加载图像**读取您的图像；提示词描述要做的更改。您的图像与新图像的 token 由全部 CUDA 设备分担。",
  "On Hugging Face: `black-forest-labs/FLUX.1-Kontext-dev` has the model, `comfyanonymous/flux_text_encoders` the text encoders, `Comfy-Org/Lumina_Image_2.0_Repackaged` the VAE.":
    "在 Hugging Face 上：`black-forest-labs/FLUX.1-Kontext-dev` 有模型，`comfyanonymous/flux_text_encoders` 有文本编码器，`Comfy-Org/Lumina_Image_2.0_Repackaged` 有 VAE。",
  "For several images, chain **Set Reference Latent** nodes.":
    "要使用多张图像，请串联多个 **Set Reference Latent** 节点。",
  "### Flux.1 dev larger than one GPU":
    "### 单个 GPU 放不下时的 Flux.1 dev",
  "**xDiT Parallel Config** selects two GPUs and PipeFusion: each GPU has a part of the model's blocks, and patches of the image flow through them one after the other.":
    "**xDiT 并行配置**选择两个 GPU 和 PipeFusion：每个 GPU 有模型的一部分块，图像的各个 patch 依次流过它们。",
  "After the first step (`warmup_steps`), a patch sees the other patches as they were in the previous step, so the image differs slightly from a single-GPU run. With `num_patches` 1 it is exact, but slower.":
    "第一步（`warmup_steps`）之后，每个 patch 看到的其他 patch 来自上一步，因此图像与单 GPU 运行略有不同。`num_patches` 设为 1 时图像精确，但较慢。",
  "For heterogeneous GPUs, set `stage_blocks` to the number of the 57 blocks on each, for example `20,37`. For other GPUs, change `devices` and `pipefusion_degree`.":
    "GPU 型号不同时，把 `stage_blocks` 设为 57 个块中每个 GPU 的块数，例如 `20,37`。使用其他 GPU 时，更改 `devices` 和 `pipefusion_degree`。",
  "On Hugging Face: `Comfy-Org/flux1-dev` has the model, `comfyanonymous/flux_text_encoders` the text encoders, `Comfy-Org/Lumina_Image_2.0_Repackaged` the VAE.":
    "在 Hugging Face 上：`Comfy-Org/flux1-dev` 有模型，`comfyanonymous/flux_text_encoders` 有文本编码器，`Comfy-Org/Lumina_Image_2.0_Repackaged` 有 VAE。",
  "**xDiT Parallel Config** uses all CUDA devices. Flux runs at cfg 1.0, so the image's tokens are split across the GPUs (Ulysses).":
    "**xDiT 并行配置**使用全部 CUDA 设备。Flux 在 cfg 1.0 下运行，因此图像的 token 由各 GPU 分担（Ulysses）。",
  "For Flux.1 schnell, select `flux1-schnell.safetensors` and set steps to 4.":
    "要使用 Flux.1 schnell，请选择 `flux1-schnell.safetensors`，并把步数设为 4。",
  "**xDiT Parallel Config** uses all CUDA devices. With two GPUs, the positive and the negative prompt run side by side; with more GPUs, the tokens are split as well. The image equals a single-GPU run up to rounding.":
    "**xDiT 并行配置**使用全部 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；GPU 更多时还分担 token。除舍入误差外，图像与单 GPU 运行相同。",
  "**Load xDiT Model** loads the diffusion model from the checkpoint, **Load CLIP and VAE** the two text encoders and the VAE. Prompts can be in English or Chinese.":
    "**加载 xDiT 模型**从 checkpoint 加载扩散模型，**加载 CLIP 和 VAE** 加载两个文本编码器和 VAE。提示词可用英文或中文。",
  "On Hugging Face it is in `{}`.":
    "在 Hugging Face 上，它在 `{0}` 中。",
  "On Hugging Face, all of them are in `{}`.":
    "在 Hugging Face 上，全部在 `{0}` 中。",
  "**xDiT Parallel Config** uses all CUDA devices, which split the tokens of text, audio and video. The video equals a single-GPU run up to rounding, unless the weights exceed one GPU: then the blocks are distributed over the GPUs, or offloaded to system RAM; the node says which.":
    "**xDiT 并行配置**使用全部 CUDA 设备，由它们分担文本、音频和视频的 token。除舍入误差外，视频与单 GPU 运行相同；但权重超出单个 GPU 时，各块分布到各 GPU 上，或卸载到系统内存，节点会说明。",
  "**Distributed VAE Decode** distributes the tiles of the video VAE over the GPUs. ComfyUI's own nodes load the text encoder and both VAEs, and decode the audio.":
    "**分布式 VAE 解码**把视频 VAE 的分块分到各 GPU 上。ComfyUI 自带的节点加载文本编码器和两个 VAE，并解码音频。",
  "On Hugging Face: `Comfy-Org/MiniMax-H3` has all of them.":
    "在 Hugging Face 上：`Comfy-Org/MiniMax-H3` 有全部文件。",
  "To start or end with an image, connect `first_frame` or `last_frame`. For reference images, videos and audio, use MiniMax H3 Reference to Video with the `ref2va` file.":
    "要以图像开始或结束，请连接 `first_frame` 或 `last_frame`。要参考图像、视频和音频，请使用 MiniMax H3 Reference to Video 和 `ref2va` 文件。",
  "**xDiT Parallel Config** uses all CUDA devices. With two GPUs, the positive and the negative prompt run side by side; with more GPUs, the video's tokens are split as well. The video equals a single-GPU run up to rounding.":
    "**xDiT 并行配置**使用全部 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；GPU 更多时还分担视频的 token。除舍入误差外，视频与单 GPU 运行相同。",
  "The length must be 4 n + 1 frames.":
    "长度须为 4 n + 1 帧。",
  "**xDiT Parallel Config** uses all CUDA devices. They split the video's tokens; the video equals a single-GPU run up to rounding. If the model (26 GB) does not fit on one GPU, its blocks are distributed over the GPUs. The VAE decodes on all of them.":
    "**xDiT 并行配置**使用全部 CUDA 设备。它们分担视频的 token；除舍入误差外，视频与单 GPU 运行相同。模型（26 GB）放不进单个 GPU 时，各块分布到各 GPU 上。VAE 在全部 GPU 上解码。",
  "On Hugging Face: `comfyanonymous/flux_text_encoders` has `clip_l`, `Comfy-Org/HunyuanVideo_repackaged` the others.":
    "在 Hugging Face 上：`comfyanonymous/flux_text_encoders` 有 `clip_l`，`Comfy-Org/HunyuanVideo_repackaged` 有其余文件。",
  "**xDiT Parallel Config** uses all CUDA devices. With two GPUs, the positive and the negative prompt run side by side; with more GPUs, the tokens of video and audio are split as well. The video equals a single-GPU run up to rounding, unless the weights exceed one GPU: then the blocks are distributed over the GPUs.":
    "**xDiT 并行配置**使用全部 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；GPU 更多时还分担视频和音频的 token。除舍入误差外，视频与单 GPU 运行相同；但权重超出单个 GPU 时，各块分布到各 GPU 上。",
  "**Load xDiT Model** loads the diffusion model from the checkpoint, **Load CLIP and VAE** the VAE. ComfyUI's own nodes load the text encoder and the audio VAE, and combine video and audio.":
    "**加载 xDiT 模型**从 checkpoint 加载扩散模型，**加载 CLIP 和 VAE** 加载 VAE。ComfyUI 自己的节点加载文本编码器和音频 VAE，并合并视频和音频。",
  "On Hugging Face: `Lightricks/LTX-2` has the checkpoint, `Comfy-Org/ltx-2` the text encoder.":
    "在 Hugging Face 上：`Lightricks/LTX-2` 有 checkpoint，`Comfy-Org/ltx-2` 有文本编码器。",
  "The length must be 8 n + 1 frames, the same in both empty latents. The frame rate is set in three nodes: LTXVConditioning, LTXV Empty Latent Audio and Create Video.":
    "长度须为 8 n + 1 帧，两个空 latent 中相同。帧率在三个节点中设置：LTXVConditioning、LTXV Empty Latent Audio 和 Create Video。",
  "To save VRAM, set `weight_dtype` to fp8_e4m3fn.":
    "要节省显存，请把 `weight_dtype` 设为 fp8_e4m3fn。",
  "**xDiT Parallel Config** uses all CUDA devices. With two GPUs, the positive and the negative prompt run side by side; with more GPUs, the video's tokens are split as well. The video equals a single-GPU run up to rounding. The sampler is ComfyUI's own SamplerCustom, which also runs the MODEL on all GPUs.":
    "**xDiT 并行配置**使用全部 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；GPU 更多时还分担视频的 token。除舍入误差外，视频与单 GPU 运行相同。采样器是 ComfyUI 自己的 SamplerCustom，它也在全部 GPU 上运行 MODEL。",
  "**Load xDiT Model** loads the diffusion model from the checkpoint, **Load CLIP and VAE** the VAE.":
    "**加载 xDiT 模型**从 checkpoint 加载扩散模型，**加载 CLIP 和 VAE** 加载 VAE。",
  "On Hugging Face: `Lightricks/LTX-Video` has the checkpoint, `comfyanonymous/flux_text_encoders` the text encoder.":
    "在 Hugging Face 上：`Lightricks/LTX-Video` 有 checkpoint，`comfyanonymous/flux_text_encoders` 有文本编码器。",
  "The length must be 8 n + 1 frames.":
    "长度须为 8 n + 1 帧。",
  "**Load Image** loads your image; the prompt describes the change. With two GPUs, the positive and the negative prompt run side by side; if the model (41 GB) does not fit on one GPU, its blocks are distributed over the GPUs.":
    "**加载图像**读取您的图像；提示词描述要做的更改。有两个 GPU 时，正向和负向提示词同时运行；模型（41 GB）放不进单个 GPU 时，各块分布到各 GPU 上。",
  "On Hugging Face: `Comfy-Org/Qwen-Image-Edit_ComfyUI` has the model, `Comfy-Org/Qwen-Image_ComfyUI` the others.":
    "在 Hugging Face 上：`Comfy-Org/Qwen-Image-Edit_ComfyUI` 有模型，`Comfy-Org/Qwen-Image_ComfyUI` 有其余文件。",
  "For several images, connect `image2` and `image3` of both prompts. To halve the VRAM of the weights, set `weight_dtype` to `fp8_e4m3fn`.":
    "要使用多张图像，请连接两个提示词的 `image2` 和 `image3`。要使权重的显存占用减半，请把 `weight_dtype` 设为 `fp8_e4m3fn`。",
  "**xDiT Parallel Config** uses all CUDA devices. With two GPUs, the positive and the negative prompt run side by side; if the model (41 GB) does not fit on one GPU, its blocks are distributed over the GPUs.":
    "**xDiT 并行配置**使用全部 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；模型（41 GB）放不进单个 GPU 时，各块分布到各 GPU 上。",
  "**Load xDiT Model** loads the diffusion model from the checkpoint, **Load CLIP and VAE** the rest.":
    "**加载 xDiT 模型**从 checkpoint 加载扩散模型，**加载 CLIP 和 VAE** 加载其余部分。",
  "More GPUs are useful for batches of images.":
    "更多 GPU 适用于图像批次。",
  "**Load Image** loads your image; its width and height should be multiples of 16. **Distributed VAE Encode** encodes it, and `denoise` of **Parallel Sampler** sets how much of it changes.":
    "**加载图像**读取您的图像；其宽和高应为 16 的倍数。**分布式 VAE 编码**对其编码，**并行采样器**的 `denoise` 设定改变的程度。",
  "**xDiT Parallel Config** uses all CUDA devices. With two GPUs, the positive and the negative prompt run side by side.":
    "**xDiT 并行配置**使用全部 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行。",
  "On Hugging Face, all of them are in `stabilityai/stable-diffusion-3.5-medium`: the text encoders in `text_encoders/`, the VAE as `vae/diffusion_pytorch_model.safetensors` (rename it).":
    "在 Hugging Face 上，全部在 `stabilityai/stable-diffusion-3.5-medium` 中：文本编码器在 `text_encoders/` 中，VAE 为 `vae/diffusion_pytorch_model.safetensors`（请改名）。",
  "With four GPUs, set `mode` to manual, `cfg_degree` 2 and `displaced_degree` 2: DistriFusion splits the image by rows, which changes it slightly. More GPUs are also useful for batches of images.":
    "有四个 GPU 时，把 `mode` 设为 manual，`cfg_degree` 设为 2，`displaced_degree` 设为 2：DistriFusion 按行拆分图像，图像略有变化。更多 GPU 也适用于图像批次。",
  "**xDiT Parallel Config** uses all CUDA devices. With two GPUs, the positive and the negative prompt run side by side; with more GPUs, the video's tokens are split as well. The video equals a single-GPU run up to rounding. The VAE decodes on all GPUs.":
    "**xDiT 并行配置**使用全部 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；GPU 更多时还分担视频的 token。除舍入误差外，视频与单 GPU 运行相同。VAE 在全部 GPU 上解码。",
  "The 14B model is `wan2.1_t2v_14B_fp16.safetensors`; if it does not fit on one GPU, its blocks are distributed over the GPUs. The length must be 4 n + 1 frames.":
    "14B 模型是 `wan2.1_t2v_14B_fp16.safetensors`；放不进单个 GPU 时，各块分布到各 GPU 上。长度须为 4 n + 1 帧。",
  "**xDiT Parallel Config** uses all CUDA devices for both models. With two GPUs, the positive and the negative prompt run side by side. Both models stay loaded if they fit; otherwise the second replaces the first at step 10, and is loaded from system RAM in later runs.":
    "**xDiT 并行配置**为两个模型使用全部 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行。放得下时两个模型都保持加载；否则第二个在第 10 步取代第一个，以后的运行从系统内存加载。",
  "On Hugging Face: `Comfy-Org/Wan_2.1_ComfyUI_repackaged` has the text encoder, `Comfy-Org/Wan_2.2_ComfyUI_Repackaged` the others.":
    "在 Hugging Face 上：`Comfy-Org/Wan_2.1_ComfyUI_repackaged` 有文本编码器，`Comfy-Org/Wan_2.2_ComfyUI_Repackaged` 有其余文件。",
  "The sampler is ComfyUI's own KSampler (Advanced), which also runs the MODEL on all GPUs.":
    "采样器是 ComfyUI 自己的K采样器（高级），它也在全部 GPU 上运行 MODEL。",
  "**xDiT Parallel Config** uses all CUDA devices. The model runs at cfg 1.0, so the image's tokens are split across the GPUs (Ulysses).":
    "**xDiT 并行配置**使用全部 CUDA 设备。模型在 cfg 1.0 下运行，因此图像的 token 由各 GPU 分担（Ulysses）。",
  "The model is distilled for 8 steps.":
    "模型为 8 步蒸馏。",
};

/** Chinese for titles of nodes in the templates. */
export const ZH_TITLES = {
  "Positive Prompt": "正向提示词",
  "Negative Prompt": "负向提示词",
  "Files and folders": "文件与文件夹",
  "All devices": "全部设备",
  "One device": "单个设备",
  "Shift, high noise": "Shift，高噪声",
  "Shift, low noise": "Shift，低噪声",
  "High noise: steps 0 to 10": "高噪声：第 0 至 10 步",
  "Low noise: steps 10 to 20": "低噪声：第 10 至 20 步",
  "Seed of both": "两者的种子",
  "All minus one": "全部减单个",
  "One minus all": "单个减全部",
  "Both": "两者之和",
  "Difference (black: none)": "差异（黑色：无）",
  "One device and all": "单个设备与全部设备",
  "The demo model": "演示模型",
};

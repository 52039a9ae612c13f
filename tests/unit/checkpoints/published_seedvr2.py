"""Names and shapes of SeedVR2's files, of 3 and of 7 billion weights, which ComfyUI's own module takes. Used by
test_header.py."""

from tests.unit.checkpoints.published_comfyui import blocks


def _linear(name, outputs, inputs, bias=True):
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _block(width, streams, hidden, freqs, is_gated):
    found = {"attn.rope.rope.freqs": (freqs,)}
    for stream in streams:
        found |= {**_linear(f"attn.proj_qkv.{stream}", 3 * width, width, False),
                  **_linear(f"attn.proj_out.{stream}", width, width),
                  f"attn.norm_q.{stream}.weight": (128,), f"attn.norm_k.{stream}.weight": (128,)}
        found |= {**_linear(f"mlp.{stream}.proj_in", hidden, width, not is_gated),
                  **_linear(f"mlp.{stream}.proj_out", width, hidden, not is_gated),
                  **(_linear(f"mlp.{stream}.proj_in_gate", hidden, width, False) if is_gated else {}),
                  **{f"ada.{stream}.{layer}_{what}": (width,) for layer in ("attn", "mlp")
                     for what in ("shift", "scale", "gate")}}
    return found


def _model(width, num_blocks, num_apart, hidden, freqs, is_gated, has_norm):
    apart, shared = ("vid", "txt"), ("all",)
    found = {"positive_conditioning": (58, 5120), "negative_conditioning": (64, 5120),
             **_linear("vid_in.proj", width, 132), **_linear("txt_in", width, 5120),
             **_linear("emb_in.proj_in", width, 256), **_linear("emb_in.proj_hid", width, width),
             **_linear("emb_in.proj_out", 6 * width, width), **_linear("vid_out.proj", 64, width)}
    found |= blocks("blocks.", num_apart, _block(width, apart, hidden, freqs, is_gated))
    for number in range(num_apart, num_blocks):
        found |= {f"blocks.{number}.{name}": shape
                  for name, shape in _block(width, shared, hidden, freqs, is_gated).items()}
    return found | ({"vid_out_norm.weight": (width,), "vid_out_ada.out_shift": (width,),
                     "vid_out_ada.out_scale": (width,)} if has_norm else {})


SEEDVR2_3B = _model(2560, 32, 10, 6912, 21, True, True)
SEEDVR2_7B = _model(3072, 36, 36, 12288, 10, False, False)
SEEDVR2_7B_SHARED = _model(3072, 36, 10, 8192, 10, True, False)

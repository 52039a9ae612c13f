"""What ComfyUI's nodes do to what self-attention gives: our models in one process against ComfyUI's own,
with the nodes' own functions."""

import functools

import pytest
import torch

from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import VARIANTS, families
from tests.support.tolerances import close, relative_error
from tests.unit.checkpoints.quantisation.test_layerwise_casting import CPU, requested
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import SINGLE
from xdit_backend.hooks.forward_context import ModelPatches
from xdit_backend.hooks.install import install_hooks
from xdit_backend.models.common.example_inputs import as_comfyui, options_of
from xdit_backend.protocol.specs import Nag
from xdit_backend.worker.models import Loaded

HEEDING = [kind for kind, family in families().items() if kind not in VARIANTS
           and (family.plan.takes_unet_patches or family.plan.takes_output_patches)]
SETTINGS = {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}


class Recorded:
    """A MODEL for a node: it keeps the function that the node hands it."""

    def clone(self):
        return self

    def disable_model_cfg1_optimization(self):
        pass

    def set_model_attn1_output_patch(self, function):
        self.function = function

    def set_model_attn1_replace(self, function, *place):
        self.function, self.place = function, place

    def set_model_sampler_post_cfg_function(self, function, disable_cfg1_optimization):
        pass


def both(path, family, options, **patches):
    """(ours, native): a prediction for a negative and a positive prompt in one batch.
    patches: of our ForwardContext."""
    import comfy.sd
    transformer = load_transformer(open_checkpoint(path).spec("float32", "float32"), CPU)
    loaded = Loaded(transformer, install_hooks(transformer.model, family.plan),
                    torch.float32,
                    range(0))
    latent, timestep, conditioning = requested(family, transformer.config)
    twice = lambda tensor: torch.cat([tensor, tensor.flip(-1)]) if torch.is_tensor(tensor) else tensor  # noqa: E731
    latent, timestep = torch.cat([latent, latent]), torch.cat([timestep, timestep])
    conditioning = {name: value if name in family.inputs.counts else twice(value)
                    for name, value in conditioning.items()}
    with torch.inference_mode():
        output, _ = loaded.hooks.run(loaded.context(SINGLE, Traffic(), latent, timestep, conditioning,
                                                    patches=ModelPatches(**patches)))
        net = comfy.sd.load_diffusion_model(str(path)).model.diffusion_model
        counted = {name: len(conditioning[name]) for name in family.inputs.counts if name in conditioning}
        call = functools.partial(net, latent, timestep, **as_comfyui(conditioning, family) | counted)
        own = options_of(family, conditioning)
        plain = call(transformer_options=own)
        return family.prediction(output, latent), call(
            transformer_options={**own, "cond_or_uncond": [1, 0], **options}), plain


@pytest.mark.parametrize("kind", by_default(["flux", "sd15"], HEEDING))
def test_normalized_attention_guidance_equals_the_native_model(file_of, kind):
    family, path = families()[kind], file_of(kind)
    from comfy_extras.nodes_nag import NAGuidance
    model = NAGuidance.execute(Recorded(), **SETTINGS).args[0]

    result, want, plain = both(path, family, {"patches": {"attn1_output_patch": [model.function]}},
                               guided=(Nag(5.0, 0.5, 1.5, positive=1, negative=0, num_parts=2),))

    close(result, want, 2e-5)
    assert relative_error(want, plain) > 1e-3


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_attention_scores_equal_those_that_the_node_sees(file_of, kind):
    """Of the first block in the middle: their mean over heads and sum over queries,
    of which the node makes its mask."""
    family, path = families()[kind], file_of(kind)
    from comfy_extras.nodes_sag import SelfAttentionGuidance
    model = SelfAttentionGuidance.execute(Recorded(), 0.5, 2.0).args[0]
    tokens = 2 * 3 if kind == "sdxl" else 1 * 2
    scores = torch.zeros(1, 2, tokens)

    result, want, _ = both(path, family, {"patches_replace": {"attn1": {model.place: model.function}}},
                           operations={".".join(map(str, model.place)): "scores"}, scores=scores)

    names = model.function.__code__.co_freevars
    seen = model.function.__closure__[names.index("attn_scores")].cell_contents.unflatten(0, (1, -1)).mean(1).sum(1)
    close(result, want, 2e-5)
    close(scores[0, :1], seen, 1e-5)

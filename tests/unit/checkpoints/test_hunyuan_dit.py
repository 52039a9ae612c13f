"""HunyuanDiT: what tells its versions apart, and its two texts, as ComfyUI's own module takes them."""

import pytest
import torch
from safetensors.torch import save_file

from tests.support.model_zoo import example
from tests.support.tiny_checkpoints import families, fill
from tests.support.tolerances import close, relative_error
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.models.common.example_inputs import conditioning_of
from xdit_backend.protocol.errors import ConfigError

FAMILY = families()["hunyuandit"]
SIZES = torch.tensor([[768.0, 512.0, 1024.0, 640.0, 0.0, 0.0]])


@pytest.fixture(scope="module")
def models(file_of, tmp_path_factory):
    """ComfyUI's module of a version before 1.2, and ours of its file.
    Tiny ones ComfyUI's loader takes for 1.2, by their widths."""
    file_of("hunyuandit")                                      # which makes ComfyUI importable
    import comfy.ops
    from comfy.ldm.hydit.models import HunYuanDiT
    native = HunYuanDiT(**FAMILY.testing.arguments, **FAMILY.testing.more, dtype=torch.float32, device="cpu",
                        operations=comfy.ops.disable_weight_init)
    with torch.no_grad():
        fill(native, torch.Generator().manual_seed(3))
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in native.state_dict().items()}, str(path))
    header = open_checkpoint(path)
    assert header.family is FAMILY
    loaded = load_transformer(header.spec("float32", "float32"), torch.device("cpu"))
    return native, loaded.model, loaded.config


@pytest.mark.parametrize("tokens, masked", [(20, 20), (20, 12), (8, 8)], ids=str)
def test_a_version_that_is_told_sizes_equals_comfyuis_own(models, tokens, masked):
    """Also with prompts that are concatenated, of which one has a mask."""
    native, model, config = models
    given = conditioning_of(FAMILY, config, torch.Generator().manual_seed(1), {"context": tokens}, 2)
    given["text_embedding_mask"] = given["text_embedding_mask"][:, :masked]
    x, t = torch.randn(2, 4, 7, 12, generator=torch.Generator().manual_seed(2)), torch.tensor([900.0, 30.0])

    with torch.inference_mode():
        result = FAMILY.prediction(model(**FAMILY.forward_arguments(x, t, {**given, "image_meta_size": SIZES}, config),
                                         return_dict=False)[0], x)
        want, other = (native(x, t, **{name: tensor.clone() for name, tensor in given.items()},
                              image_meta_size=sizes.repeat(2, 1))
                       for sizes in (SIZES, 2 * SIZES))       # it writes into the text that it is given

    close(result, want, 2e-5)
    assert relative_error(want, other) > 1e-2


@pytest.mark.parametrize("change, words", [
    (lambda given: given.pop("encoder_hidden_states_t5"), "has 7 and none"),
    (lambda given: given.pop("text_embedding_mask"), "has 7 and 8"),
    (lambda given: given.update(context=given["context"][:, :4]), "of at least 5 and 6 tokens, .* has 4 and 8")],
    ids=["no second text", "no mask", "short"])
def test_texts_of_another_model_are_refused(change, words):
    one = example("HunyuanDiT")
    change(one.conditioning)

    with pytest.raises(ConfigError, match=words):
        one.run()

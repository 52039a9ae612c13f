"""Check of an upscale model's file: the reason for which Distributed Upscale Image would reject it."""

from ....xdit_backend.checkpoints.build_upscaler import facts_of, load_upscaler
from ....xdit_backend.protocol.errors import UnsupportedError
from ..upscale.upscaler_patcher import check_upscale_model


def refused_upscaler(loader, name):
    """Reason for which Distributed Upscale Image would reject the model of a file, or None. The file is loaded, and
    loaded again as by a worker.

    loader: ComfyUI's class UpscaleModelLoader. name: of a file in its folder.
    """
    try:
        [upscale_model] = loader.execute(name).args
    # whatever spandrel and torch raise for a file of another kind; ComfyUI's loader reports the details
    except Exception:
        return None
    try:
        check_upscale_model(upscale_model)
        load_upscaler(upscale_model.model.state_dict(), facts_of(upscale_model))
    except UnsupportedError as error:
        return str(error)
    return None

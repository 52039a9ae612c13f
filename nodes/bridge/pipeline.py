"""PipeFusion of one run: which calls of the model run whole and which as patches, and how they reach the workers.

A RemoteModel makes one for each run of a model that is spread over stages. Any sampler node gets its patches run inside
each call; the patchwise sampler hands in single patches and keeps the stages full from call to call.
"""

import dataclasses

import torch

from comfy.patcher_extension import WrappersMP

from ...xdit_backend.partition import cut_patches, num_tokens, opens_step
from ...xdit_backend.planner import branches_together, choose_num_patches, describe_layout, warmup_layout
from .operations import compares_branches
from .staleness import Staleness

# What is known to leave the calls of the model as the workers take them. All else makes every step whole.
# Of a prompt: ComfyUI takes a part of the latent for it, or only a part of its prediction.
PARTS = {"area": "an area for a prompt", "mask": "a mask for a prompt", "gligen": "GLIGEN", "hooks": "hooks on a prompt"}
# Of model_options: functions outside of the model's calls, which may look at the whole latent
GUIDANCE = {"sampler_cfg_function": "a node that changes guidance", "sampler_post_cfg_function": "a node that changes guidance",
            "sampler_pre_cfg_function": "a node that changes guidance",
            "sampler_calc_cond_batch_function": "a node that changes guidance",
            "denoise_mask_function": "a node that changes the noise mask"}
HARMLESS = {"transformer_options", "disable_cfg1_optimization", "to_load_options", "torch_compile_kwargs"}
OPTIONS = {"model_function_wrapper": "a node that wraps the model's function", "context_handler": "context windows"}
# Of the MODEL: objects that may be replaced
OBJECTS = {"model_sampling", "latent_format", "diffusion_model"}               # the last: compiled, see carried.py
# Samplers whose steps are element by element in space, by the names of their functions
ELEMENTWISE = {f"sample_{name}" for name in (
    "euler", "euler_cfg_pp", "euler_ancestral", "euler_ancestral_cfg_pp", "heun", "heunpp2", "exp_heun_2_x0", "exp_heun_2_x0_sde",
    "dpm_2", "dpm_2_ancestral", "lms", "dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde", "dpmpp_sde_gpu", "dpmpp_2m",
    "dpmpp_2m_cfg_pp", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde",
    "dpmpp_3m_sde_gpu", "ddpm", "lcm", "ipndm", "ipndm_v", "deis", "res_multistep", "res_multistep_cfg_pp",
    "res_multistep_ancestral", "res_multistep_ancestral_cfg_pp", "gradient_estimation", "gradient_estimation_cfg_pp", "er_sde",
    "seeds_2", "seeds_3", "sa_solver", "sa_solver_pece", "unipc", "unipc_bh2")} | {"dpm_fast_function"}
KEY, COMPILE_KEY = "xdit", "torch.compile"                     # of our wrappers, and of ComfyUI's that put the compiled model in place
PATCHWISE, WHOLE, DRAINED = "xdit_patchwise", "xdit_whole", "xdit_drained"     # in transformer_options, see wrappers.py


def why_whole(conds, model_options):
    """Why every step of this workflow has to be whole, in a person's words; None if it need not."""
    options = model_options.get("transformer_options", {})
    if options.get(WHOLE) is not None:
        return options[WHOLE]
    if compares_branches(options):
        return "Normalized Attention Guidance"
    for entry in (entry for cond in conds if cond for entry in cond):
        for key, text in PARTS.items():
            if entry.get(key) is not None:
                return text
    for key, value in model_options.items():
        if key not in HARMLESS and key not in GUIDANCE and value is not None:
            return OPTIONS.get(key, f'a node that sets "{key}" on the MODEL')
    for wrappers in options.get("wrappers", {}).values():
        for key, functions in wrappers.items():
            if key not in (KEY, COMPILE_KEY) and functions:
                name = key or getattr(functions[0], "__qualname__", type(functions[0]).__name__).partition(".")[0]
                return f"a node that wraps the sampling ({name})"
    return None


def why_whole_run(sampler, guider):
    """The same, of what is the same for all steps: the sampler and the MODEL of ComfyUI's guider."""
    if getattr(getattr(sampler, "sampler_function", None), "__name__", "") == "dpm_adaptive_function":
        return "dpm_adaptive, which chooses its steps by an error over the whole latent"
    replaced = sorted(set(guider.model_patcher.object_patches) - OBJECTS)
    return f"a node that replaces {replaced[0]} of the MODEL" if replaced else None


def why_drained(sampler, conds, base_model, model_options):
    """Why a run with patches has to take its steps one after the other, in a person's words; None if it need not."""
    if any(entry.get("control") is not None for cond in conds if cond for entry in cond):
        return "a ControlNet, which reads the whole picture"
    for key, text in GUIDANCE.items():
        if model_options.get(key):
            return text
    if base_model.remote.family.parts:
        return "a latent of several parts, which ComfyUI hands to the sampler as one row of numbers"
    function = getattr(sampler, "sampler_function", None)
    if function is None or not function.__module__.startswith("comfy.") or function.__name__ not in ELEMENTWISE:
        return "a sampler that is not known to work on each piece alone"
    return why_one_call(base_model, model_options)


def why_one_call(base_model, model_options):
    """What of others' runs around each call of the model, so that no other call may come in between; None if nothing does."""
    net, options = base_model.diffusion_model, model_options["transformer_options"]
    around = [options.get("wrappers", {}).get(kind, {}) for kind in (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)]
    if compares_branches(options):
        return "Normalized Attention Guidance"
    if model_options.get("model_function_wrapper") or any(functions for by_key in around for functions in by_key.values()):
        return "a node that wraps the model's calls"
    if any(functions for kind in options.get("callbacks", {}).values() for functions in kind.values()):
        return "a node that follows the sampling"
    if net._forward_hooks or net._forward_pre_hooks or hasattr(net, "_orig_mod"):
        return "hooks on the model, or a compiled one"
    return None


class PipelineRun:
    """The patches of one run, and the conditioning whose keys and values the workers hold.

    A call of the model is whole where staleness.py says that it is synchronous; the rest run as patches with stale keys and values.
    warmup_steps = 0 is a cold start: in the first step, patches see the patches before them only.
    """

    def __init__(self, client, setup, layout, schedule, shape):
        config = setup.config
        self._client, self._spec, self._config, self._layout = client, setup.spec, config, layout
        self._num_channels, self._patch_size = setup.num_channels, setup.family.patch_size(setup.transformer_config)
        sequence_degree = layout.ring_degree * layout.ulysses_degree
        num_patches = choose_num_patches(config.patches_asked, layout.pipefusion_degree, shape, self._patch_size, sequence_degree)
        self.shape = tuple(shape)
        self.patches = cut_patches(shape, self._patch_size, num_patches)
        self.dim = self.patches[0][0].dim
        self._padding = -shape[self.dim] % self._patch_size[self.dim - 2]      # rows that the model adds to have whole tokens
        self._padded = set()                                   # tickets of patches with these rows
        self._staleness = Staleness(schedule, config.warmup_steps, is_cold=True)

    def end(self):
        """Have the workers forget what they keep for this run."""
        self._client.end_run(self)

    def describe(self, whole_because, drained_because):
        """How the run is split, in a person's words. The arguments: as why_whole and why_drained say."""
        text, num_patches = describe_layout(self._layout), len(self.patches)
        if whole_because is not None:
            return f"{text}, every step whole, because this workflow uses {whole_because}"
        text += f", {num_patches} patch{'es' if num_patches > 1 else ''}"
        if num_patches < self._config.patches_asked:
            text += f" (the latent has too few rows for {self._config.patches_asked})"
        if drained_because is not None and num_patches > 1:
            text += f", one step after the other, because this workflow uses {drained_because}"
        return text

    def name(self, requests):
        """Give the requests' conditioning the name that the workers know it by."""
        return [dataclasses.replace(request, name=self._client.name_conditioning(request.conditioning, run=self))
                for request in requests]

    def is_whole(self, requests, sigma):
        """Must these named requests be evaluated for the whole latent?"""
        return len(self.patches) == 1 or self._staleness.is_synchronous(self._keepers(requests), sigma)

    def _keepers(self, requests):
        """{(conditioning, CFG rank)}: which ranks keep the keys and values of these requests."""
        return {(request.name, index % self._layout.cfg_degree) for index, request in enumerate(requests)}

    def predict_whole(self, requests, patches_follow=True):
        """Evaluate named requests for whole latents; keys and values are kept where patches of this latent follow."""
        keep = patches_follow and len(self.patches) > 1 and self._staleness.ends and self._is_of_this_run(requests)
        layout = warmup_layout(self._layout, self._spec.stages)
        if num_tokens(requests[0].latent.shape[2:], self._patch_size) < layout.ring_degree * layout.ulysses_degree:
            layout = self._layout                              # too few to share: one stage after the other
        guided = any(request.guided for request in requests)
        if guided:
            layout = branches_together(layout)
        apart = self._config.warmup == "whole" and layout.cfg_degree == 1
        batches = [[request] for request in requests] if apart else [requests]
        predictions = []
        for batch in batches:
            ticket = self._client.submit(self._spec, layout, self._num_channels, batch, keep=keep, run=self,
                                         forecast=self._config.forecast_keys_values,
                                         by_image=self._config.warmup in ("auto", "micro_batches") and layout == self._layout
                                         and not guided)
            predictions += self._client.wait([ticket])[1]
        if keep:
            self._staleness.hold(self._keepers(requests))
        return predictions

    def _is_of_this_run(self, requests):
        """Nodes may call the model for a piece of the latent, or for another one."""
        return all(tuple(request.latent.shape[2:]) == self.shape[2:] for request in requests)

    def first_rows(self, requests):
        """The rows at the beginning of each latent that its end is padded with: models wrap around. Of the whole, or of its first patch."""
        return [request.latent.narrow(self.dim, 0, self._padding).clone() for request in requests]

    def submit_patch(self, requests, index, first_rows):
        """Send named requests for patch `index`; returns a ticket for `wait`. first_rows: of the whole latents of these requests."""
        is_last = index == len(self.patches) - 1
        if is_last:
            self._staleness.hold(self._keepers(requests))
        is_padded = is_last and self._padding > 0
        if is_padded:
            requests = [dataclasses.replace(request, latent=torch.cat([request.latent, rows], self.dim))
                        for request, rows in zip(requests, first_rows)]
        ticket = self._client.submit(self._spec, self._layout, self._num_channels, requests, patch=self.patches[index][0],
                                     forecast=self._config.forecast_keys_values, run=self)
        if is_padded:
            self._padded.add(ticket)
        return ticket

    def wait(self, tickets):
        """The first of these tickets to be ready, and its predictions."""
        ticket, predictions = self._client.wait(tickets)
        if ticket in self._padded:
            self._padded.remove(ticket)
            predictions = [part.narrow(self.dim, 0, part.shape[self.dim] - self._padding) for part in predictions]
        return ticket, predictions

    def predict(self, requests, sigma, whole_because=None):
        """Evaluate requests for whole latents, whole or patch by patch; the stages run empty at the end."""
        requests = self.name(requests)
        apart = whole_because is not None or any(request.is_changed for request in requests)       # of others' keys and values
        if apart or not self._is_of_this_run(requests) or self.is_whole(requests, sigma):
            return self.predict_whole(requests, patches_follow=not apart)
        first_rows = self.first_rows(requests)
        tickets = [self.submit_patch([self._rows_of(request, patch, rows) for request in requests], index, first_rows)
                   for index, (patch, rows) in enumerate(self.patches)]
        pieces = {}
        while len(pieces) < len(tickets):
            ticket, predictions = self.wait([ticket for ticket in tickets if ticket not in pieces])
            pieces[ticket] = predictions
        return [torch.cat([pieces[ticket][index] for ticket in tickets], self.dim) for index in range(len(requests))]

    def _rows_of(self, request, patch, rows):
        """A request for a whole latent as one for a patch."""
        size = self._patch_size[self.dim - 2]
        num_rows = -(-self.shape[self.dim] // size)            # of tokens

        def cut(added_BTC):
            a_row = added_BTC.shape[1] // num_rows
            return added_BTC.narrow(1, patch.start // size * a_row, -(-rows // size) * a_row)
        return dataclasses.replace(request, latent=request.latent.narrow(self.dim, patch.start, rows), control=request.control_by(cut),
                                   parts=request.parts if opens_step(patch) else {})

"""What a shell's diffusion model does instead of computing: it asks the workers. Made by shell.py, one a MODEL."""

import functools

import torch

from ...xdit_backend.host.client import Call
from ...xdit_backend.planner import choose_layout, describe_layout
from ...xdit_backend.protocol.errors import ConfigError
from .carried import refuse_call, refuse_changed_modules, refuse_model_options
from .groups import GROUPS, show_text
from .pipeline import PipelineRun, why_whole


class RemoteModel:
    """What a shell's diffusion model does instead of computing: it asks the workers.

    modules, load_device: of the shell as it was made, to compare with; see carried.py.
    """

    def __init__(self, spec, family, transformer_config, config, devices, modules, load_device):
        self.modules, self.load_device, self._looked_at = modules, load_device, set()
        self.spec, self.family = spec, family
        self.num_heads = family.num_heads(transformer_config)
        self.num_channels = family.num_channels(transformer_config)
        self.config, self.devices = config, devices
        self._transformer_config = transformer_config
        self._shown = None                                     # the layout a person was told of in this run
        self._pipeline = self._schedule = self._whole_because = None

    def load(self, base_model):
        GROUPS.load_model(GROUPS.client(self.devices), self.spec, base_model)

    def unload(self):
        client = GROUPS.client_if(self.devices)
        if client is not None:
            client.drop(self.spec.name)

    def end_run(self):
        self._looked_at.clear()
        self._shown = self._pipeline = self._schedule = self._whole_because = None
        client = GROUPS.client_if(self.devices)
        if client is not None:
            client.end_run()

    def forward(self, x, timestep=None, context=None, control=None, transformer_options={}, **extra):
        """ComfyUI's call of a diffusion model. x: (B, C, H, W) or (B, C, F, H, W); returns like x, float32."""
        from . import branches
        if not torch.is_tensor(timestep) or not torch.is_tensor(context):
            raise ConfigError(f"A node calls this MODEL in a way of its own, and {self.family.name} takes a latent, a timestep and "
                              f"conditioning. Use a sampler node, or the kind of model that the node is for.")
        schedule, sigmas = transformer_options.get("sample_sigmas"), transformer_options.get("sigmas", timestep)
        refuse_call(self.family, control, transformer_options, extra)
        self._refuse_changed_modules(schedule, sigmas)
        conditioning = {"context": context, **extra}
        call = Call(x, timestep, {name: tensor for name in self.family.conditioning
                                  if (tensor := conditioning.get(name)) is not None})
        return branches.ask(call, functools.partial(self._predict, schedule, sigmas)).to(x.device)

    def calc_cond_batch(self, executor, model, conds, x, timestep, model_options):
        """Wraps ComfyUI's function of that name: branches run as coroutines where each goes to the workers on its own."""
        from . import branches  # here and below: the nodes load where greenlet is missing
        refuse_model_options(model_options)
        if self.spec.stages is None:
            layout = self._layout(2)
            if sum(bool(cond) for cond in conds) < 2 or layout.cfg_degree == 1:
                return executor(model, conds, x, timestep, model_options)
        else:
            self._whole_because = why_whole(conds, model_options)
        predict = functools.partial(self._predict, model_options["transformer_options"].get("sample_sigmas"), timestep)
        return branches.run_branches(predict, executor, model, conds, x, timestep, model_options)

    def begin_run(self, schedule, shape, whole_because=None):
        """PipeFusion of a run that begins. schedule: its sigmas. shape: of its whole latent."""
        client = GROUPS.client(self.devices)
        client.load_model(self.spec)
        self._schedule = schedule
        self._pipeline = PipelineRun(client, self.spec, self.family, self._transformer_config, self.config, self._layout(1),
                                     schedule, shape, whole_because)
        return self._pipeline

    def _refuse_changed_modules(self, schedule, sigmas):
        """Nodes may change modules for the time of a call. Looked at once for each noise level of a run."""
        sigma = sigmas.max().item()
        if schedule is None or sigma not in self._looked_at:
            refuse_changed_modules(self.modules[""][0], self.modules)
            self._looked_at.add(sigma)

    def _layout(self, num_branches):
        return choose_layout(self.config, len(self.devices), num_branches, self.num_heads, self.family.name, self.spec.stages)

    def _predict(self, schedule, sigmas, calls):
        if self.spec.stages is not None:
            return self._predict_in_stages(schedule, sigmas.max().item(), calls)
        layout = self._layout(len(calls))
        client = GROUPS.client(self.devices)
        client.load_model(self.spec)
        if layout != self._shown:
            show_text(f"running on {', '.join(self.devices)}: {describe_layout(layout)}{self.config.idle}")
            self._shown = layout
        return client.predict(self.spec, layout, self.num_channels, calls)

    def _predict_in_stages(self, schedule, sigma, calls):
        from . import patches
        predictions = patches.ask(calls, sigma)
        if predictions is not None:
            return predictions
        if schedule is None:                                   # called outside of a sampler: no step can be stale
            schedule = torch.tensor([sigma])
        if self._pipeline is None or schedule is not self._schedule:
            self.begin_run(schedule, calls[0].latent.shape, self._whole_because)
        return self._pipeline.predict(calls, sigma)

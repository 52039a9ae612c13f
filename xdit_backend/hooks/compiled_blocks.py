"""Compiled blocks: one torch.compile graph for each kind of block and shape of its inputs.

Hooks around a block run eagerly. Hooks inside it are in the graph as far as they are the same in every block; attention
and communication are custom ops (distributed/custom_ops.py), which look up the running forward.
"""

import functools
import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from ..distributed.custom_ops import chosen_output
from ..protocol.errors import UnsupportedError
from .attention_dispatch import RunningAttention

MAX_GRAPHS = 64                            # per kind of block; beyond, all are discarded and compiled again on demand
# of torch.compile. A weight may be replaced by one of another type or shape without a change of its module's dict
SETTINGS = {"skip_tensor_guards_with_matching_dict_tags": False, "use_recursive_dict_tags_for_guards": False}
LIMITS = "recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit"
FAILURES = ("torch._dynamo.exc", "torch._inductor.exc")        # modules of torch.compile's own exceptions
# argument of ComfyUI's blocks that contains the block's number, for each of which a graph would be compiled; and the
# entry of it that some blocks read
OPTIONS, ROPE_OPTIONS = "transformer_options", "rope_options"

log = logging.getLogger(__name__)


@dataclass
class CompiledBlock:
    """State of a block that a graph cannot contain."""

    forwards: dict[str, Any] = field(default_factory=dict)     # torch.compile's backend -> compiled forward
    attentions: dict = field(default_factory=dict)             # name -> arguments of RunningAttention
    graph_breaks: dict = field(default_factory=dict)           # path -> forward, see ModelPlan.graph_breaks
    once: dict = field(default_factory=dict)                   # path -> (module, span), see ModelPlan.cacheable


class CompiledBlocks:
    """The compiled blocks of a model on this rank."""

    def __init__(self, model, num_blocks, on_compile):
        """on_compile(done, total): called before a block runs compiled for the first time, which may take seconds."""
        self._refusal = getattr(model, "why_uncompiled", "")   # set by the family's patch_model
        self._values, self._on_compile = getattr(model, "forward_values", ()), on_compile
        self.blocks = [CompiledBlock() for _ in range(num_blocks)]
        # for the graph being traced: whether outputs of `once` are cached in this forward, and whether they are known
        self.keeps_once = self.knows_once = False

    def run(self, index, forward, context, arguments):
        """Run a block compiled and return its output. forward: its own, with the hooks inside it."""
        if self._refusal:
            raise uncompiled(self._refusal)
        block = self.blocks[index]
        backend = context.options.compile_backend
        if backend not in block.forwards:
            self._on_compile(index, len(self.blocks))
            block.forwards[backend] = compiled(forward, backend)
        for value in self._values:
            value.capture()
        known = self._find_once(index, block, context, arguments)
        state = context.state
        state.attentions = {name: RunningAttention(*arguments_of) for name, arguments_of in block.attentions.items()}
        state.graph_breaks = block.graph_breaks
        arguments = {name: plainly_strided(value) if torch.is_tensor(value) else value
                     for name, value in arguments.items()}
        if OPTIONS in arguments:
            arguments[OPTIONS] = {name: value for name, value in arguments[OPTIONS].items() if name == ROPE_OPTIONS}
        output = block.forwards[backend](**arguments)
        for key, moment in known.items():
            module, _ = block.once[key[1]]
            if not self.knows_once:
                context.once[key] = moment, module.once_output
            module.once_output = None                          # the cache of the context has it
        return output

    def _find_once(self, index, block, context, arguments):
        """Pass cached outputs to modules whose output is the same in several calls. Returns {key of
        ForwardContext.once: moment}."""
        self.keeps_once = bool(block.once) and context.once is not None
        if not self.keeps_once:
            return {}
        batch = next(value for value in arguments.values() if torch.is_tensor(value)).shape[0]
        moments = {(index, path): context.moment(span, batch) for path, (_, span) in block.once.items()}
        found = {key: context.once.get(key) for key in moments}
        self.knows_once = all(found[key] is not None and found[key][0] == moment for key, moment in moments.items())
        for (_, path), known in found.items():
            block.once[path][0].once_output = known[1] if self.knows_once else None
        return moments

    def once(self, module, forward, args, kwargs):
        """The output of such a module, while it is traced into a graph."""
        if not self.keeps_once:
            return forward(*args, **kwargs)
        if not self.knows_once:
            module.once_output = forward(*args, **kwargs)
        return module.once_output


def outside_graphs(forward, name):
    """Wrap the forward of a module with data-dependent control flow: a graph calls it through a custom op. name: of the
    module, see ModelPlan.graph_breaks."""
    @functools.wraps(forward)
    def called(hidden_states):
        return chosen_output(hidden_states, name) if torch.compiler.is_compiling() else forward(hidden_states)
    return called


def compiled(forward, backend):
    """Compile a forward with fullgraph. Raises UnsupportedError at the first call if it cannot be compiled."""
    compiled_forward = torch.compile(forward, backend=backend, dynamic=False, fullgraph=True)
    for name, value in {**SETTINGS, **dict.fromkeys(LIMITS, MAX_GRAPHS)}.items():
        if hasattr(torch._dynamo.config, name):                # depends on the version of PyTorch
            setattr(torch._dynamo.config, name, value)

    @functools.wraps(forward)
    def run(*args, **kwargs):
        try:
            try:
                return compiled_forward(*args, **kwargs)
            except torch._dynamo.exc.FailOnRecompileLimitHit:
                log.warning("blocks were compiled for %d shapes: discarding the graphs and compiling again", MAX_GRAPHS)
                torch._dynamo.reset()
                return compiled_forward(*args, **kwargs)
        except Exception as error:
            if type(error).__module__ not in FAILURES:
                raise
            raise uncompiled(summary(error)) from error
    return run


def uncompiled(why):
    """The UnsupportedError for a model whose blocks cannot be compiled."""
    return UnsupportedError("Set compile to off in xDiT Parallel Config, or remove TorchCompileModel: PyTorch cannot "
                            f"compile this model here ({why}).")


def summary(error):
    """First line of torch.compile's error message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def plainly_strided(tensor):
    """The tensor, contiguous and with a new tensor's strides in dims of size 1 too, for which graphs have guards."""
    return tensor.contiguous().flatten().view(tensor.shape)

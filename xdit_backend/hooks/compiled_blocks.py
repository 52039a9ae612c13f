"""Blocks as torch.compile makes them: one graph for each kind of block and shape of its inputs. Used by transformer.py
and unet.py.

Hooks that stand around a block run as they are. Of those inside it the graph has what is the same in every block;
attention and exchanges are operators (distributed/custom_ops.py), which ask the forward that runs.
"""

import functools
import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from ..distributed.custom_ops import chosen_output
from ..protocol.errors import UnsupportedError
from .attention_dispatch import RunningAttention

MAX_GRAPHS = 64                            # of a kind of block; then all are forgotten, and made again when asked for
# of torch.compile. A weight may be given numbers of another type or shape, which its module's dict does not tell
SETTINGS = {"skip_tensor_guards_with_matching_dict_tags": False, "use_recursive_dict_tags_for_guards": False}
LIMITS = "recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit"
FAILURES = ("torch._dynamo.exc", "torch._inductor.exc")        # files of what torch.compile raises by itself
# argument of ComfyUI's blocks in which its forwards number them, and what some read of it: each number would have a
# graph of its own
OPTIONS, PLACES = "transformer_options", "rope_options"

log = logging.getLogger(__name__)


@dataclass
class CompiledBlock:
    """What is known of a block inside of which a graph cannot look."""

    forwards: dict[str, Any] = field(default_factory=dict)     # backend -> of torch.compile
    attentions: dict = field(default_factory=dict)             # name -> what RunningAttention is told
    graph_breaks: dict = field(default_factory=dict)               # path -> forward, see ModelPlan.choosing
    once: dict = field(default_factory=dict)                   # path -> (module, span), see ModelPlan.once


class CompiledBlocks:
    """The compiled blocks of a model on this rank."""

    def __init__(self, model, num_blocks, on_compile):
        """on_compile(done, total): called before each block that is asked for the first time, which may take
        seconds."""
        self._refusal = getattr(model, "why_uncompiled", "")   # of amend
        self._values, self._on_compile = getattr(model, "forward_values", ()), on_compile
        self.blocks = [CompiledBlock() for _ in range(num_blocks)]
        # what a graph being made asks: are outputs of `once` kept in this forward, and are they known?
        self.keeps_once = self.knows_once = False

    def run(self, index, forward, context, arguments):
        """The output of a block. forward: its own, with the hooks inside of it."""
        if self._refusal:
            raise uncompiled(self._refusal)
        block = self.blocks[index]
        backend = context.compile_backend
        if backend not in block.forwards:
            self._on_compile(index, len(self.blocks))
            block.forwards[backend] = compiled(forward, backend)
        for value in self._values:
            value.capture()
        known = self._find_once(index, block, context, arguments)
        context.attentions = {name: RunningAttention(*given) for name, given in block.attentions.items()}
        context.graph_breaks = block.graph_breaks
        arguments = {name: plainly_strided(value) if torch.is_tensor(value) else value
                     for name, value in arguments.items()}
        if OPTIONS in arguments:
            arguments[OPTIONS] = {name: value for name, value in arguments[OPTIONS].items() if name == PLACES}
        output = block.forwards[backend](**arguments)
        for key, moment in known.items():
            module, _ = block.once[key[1]]
            if not self.knows_once:
                context.once[key] = moment, module.once_output
            module.once_output = None                          # it is kept as long as keys and values are
        return output

    def _find_once(self, index, block, context, arguments):
        """Give modules whose output is the same in several calls that of an earlier one. Returns {key of
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
        """The output of such a module, within a graph that is being made."""
        if not self.keeps_once:
            return forward(*args, **kwargs)
        if not self.knows_once:
            module.once_output = forward(*args, **kwargs)
        return module.once_output


def outside_graphs(forward, name):
    """The forward of a module that chooses what to compute: a graph calls it as it is. name: see ModelPlan.choosing."""
    @functools.wraps(forward)
    def called(hidden_states):
        return chosen_output(hidden_states, name) if torch.compiler.is_compiling() else forward(hidden_states)
    return called


def compiled(forward, backend):
    """A forward as torch.compile makes it, whole. Raises UnsupportedError where it cannot, when it is first called."""
    made = torch.compile(forward, backend=backend, dynamic=False, fullgraph=True)
    for name, value in {**SETTINGS, **dict.fromkeys(LIMITS, MAX_GRAPHS)}.items():
        if hasattr(torch._dynamo.config, name):                # which PyTorch's versions differ in
            setattr(torch._dynamo.config, name, value)

    @functools.wraps(forward)
    def run(*args, **kwargs):
        try:
            try:
                return made(*args, **kwargs)
            except torch._dynamo.exc.FailOnRecompileLimitHit:
                log.warning("blocks have been compiled for %d shapes, and are compiled anew", MAX_GRAPHS)
                torch._dynamo.reset()
                return made(*args, **kwargs)
        except Exception as error:
            if type(error).__module__ not in FAILURES:
                raise
            raise uncompiled(summary(error)) from error
    return run


def uncompiled(why):
    """The UnsupportedError of a model whose blocks cannot be compiled."""
    return UnsupportedError("Set compile to off in xDiT Parallel Config, or remove TorchCompileModel: PyTorch cannot "
                            f"compile this model here ({why}).")


def summary(error):
    """The first line of what torch.compile says."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def plainly_strided(tensor):
    """The tensor in one piece, with the strides that a new one has, also of dims of size 1: a graph asks for those that
    it was made for."""
    return tensor.contiguous().flatten().view(tensor.shape)

"""Attention of one forward on one rank, dispatched to the parallel method of its layout."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn

from ..attention.backends import attend as attend_here
from ..attention.backends import repeat_heads
from ..attention.masks import gathered_mask
from ..distributed.custom_ops import attention
from ..parallel.displaced import displaced_attention
from ..parallel.pipefusion import patch_attention
from ..parallel.reference_kv_cache import attention_with_references
from ..parallel.sequence_parallel import Attention, Window, usp_attention
from ..parallel.sparse_layout import sparse_of
from ..protocol.errors import UnsupportedError
from ..protocol.specs import SDPA
from .block_hooks import BlockPosition, one_key_per_group
from .enhance_video import enhance_factor
from .function_overrides import FunctionOverrides, functional, in_file
from .infinite_talk import locate_speakers
from .injected_networks import guide_text
from .nag import apply_nag
from .real_rotary import in_pairs, in_real_numbers

ROTATIONS = "apply_rotary_emb", "apply_rotary_emb_qwen"        # of diffusers, with complex numbers in some models
EXACT = " (exact)"                         # suffix of an attention's name in a graph: see BackendUse.exact
# names of attention in ComfyUI's models: the third is for packed sequences that each attend to themselves, the last
# returns one of the others
FOR_DEVICE = "optimized_attention_for_device"
COMFYUIS = "optimized_attention", "optimized_attention_masked", "optimized_var_attention", FOR_DEVICE
BIAS_DIMS = 8                              # added to the head size: four are needed, kernels require a multiple of 8


@dataclass
class RunningAttention:
    """The attention module that a forward is in, with the streams of its queries and keys."""

    module: torch.nn.Module
    position: BlockPosition
    name: str
    streams: tuple[str, ...]               # of the queries
    key_streams: tuple[str, ...]           # of keys and values; mostly the same
    reach: tuple | None = None             # of sliding-window attention, from ModelPlan.window
    num_calls: int = 0                     # of attention functions, so far
    is_exact: bool = False                 # for the running call: see BackendUse.exact
    factor: torch.Tensor | None = None     # of the module's output, see enhance_video.py

    @property
    def key(self):
        """Key of this attention call in the model: (block, name of the module, number of the call in it)."""
        return self.position.index, self.name, self.num_calls

    def refuse_uncalled(self):
        """Raise UnsupportedError if no hooked function was called, so that each rank attended to its own tokens."""
        if not self.num_calls:
            raise UnsupportedError("Unset the attention backend that is selected for diffusers in the workers, or use "
                                   f"one device: the attention {self.name} of block {self.position.index} did not call "
                                   "PyTorch's scaled_dot_product_attention, which parallel methods replace.")


class AttentionFunctions:
    """Replacements for torch's, diffusers' and ComfyUI's attention functions in the code of a model's attentions."""

    def __init__(self, running, needs_text):
        """running() -> the running ForwardContext, or None. needs_text: ModelPlan.needs_text."""
        self._running, self._needs_text = running, needs_text
        self._comfyuis = dict.fromkeys(COMFYUIS, self.optimized_attention) | {
            FOR_DEVICE: lambda *args, **options: self.optimized_attention}
        # name of the attention being traced into a graph, and whether it has called an attention function
        self._traced_name, self._is_traced = "", False
        self.function_overrides = FunctionOverrides(
            dict.fromkeys(ROTATIONS, in_real_numbers) | {
                "attention": self._with_overrides, "optimized_var_attention": self._in_groups},
            {"view_as_complex": in_pairs},
            F=functional(scaled_dot_product_attention=self.scaled_dot_product_attention),
            dispatch_attention_fn=self.dispatch_attention_fn,
            **self._comfyuis)

    def scaled_dot_product_attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                                     **options):
        """torch's function, (B, N, T, H). Within a hooked attention module: attention of this rank's queries by the
        forward's parallel method."""
        if torch.compiler.is_compiling():
            return self._in_graph(query, key, value, attn_mask, is_causal, options)
        context = self._running()
        if context is None:
            options.pop("is_exact", None)
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if context.state.attention is None:
            if "within" in options:                            # this rank has all tokens
                return options["within"](query, key, value)
            backend = context.backend.exact() if options.get("is_exact") else context.backend
            attend = partial(attend_here, use=backend, mask=attn_mask, is_causal=is_causal, scale=options.get("scale"))
            out = attend(query, key, value)
            return out if context.state.guided_attention is None else guide_text(context, query, out, attend)
        context.state.attention.is_exact = bool(options.get("is_exact"))
        if (attn_mask is not None or is_causal) and context.state.attention.reach is None:
            raise UnsupportedError("Use cfg_degree instead: this model masks its self-attention in a way that "
                                   "sequence parallelism and PipeFusion do not support yet.")
        return self._attend(query, key, value, context, options.get("scale"), options.get("within"))

    def dispatch_attention_fn(self, query, key, value, **options):
        """diffusers' function, (B, T, N, H)."""
        if torch.compiler.is_compiling():
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
            return self._in_graph(query, key, value, options.get("attn_mask"), options.get("is_causal", False),
                                  options).transpose(1, 2)
        context = self._running()
        backend = options.get("backend") or _AttentionBackendRegistry.get_active_backend()[0]
        is_native = AttentionBackendName(backend) == AttentionBackendName.NATIVE
        if context is None or (context.state.attention is None and (not is_native or context.backend.is_default)
                               and context.state.guided_attention is None):
            if context is not None:
                context.backend.counts[SDPA] += 1
            return dispatch_attention_fn(query, key, value, **options)
        if not is_native and context.state.attention is not None:
            context.state.attention.refuse_uncalled()
        mask, is_causal, scale = options.get("attn_mask"), options.get("is_causal", False), options.get("scale")
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return self.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal,
                                                 scale=scale).transpose(1, 2)

    def optimized_attention(self, query, key, value, heads, mask=None, attn_precision=None, **options):
        """ComfyUI's function: (B, T, N * H), or (B, N, T, H) with skip_reshape, to (B, T, N * H). It always runs the
        selected attention backend, whatever ComfyUI's own choice. From ComfyUI 0.32.0 on, some models pass each of the
        three in an AttentionTensorContainer."""
        query, key, value = (each if torch.is_tensor(each) else each.take() for each in (query, key, value))
        if not options.get("skip_reshape"):
            size = query.shape[-1] // heads
            query, key, value = (each.reshape(*each.shape[:2], -1 if each.numel() else heads, size).transpose(1, 2)
                                 for each in (query, key, value))
        if mask is not None and mask.ndim < 4:                 # (B, T, T) or (T, T)
            mask = mask[(None,) * (3 - mask.ndim)][:, None]
        passed = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
        if options.get("low_precision_attention") is False:
            passed["is_exact"] = True
        out = self.scaled_dot_product_attention(query, key, value, mask, **passed)
        return out if options.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)

    def traced(self, name, forward, args, kwargs):
        """Run the forward of a block's attention while it is traced into a graph."""
        self._traced_name, self._is_traced = name, False
        output = forward(*args, **kwargs)
        if not self._is_traced:                                # each rank would attend to its own tokens only
            raise UnsupportedError("Unset the attention backend that is selected for diffusers in the workers, or use "
                                   f"one device: the attention {name} did not call PyTorch's "
                                   "scaled_dot_product_attention.")
        self._traced_name = ""
        return output

    # --- called by the custom ops (distributed/custom_ops.py) ---

    def context(self):
        return self._running()

    def attention_of_graph(self, query, key, value, mask, name, is_causal, scale):
        """scaled_dot_product_attention of a compiled block. name: of the attention in the running block, or ""."""
        context, is_exact, name = self._running(), name.endswith(EXACT), name.removesuffix(EXACT)
        if not name or not context.shards_attention:
            backend = context.backend.exact() if is_exact else context.backend
            return attend_here(query, key, value, backend, mask, is_causal, scale)
        context.state.attention = context.state.attentions[name]
        try:
            return self.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale,
                                                     is_exact=is_exact)
        finally:
            context.state.attention = None

    def _with_overrides(self, function):
        """A function that calls attention for several blocks, such as Flux's in ComfyUI, with that call replaced; other
        functions unchanged."""
        code = getattr(function, "__code__", None)
        if code is None or not set(COMFYUIS) & set(code.co_names):
            return function
        return in_file(function, self._comfyuis)

    def _in_groups(self, function):
        """ComfyUI's attention of packed sequences, with attention within a sequence run by the selected backend. Every
        rank has complete sequences."""
        def attend_in_group(query, key, value, heads, **options):
            return attend_here(query, key, value, self._running().backend)
        return in_file(function, {"_attention": SimpleNamespace(optimized_attention=attend_in_group)})

    def _in_graph(self, query, key, value, mask, is_causal, options):
        self._is_traced = True
        if options.get("enable_gqa"):
            key, value = repeat_heads(query, key, value)
        name = self._traced_name + EXACT * bool(options.get("is_exact"))
        return attention(query, key, value, mask, name, is_causal, options.get("scale"))

    def _attend(self, query, key, value, context, scale, within=None):
        """within: (queries, keys, values of all tokens in the order of the streams, of some heads) -> like queries;
        replaces attention of all tokens to all."""
        now = context.state.attention
        now.num_calls += 1
        key, value = one_key_per_group(now.module, query, key), one_key_per_group(now.module, query, value)
        query, padding = self.without_placeholders(query, now.streams, context)
        key, value = (self.without_placeholders(each, now.key_streams, context)[0] for each in (key, value))
        operations = context.patches.operations
        if now.streams == now.key_streams and operations.get(now.position.patched) == "values":
            return value if padding is None else F.pad(value, padding)
        enhance = operations.get(now.position.path)
        if enhance is not None and now.name == next(iter(now.position.list_.attention)):
            now.factor = enhance_factor(query, key, enhance, context.tokens.sizes(now.streams), context.mesh,
                                        context.traffic)
        if now.streams == now.key_streams:
            locate_speakers(context, query, key)
        if within is not None:
            ours = Attention(context.tokens.sizes(now.streams), exchange=context.options.exchange,
                             within=in_order(within, context.tokens.gathered_order(now.streams), now.streams))
            return usp_attention(query, key, value, ours, context.mesh, context.traffic)
        out = self._biased(query, key, value, context, scale)
        for nag in context.patches.guided:
            apply_nag(out, nag, (1, 3), context.tokens.image_slice(now.streams), True, context.mesh, context.traffic)
        return out if padding is None else F.pad(out, padding)

    def _biased(self, query, key, value, context, scale):
        """`attend`, with an additive bias of the logits if the model has one."""
        now = context.state.attention
        backend = context.backend.exact() if now.is_exact else context.backend
        if now.name not in context.patches.biases:
            return attend(query, key, value, context, now, backend, scale)
        name, size = ("bias", now.name), query.shape[3]
        if name not in context.state.cuts:
            context.state.cuts[name] = context.tokens.take(context.patches.biases[now.name], 1, now.streams)
        scale = size ** -0.5 if scale is None else scale
        return attend(*with_bias(query, key, value, context.state.cuts[name], scale), context, now,
                      backend.unquantised(), scale)[..., :size]

    def without_placeholders(self, tensor_BNTH, streams, context):
        """(the tensor without placeholder tokens of empty streams, padding of the output that restores them)."""
        where = [index for index, stream in enumerate(streams)
                 if context.state.attention.position.has_placeholder((stream,), context.tokens, self._needs_text)]
        if not where:
            return tensor_BNTH, None
        assert where in ([0], [len(streams) - 1]), "a placeholder is the first or the last token"
        start = int(where == [0])
        return tensor_BNTH.narrow(2, start, tensor_BNTH.shape[2] - 1), (0, 0, start, 1 - start)


def attend(query, key, value, context, layer, backend, scale):
    """Attention by this forward's parallel method. Every rank of its axes calls it. layer: a RunningAttention. backend:
    a BackendUse."""
    streams, key_streams = layer.streams, layer.key_streams
    sizes = context.tokens.sizes(streams)
    key_sizes = None if key_streams == streams else context.tokens.sizes(key_streams)
    window = None if layer.reach is None else window_of(layer, sizes, context)
    sparse = sparse_of(query, key, layer, context)
    # Streams other than the image come with a step's first patch only, and attend to each other without the cache.
    if context.key_values is not None and "image" in (*streams, *key_streams):
        unmasked = Attention(sizes, key_sizes, None, scale, backend, context.options.exchange, window, sparse=sparse)
        return patch_attention(query, key, value, unmasked, context, layer)
    mask = gathered_mask(context.state.masks, context.tokens.gathered_order(key_streams), query)
    arguments = Attention(sizes, key_sizes, mask, scale, backend, context.options.exchange, window, sparse=sparse)
    if context.references is not None:
        return attention_with_references(query, key, value, arguments, context, layer)
    if context.exchange is not None:
        return displaced_attention(query, key, value, arguments, context, layer.key)
    return usp_attention(query, key, value, arguments, context.mesh, context.traffic)


def window_of(layer, sizes, context):
    """The Window of the queries after scatter_heads, which are those of this rank's Ulysses group. sizes: tokens of
    every sequence rank."""
    assert len(layer.streams) == 1 and layer.streams == layer.key_streams, "a window is of one stream's tokens"
    first = context.first_token if layer.streams == ("image",) else 0
    degree, rank = context.mesh.degrees["ulysses"], context.mesh.sequence_rank
    return Window(layer.reach, first + sum(sizes[:rank // degree * degree]))


def with_bias(q_BNTH, k_BNTH, v_BNTH, bias_1T2, scale):
    """Widen heads so that the logits, q k times scale, have a_q b_k + b_q a_k added.

    bias: a and b of each token; queries and keys are of the same tokens. The first H elements of attention's output are
    the result.
    """
    a, b = (each[:, None, :, None].to(q_BNTH.dtype) for each in bias_1T2.unbind(2))
    # the inverse of `scale` as the sum of two numbers, which is accurate enough in half precision
    inverse = torch.tensor(1 / scale, dtype=torch.float64)
    high = inverse.to(q_BNTH.dtype)
    low = (inverse - high.double()).to(q_BNTH.dtype)
    of_query = torch.cat([a * high.item(), a * low.item(), b, b], 3)
    of_key = torch.cat([b, b, a * high.item(), a * low.item()], 3)
    widened = [torch.cat([tensor, more.expand(*tensor.shape[:3], -1)], 3)
               for tensor, more in ((q_BNTH, of_query), (k_BNTH, of_key))]
    return *(F.pad(tensor, (0, BIAS_DIMS - 4)) for tensor in widened), F.pad(v_BNTH, (0, BIAS_DIMS))


def in_order(within, shards, streams):
    """Wrap a function that needs tokens in the order of the streams, for tokens gathered from all ranks. shards: from
    Tokens.gathered_order."""
    order = sorted(range(len(shards)), key=lambda index: streams.index(shards[index][0]))
    back = sorted(range(len(order)), key=order.__getitem__)
    sizes = [size for _, _, size in shards]

    def ordered(*tensors):
        out = within(*(_rearranged(each, sizes, order) for each in tensors))
        return _rearranged(out, [sizes[index] for index in order], back)
    return ordered


def _rearranged(tensor_BNTH, sizes, order):
    if order == sorted(order):
        return tensor_BNTH
    shards = tensor_BNTH.split(sizes, 2)
    return torch.cat([shards[index] for index in order], 2)

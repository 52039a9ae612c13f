"""Where all parallel methods meet: attention of one forward on one rank, by the method of its layout. Called by
transformer.py."""

from dataclasses import dataclass
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
from ..protocol.errors import UnsupportedError
from ..protocol.specs import SDPA
from .block_hooks import BlockPosition, one_key_per_group
from .function_overrides import FunctionOverrides, functional, in_file
from .infinite_talk import tell_apart
from .nag import apply_nag
from .real_rotary import in_pairs, in_real_numbers

ROTATIONS = "apply_rotary_emb", "apply_rotary_emb_qwen"        # diffusers', of complex numbers in some models
# what ComfyUI's models call attention; the last, of tokens in groups that each attend to themselves
COMFYUIS = "optimized_attention", "optimized_attention_masked", "optimized_var_attention"


@dataclass
class RunningAttention:
    """The attention module that a forward is in, and whose tokens attend to whose."""

    module: torch.nn.Module
    place: BlockPosition
    name: str
    streams: tuple[str, ...]               # of the queries
    key_streams: tuple[str, ...]           # of keys and values; mostly the same
    reach: tuple | None = None             # as ModelPlan.window says
    num_calls: int = 0                     # of attention, so far

    @property
    def key(self):
        """Which attention of the model this call is: (block, name of the module, number of the call in it)."""
        return self.place.index, self.name, self.num_calls

    def refuse_uncalled(self):
        """Raises UnsupportedError where each rank has attended to its own tokens only."""
        if not self.num_calls:
            raise UnsupportedError(f"The attention {self.name} of block {self.place.index} did not call PyTorch's "
                                   f"scaled_dot_product_attention, where parallel methods take its place. Unset what "
                                   f"chooses another attention for diffusers in the workers, or use one device.")


class AttentionFunctions:
    """What the code of a model's attentions finds by the names of torch's and diffusers' attention.

    running() -> the ForwardContext that runs, if any. needs_text: of the model's plan.
    """

    def __init__(self, running, needs_text):
        self._running, self._needs_text = running, needs_text
        # of the attention whose graph is being made, and whether that has attended
        self._traced_name, self._is_traced = "", False
        self.function_overrides = FunctionOverrides(dict.fromkeys(ROTATIONS, in_real_numbers) | {
                                    "attention": self._within, "optimized_var_attention": self._in_groups},
                                {"view_as_complex": in_pairs},
                                F=functional(scaled_dot_product_attention=self.scaled_dot_product_attention),
                                dispatch_attention_fn=self.dispatch_attention_fn,
                                **dict.fromkeys(COMFYUIS, self.optimized_attention))

    def scaled_dot_product_attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                                     **options):
        """As torch's, (B, N, T, H). Within a hooked attention: of this rank's queries, by the method of the forward."""
        if torch.compiler.is_compiling():
            return self._in_graph(query, key, value, attn_mask, is_causal, options)
        context = self._running()
        if context is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if context.attention is None:
            return attend_here(query, key, value, context.backend, attn_mask, is_causal, options.get("scale"))
        if (attn_mask is not None or is_causal) and context.attention.reach is None:
            raise UnsupportedError("Use cfg_degree instead: this model masks its self-attention in a way that "
                                   "sequence parallelism and PipeFusion do not support yet.")
        return self._attend(query, key, value, context, options.get("scale"), options.get("within"))

    def dispatch_attention_fn(self, query, key, value, **options):
        """As diffusers', (B, T, N, H)."""
        if torch.compiler.is_compiling():
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
            return self._in_graph(query, key, value, options.get("attn_mask"), options.get("is_causal", False),
                                  options).transpose(1, 2)
        context = self._running()
        backend = options.get("backend") or _AttentionBackendRegistry.get_active_backend()[0]
        is_native = AttentionBackendName(backend) == AttentionBackendName.NATIVE
        if context is None or (context.attention is None and (not is_native or context.backend.name == SDPA)):
            if context is not None:
                context.backend.counts[SDPA] += 1
            return dispatch_attention_fn(query, key, value, **options)
        if not is_native and context.attention is not None:
            context.attention.refuse_uncalled()
        mask, is_causal, scale = options.get("attn_mask"), options.get("is_causal", False), options.get("scale")
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return self.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal,
                                                 scale=scale).transpose(1, 2)

    def optimized_attention(self, query, key, value, heads, mask=None, attn_precision=None, **options):
        """As ComfyUI's: (B, T, N H), or (B, N, T, H) with skip_reshape, to (B, T, N H). It runs as torch's attention,
        whatever ComfyUI would choose for itself."""
        if not options.get("skip_reshape"):
            size = query.shape[-1] // heads
            query, key, value = (each.reshape(*each.shape[:2], -1 if each.numel() else heads, size).transpose(1, 2)
                                 for each in (query, key, value))
        if mask is not None and mask.ndim < 4:                 # (B, T, T) or (T, T)
            mask = mask[(None,) * (3 - mask.ndim)][:, None]
        handed = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
        out = self.scaled_dot_product_attention(query, key, value, mask, **handed)
        return out if options.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)

    def _within(self, function):
        """A function that attends for the blocks that call it, as Flux's in ComfyUI; any other stays as it is."""
        code = getattr(function, "__code__", None)
        if code is None or not set(COMFYUIS) & set(code.co_names):
            return function
        return in_file(function, dict.fromkeys(COMFYUIS, self.optimized_attention))

    def _in_groups(self, function):
        """ComfyUI's attention of tokens in groups, in its file: these are here."""
        def attend_in_group(query, key, value, heads, **options):
            return attend_here(query, key, value, self._running().backend)
        return in_file(function, {"_attention": SimpleNamespace(optimized_attention=attend_in_group)})

    def traced(self, name, forward, args, kwargs):
        """The forward of an attention in a block, within a graph that is being made."""
        self._traced_name, self._is_traced = name, False
        output = forward(*args, **kwargs)
        if not self._is_traced:                                # each rank would attend to its own tokens only
            raise UnsupportedError(f"The attention {name} did not call PyTorch's scaled_dot_product_attention.")
        self._traced_name = ""
        return output

    def _in_graph(self, query, key, value, mask, is_causal, options):
        self._is_traced = True
        if options.get("enable_gqa"):
            key, value = repeat_heads(query, key, value)
        return attention(query, key, value, mask, self._traced_name, is_causal, options.get("scale"))

    # --- what operators ask ---

    def context(self):
        return self._running()

    def attention_of_graph(self, query, key, value, mask, name, is_causal, scale):
        """As scaled_dot_product_attention, for the operator. name: of the attention in the block that runs."""
        context = self._running()
        if not name or not context.shards_attention:
            return attend_here(query, key, value, context.backend, mask, is_causal, scale)
        context.attention = context.attentions[name]
        try:
            return self.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)
        finally:
            context.attention = None

    def _attend(self, query, key, value, context, scale, within=None):
        """within: (queries, keys, values of all tokens in the order of the streams, of some heads) -> like queries,
        instead of attention of all to all."""
        now = context.attention
        now.num_calls += 1
        key, value = one_key_per_group(now.module, query, key), one_key_per_group(now.module, query, value)
        query, padding = self.without_placeholders(query, now.streams, context)
        key, value = (self.without_placeholders(each, now.key_streams, context)[0] for each in (key, value))
        if now.streams == now.key_streams:
            tell_apart(context, query, key)
        if within is not None:
            ours = Attention(context.tokens.sizes(now.streams), exchange=context.attention_exchange,
                             within=in_order(within, context.tokens.pieces(now.streams), now.streams))
            return usp_attention(query, key, value, ours, context.mesh, context.traffic)
        out = self._biased(query, key, value, context, scale)
        for nag in context.guided:
            apply_nag(out, nag, (1, 3), context.tokens.image_slice(now.streams), True, context.mesh, context.traffic)
        return out if padding is None else F.pad(out, padding)

    def _biased(self, query, key, value, context, scale):
        """`attend`, of more numbers a head where some tokens are to weigh more or less to others."""
        now = context.attention
        if now.name not in context.biases:
            return attend(query, key, value, context, now, scale)
        name, size = ("bias", now.name), query.shape[3]
        if name not in context.cuts:
            context.cuts[name] = context.tokens.take(context.biases[now.name], 1, now.streams)
        scale = size ** -0.5 if scale is None else scale
        return attend(*with_bias(query, key, value, context.cuts[name], scale), context, now, scale)[..., :size]

    def without_placeholders(self, tensor_BNTH, streams, context):
        """The tensor without tokens that stand in for streams, and how to pad the output to have them again."""
        where = [index for index, stream in enumerate(streams)
                 if context.attention.place.has_placeholder((stream,), context.tokens, self._needs_text)]
        if not where:
            return tensor_BNTH, None
        assert where in ([0], [len(streams) - 1]), "a stand-in is the first or the last token"
        start = int(where == [0])
        return tensor_BNTH.narrow(2, start, tensor_BNTH.shape[2] - 1), (0, 0, start, 1 - start)


def attend(query, key, value, context, layer, scale):
    """Attention by the method of this forward, where all methods meet. layer: the RunningAttention."""
    streams, key_streams = layer.streams, layer.key_streams
    sizes = context.tokens.sizes(streams)
    key_sizes = None if key_streams == streams else context.tokens.sizes(key_streams)
    window = None if layer.reach is None else window_of(layer, sizes, context)
    # what no later patch brings anew, the first attends to alone
    if context.key_values is not None and "image" in (*streams, *key_streams):
        unmasked = Attention(sizes, key_sizes, None, scale, context.backend,
                             context.attention_exchange, window)
        return patch_attention(query, key, value, unmasked, context, layer)
    mask = gathered_mask(context.masks, context.tokens.pieces(key_streams), query)
    whole = Attention(sizes, key_sizes, mask, scale, context.backend, context.attention_exchange, window)
    if context.references is not None:
        return attention_with_references(query, key, value, whole, context, layer)
    if context.exchange is not None:
        return displaced_attention(query, key, value, whole, context, layer.key)
    return usp_attention(query, key, value, whole, context.mesh, context.traffic)


def in_order(within, pieces, streams):
    """For attention that asks for tokens in the order of the streams: of those gathered from all ranks. pieces: of
    Tokens.pieces."""
    order = sorted(range(len(pieces)), key=lambda index: streams.index(pieces[index][0]))
    back = sorted(range(len(order)), key=order.__getitem__)
    sizes = [size for _, _, size in pieces]

    def ordered(*tensors):
        out = within(*(_rearranged(each, sizes, order) for each in tensors))
        return _rearranged(out, [sizes[index] for index in order], back)
    return ordered


def _rearranged(tensor_BNTH, sizes, order):
    if order == sorted(order):
        return tensor_BNTH
    parts = tensor_BNTH.split(sizes, 2)
    return torch.cat([parts[index] for index in order], 2)


def window_of(layer, sizes, context):
    """The Window of this rank's queries as scatter_heads gives them, which are those of its Ulysses ranks. sizes:
    tokens of every sequence rank."""
    assert len(layer.streams) == 1 and layer.streams == layer.key_streams, "a window is of one stream's tokens"
    first = context.first_token if layer.streams == ("image",) else 0
    degree, rank = context.mesh.degrees["ulysses"], context.mesh.sequence_rank
    return Window(layer.reach, first + sum(sizes[:rank // degree * degree]))


NUM_MORE = 8                               # numbers a head; kernels ask for a multiple of so many, and four are needed


def with_bias(q_BNTH, k_BNTH, v_BNTH, bias_1T2, scale):
    """Queries, keys and values whose products, times scale, are those of the given ones and a_q b_k + b_q a_k.

    bias: a and b of each of these tokens, which are the queries' and the keys'. Of attention's output the first H
    numbers count.
    """
    a, b = (each[:, None, :, None].to(q_BNTH.dtype) for each in bias_1T2.unbind(2))
    # what `scale` takes back, as two numbers, that half precision has it exactly enough
    whole = torch.tensor(1 / scale, dtype=torch.float64)
    high = whole.to(q_BNTH.dtype)
    low = (whole - high.double()).to(q_BNTH.dtype)
    of_query = torch.cat([a * high.item(), a * low.item(), b, b], 3)
    of_key = torch.cat([b, b, a * high.item(), a * low.item()], 3)
    widened = [torch.cat([tensor, more.expand(*tensor.shape[:3], -1)], 3)
               for tensor, more in ((q_BNTH, of_query), (k_BNTH, of_key))]
    return *(F.pad(tensor, (0, NUM_MORE - 4)) for tensor in widened), F.pad(v_BNTH, (0, NUM_MORE))

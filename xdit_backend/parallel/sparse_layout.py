"""SparseAttention of a forward's self-attention, from its options and the positions of its tokens."""

from ..attention.block_sparse import BLOCK, BlockLayout, SparseAttention


def sparse_of(query, key, layer, context):
    """The SparseAttention of a call; None: it is dense.

    As in ComfyUI's node BlockSparseAttention, attention is dense with a mask, with grouped queries, between different
    streams, in the chosen blocks and for short sequences. The same on every rank.
    query, key: (B, N, T of this rank, H). layer: hooks.attention_dispatch.RunningAttention.
    """
    options, streams = context.options.sparse, layer.streams
    if options is None or streams != layer.key_streams or "image" not in streams:
        return None
    counts, tokens, mesh = stream_counts(streams, context), context.tokens, context.mesh
    if (layer.reach is not None or context.references is not None or layer.name in context.patches.biases
            or any(stream in context.state.masks for stream in streams) or query.shape[1] != key.shape[1]
            or query.shape[2] != tokens.own(streams) or layer.position.index in options.dense_blocks
            or sum(counts.values()) < options.min_tokens):
        return None
    if ("sparse", streams) not in context.state.cuts:
        context.state.cuts["sparse", streams] = _sparse(options, streams, counts, tokens, mesh, context)
    sparse = context.state.cuts["sparse", streams]
    if not all(layout.num_blocks for layout in sparse.queries):            # a ring rank has no tokens
        return None
    context.backend.counts[f"sparse ({options.method})"] += 1
    return sparse


def _sparse(options, streams, counts, tokens, mesh, context):
    shards, of_group = tokens.gathered_order(streams), mesh.degrees["ulysses"] * len(streams)
    layouts = tuple(layout_of(shards[start:start + of_group], counts, context.first_token)
                    for start in range(0, len(shards), of_group))
    ranges, start = {}, 0
    for stream, count in counts.items():
        if stream != "image" and count:
            ranges[stream] = start // BLOCK, -(-(start + count) // BLOCK)
        start += count
    rows = [ranges["audio"]] if "audio" in ranges else list(ranges.values())
    is_sink = options.sink_conditioning != "off"
    return SparseAttention(options.method, options.tau, options.keep_percent / 100, layouts, layouts,
                           tuple(ranges.values()) if is_sink else (),
                           tuple(rows) if options.sink_conditioning == "exact_kv_and_rows" else ())


def stream_counts(streams, context):
    """Number of tokens of each stream in the model's sequence, {stream: count}, the image last as in ComfyUI's models.
    With PipeFusion a forward has some of them."""
    others = {stream: context.tokens.held(stream) for stream in streams if stream != "image"}
    return others | {"image": context.num_image_tokens}


def layout_of(shards, counts, first_token):
    """BlockLayout of shards, (stream, first token, number of tokens). counts: from stream_counts. first_token: of the
    forward's image."""
    starts, start = {}, 0
    for stream, count in counts.items():
        starts[stream] = start + (first_token if stream == "image" else 0)
        start += count
    return BlockLayout(tuple((starts[stream] + first, size) for stream, first, size in shards if size))

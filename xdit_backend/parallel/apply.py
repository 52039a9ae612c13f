"""The seams: where a diffusers transformer's own, unmodified forward meets the parallel methods.

Placed once on a loaded model, as its plan says: tokens are cut to this rank's shard where they enter the blocks, attention
inside the listed modules is handed to a parallel method, blocks of other stages are passed by, and shards are joined after
the last block. What is to be done in a forward, a Trip says.
"""

import functools
import inspect
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from ..partition import check_shards
from ..protocol.errors import UnsupportedError
from .collectives import all_gather
from .pipefusion import patch_attention
from .tokens import Tokens
from .usp import usp_attention


class StageEnd(Exception):
    """Leaves a forward after the last block of this rank's stage. streams: {stream: its hidden states here}."""

    def __init__(self, streams):
        super().__init__()
        self.streams = streams


class Seams:
    """The seams of one model on this rank, and the trip they serve now."""

    def __init__(self, model, plan):
        self.plan = plan
        self._model, self._trip, self._exact_inputs, self._cuts = model, None, {}, {}
        blocks = [(block, list_) for list_ in plan.blocks for block in model.get_submodule(list_.name)]
        assert not any("forward" in vars(block) for block, _ in blocks), "this model has its seams; placed twice, they cut twice"
        self.num_blocks = len(blocks)
        self._lists = [list_ for _, list_ in blocks]
        self._skips = plan.skips(self.num_blocks)
        for index, (block, list_) in enumerate(blocks):
            for name, streams in plan.attention.items():
                module = getattr(block, name, None)
                if module is not None:
                    module.forward = self._parallel_attention(module.forward, index, name, streams)
            for path, span in plan.once.items():
                module = functools.reduce(lambda parent, name: getattr(parent, name, None), path.split("."), block)
                if module is not None:
                    module.forward = self._evaluated_once(module.forward, (index, path), span)
            block.forward = self._parallel_block(block.forward, index, list_)
        for name, (arguments, factor) in plan.exact.items():
            model.get_submodule(name).register_forward_pre_hook(functools.partial(self._unround, arguments, factor))
        for name, of_patch in plan.positions.items():
            module = model.get_submodule(name)
            module.forward = self._patch_positions(module, module.forward, of_patch)

    def run(self, trip):
        """Run the model's forward as the trip says. Every rank of the sequence axes does.

        Returns (output of the forward, None) on the last stage, else (None, message for the next stage): one flat tensor.
        """
        with self.serving(trip):
            try:
                return self._model(**trip.inputs, return_dict=False)[0], None
            except StageEnd as end:
                pieces = [*end.streams.values(), *(trip.skips[block] for block in self._skips_over(trip.blocks.stop))]
                return None, torch.cat([piece.reshape(-1) for piece in pieces]) if len(pieces) > 1 else pieces[0].reshape(-1)

    def message_shapes(self, block, batch, sizes, width):
        """Shapes of what crosses from one stage to the next before `block`. sizes: {stream: tokens on this rank}."""
        streams = [stream for stream in self._lists[block - 1].returns if stream in sizes]
        return [(batch, sizes[stream], width) for stream in streams] + \
            [(batch, sizes["image"], width)] * len(self._skips_over(block))

    @contextmanager
    def serving(self, trip):
        """The model's forward runs as the trip says while under this."""
        self._trip = None if trip.is_plain else trip
        self._exact_inputs = trip.inputs
        try:
            yield
        finally:
            self._trip, self._exact_inputs, self._cuts = None, {}, {}

    def _skips_over(self, block):
        """Earlier blocks whose outputs are skips for this block or later ones."""
        return sorted(source for target, source in self._skips.items() if source < block <= target)

    def _unround(self, arguments, factor, module, args):
        exact = [self._exact_inputs[name] * factor for name in arguments if self._exact_inputs.get(name) is not None]
        return (*exact, *args[len(exact):])

    def _patch_positions(self, module, forward, of_patch):
        @functools.wraps(forward)
        def patched(tensor):
            if self._trip is None or self._trip.patch is None:
                return forward(tensor)
            return of_patch(module, forward, tensor, self._trip.patch)
        return patched

    # --- blocks ---

    def _parallel_block(self, forward, index, list_):
        names = list(inspect.signature(forward).parameters)

        @functools.wraps(forward)
        def block(*args, **kwargs):
            trip = self._trip
            if trip is None:
                return forward(*args, **kwargs)
            arguments = {**dict(zip(names, args)), **kwargs}
            if index == 0:
                counts = {stream: arguments[name].shape[1] for name, stream in self.plan.streams.items()}
                check_shards(counts["image"], trip.mesh.sequence_degree)
                trip.tokens = Tokens(counts, trip.mesh.sequence_degree, trip.mesh.sequence_rank)
            if index < trip.blocks.start:
                return self._returned(list_, {stream: arguments[name] for name, stream in self.plan.streams.items()})
            if index == trip.blocks.start:
                arguments |= self._entering(trip, arguments) if index == 0 else self._arriving(trip, index, arguments)
            for name, argument in self.plan.tokens.items():
                if arguments.get(name) is not None:
                    arguments[name] = self._cut_once(trip, arguments[name], argument)
            if index in self._skips:
                arguments["skip"] = trip.skips[self._skips[index]]
            output = forward(**arguments)
            if index in self._skips.values():
                trip.skips[index] = output
            if index + 1 < trip.blocks.stop:
                return output
            outputs = dict(zip(list_.returns, output if isinstance(output, tuple) else (output,)))
            if index + 1 < self.num_blocks:
                raise StageEnd(outputs)
            if trip.mesh.sequence_degree > 1:
                sizes = trip.tokens.sizes(("image",))
                outputs["image"] = all_gather(outputs["image"], sizes, 1, trip.mesh.sequence_group, trip.traffic)
            return self._returned(list_, outputs)
        return block

    @staticmethod
    def _returned(list_, streams):
        outputs = tuple(streams[stream] for stream in list_.returns)
        return outputs if len(outputs) > 1 else outputs[0]

    def _entering(self, trip, arguments):
        """This rank's shards of the hidden states that the model's forward made."""
        if trip.mesh.sequence_degree == 1:
            return {}
        return {name: trip.tokens.take(arguments[name], 1, (stream,)).contiguous() for name, stream in self.plan.streams.items()}

    def _arriving(self, trip, index, arguments):
        """Hidden states and skips from the stage before, already this rank's shards."""
        shards = {stream: trip.tokens.sizes((stream,))[trip.mesh.sequence_rank] for stream in trip.tokens.counts}
        image = next(arguments[name] for name, stream in self.plan.streams.items() if stream == "image")
        shapes = self.message_shapes(index, image.shape[0], shards, image.shape[2])
        message = trip.arrive()
        pieces = [piece.view(shape) for piece, shape in
                  zip(message.split([torch.Size(shape).numel() for shape in shapes]), shapes)]
        streams = dict(zip(self._lists[index - 1].returns, pieces))
        trip.skips.update(zip(self._skips_over(index), pieces[len(streams):]))
        return {name: streams[stream] for name, stream in self.plan.streams.items()}

    def _cut_once(self, trip, value, argument):
        """Cut an argument that every block gets anew, such as rotary tables, the first time it is seen."""
        if trip.mesh.sequence_degree == 1:
            return value
        if id(value) not in self._cuts:
            cut = tuple(trip.tokens.take(item, argument.dim, argument.streams) for item in value) \
                if isinstance(value, (tuple, list)) else trip.tokens.take(value, argument.dim, argument.streams)
            self._cuts[id(value)] = (value, cut)               # `value` is kept, so that its id stays its own
        return self._cuts[id(value)][1]

    def _evaluated_once(self, forward, key, span):
        @functools.wraps(forward)
        def once(tensor):
            trip = self._trip
            if trip is None or trip.key_values is None:
                return forward(tensor)
            moment = (trip.first_image, tensor.shape[0], *(trip.step if span == "step" else ()))
            known = trip.key_values.once.get(key)
            if known is None or known[0] != moment:
                known = trip.key_values.once[key] = (moment, forward(tensor))
            return known[1]
        return once

    # --- attention ---

    def _parallel_attention(self, forward, index, name, streams):
        plain = F.scaled_dot_product_attention

        @functools.wraps(forward)
        def scoped(*args, **kwargs):
            trip, num_calls = self._trip, 0
            if trip is None or (trip.mesh.sequence_degree == 1 and trip.key_values is None):
                return forward(*args, **kwargs)

            def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
                nonlocal num_calls
                if attn_mask is not None or is_causal:
                    raise UnsupportedError("This model masks its self-attention, which sequence parallelism and PipeFusion do not "
                                           "support yet. Use cfg_degree instead.")
                num_calls += 1
                if trip.key_values is None:
                    return usp_attention(query, key, value, trip.tokens.sizes(streams), trip.mesh, plain, scale, trip.traffic)
                local = functools.partial(plain, scale=scale, enable_gqa=enable_gqa)
                return patch_attention(query, key, value, trip, (index, name, num_calls), streams, local)

            F.scaled_dot_product_attention = attention
            try:
                output = forward(*args, **kwargs)
            finally:
                F.scaled_dot_product_attention = plain
            if num_calls == 0:                                 # each rank would have attended to its own tokens only
                raise UnsupportedError(f"The attention {name} of block {index} did not call PyTorch's scaled_dot_product_attention, "
                                       f"where parallel methods take its place. Unset what chooses another attention for "
                                       f"diffusers in the workers, or use one device.")
            return output
        return scoped

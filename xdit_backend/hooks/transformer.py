"""Hooks on a diffusers transformer: where its own, unmodified forward meets the parallel methods.

Installed once on a loaded model, as its plan says: streams are cut to this rank's shards where they enter the blocks,
attention inside the listed modules is handed to a parallel method, blocks of other stages are skipped, and shards are
joined after the blocks. A ForwardContext says what is to be done in a forward.
"""

import functools
import inspect
from contextlib import contextmanager

import torch

from ..attention.masks import read_mask
from ..distributed.custom_ops import running
from ..parallel.amax_sync import AmaxSync
from ..parallel.tensor_parallel import install_tensor_hooks
from ..partition import check_shards
from . import injected_networks, token_shards_io
from .attention_dispatch import COMFYUIS, AttentionFunctions, RunningAttention
from .block_hooks import BlockPosition, StageEnd, _inside, _transposed, place_edges, places_of, summed, with_halos
from .compiled_blocks import CompiledBlocks, outside_graphs
from .interleave import interleave


class Hooks:
    """The hooks of one model on this rank, and the forward they serve now."""

    def __init__(self, model, plan, splits=(), offloaded=None, on_compile=lambda done, total: None):
        """splits: of the weights, where the model holds a rank's share of them (checkpoints/tensor_sharding.py).
        offloaded: the blocks whose weights come from host memory (offload/block_offload.py), if there are such.
        on_compile: of CompiledBlocks."""
        self.plan, self._offloaded = plan, offloaded
        self._model, self._context = model, None
        self._attention = AttentionFunctions(lambda: self._context, plan.needs_text)
        blocks = [(block, list_) for list_ in plan.lists for block in model.get_submodule(list_.name)]
        assert not hasattr(model, "_has_hooks"), "this model has its hooks; placed twice, they cut twice"
        model._has_hooks = True
        for block, list_ in blocks:
            # some attentions are no modules of the block that runs them
            listed = {_inside(block, name) for name in list_.attention | plan.cross_attention} - {None}
            for module in listed | {module for module in block.modules() if hasattr(module, "processor")}:
                self._attention.function_overrides.place(module)
            for module in block.modules():                     # of ComfyUI's blocks, any may attend
                self._attention.function_overrides.place_in(module, COMFYUIS)
        if splits:
            install_tensor_hooks(model, plan, splits, self._running)
        self._agreement = AmaxSync(model, splits, lambda: self._context)
        self.num_blocks = len(blocks)
        self._compiled = CompiledBlocks(model, self.num_blocks, on_compile)
        self._skips = plan.skips(self.num_blocks)
        starts = [index == 0 or list_.streams != blocks[index - 1][1].streams
                  for index, (_, list_) in enumerate(blocks)] + [True]
        numbers = [number for list_ in plan.lists for number in range(len(model.get_submodule(list_.name)))]
        self._places = [BlockPosition(index, list_, numbers[index], starts[index], starts[index + 1])
                        for index, (_, list_) in enumerate(blocks)]
        for place, (block, _) in zip(self._places, blocks):
            self._install_inside(block, place)
            if plan.tokens_first:
                block.forward = _transposed(self._hook_block(_transposed(block.forward, place), place), place)
            else:
                block.forward = self._hook_block(block.forward, place)
        self._install_outside()

    def _install_inside(self, block, place):
        plan = self.plan
        within = {name: (streams, streams) for name, streams in place.list_.attention.items()}
        for name, (streams, key_streams) in (within | plan.cross_attention).items():
            module = _inside(block, name)
            if module is not None:
                given = module, place, name, streams, key_streams, plan.window(module)
                self._compiled.blocks[place.index].attentions[name] = given
                module.forward = self._hook_attention(module.forward, *given)
        for path, span in plan.cacheable.items():
            module = _inside(block, path)
            if module is not None:
                self._compiled.blocks[place.index].once[path] = module, span
                module.forward = self._hook_once(module, module.forward, (place.index, path), span)
        injected_networks.lead(block, place.number, plan.lllite_targets, lambda: self._context)
        if plan.audio_attention:
            injected_networks.hear(block, place.number, plan.audio_attention, lambda: self._context)
        for path in plan.graph_breaks:
            module = _inside(block, path)
            if module is not None:
                self._compiled.blocks[place.index].graph_breaks[path] = module.forward
                module.forward = outside_graphs(module.forward, path)
        for paths, hooked in ((plan.token_reductions, summed), (plan.halos, with_halos)):
            for module in map(block.get_submodule, paths):
                module.forward = hooked(module.forward, lambda: self._context)

    def _install_outside(self):
        plan, model = self.plan, self._model
        for path, span in plan.cacheable_outside.items():
            module = _inside(model, path)
            for index, each in enumerate(module if isinstance(module, torch.nn.ModuleList) else [module]
                                         if module is not None else []):
                each.forward = self._hook_once(each, each.forward, (path, index), span)
        place_edges(model, plan, lambda: self._context)
        for path, (arguments, factor) in plan.full_precision_inputs.items():
            model.get_submodule(path).register_forward_pre_hook(functools.partial(self._unround, arguments, factor))
        for path, of_patch in plan.positions.items():
            parent, _, name = path.rpartition(".")
            owner = model.get_submodule(parent)
            if isinstance(getattr(owner, name), torch.nn.Module):              # else a method of it
                owner, name = getattr(owner, name), "forward"
            setattr(owner, name, self._hook_positions(owner, getattr(owner, name), of_patch))

    def _running(self):
        """The context of the forward that runs, for layers that need other ranks' shares."""
        assert self._context is not None, "this model holds a share of its weights: its forward is run by Hooks.run"
        return self._context

    def run(self, context):
        """Run the model's forward as the context says. Every rank of the sequence axes does.

        Returns (output of the forward, None) on the last stage, else (None, message for the next stage): one flat
        tensor.
        """
        self._begin_blocks([context])
        with self.serving(context):
            return self._forward(context)

    def run_in_turn(self, contexts):
        """As `run` for each of several forwards: while the sums of one travel, the next computes; and where weights of
        blocks come from host memory, all run a block before one runs the next."""
        self._begin_blocks(contexts)
        forwards = [functools.partial(self._forward, context) for context in contexts]
        return interleave(forwards, contexts, self.serving, self._offloaded is not None)

    def _forward(self, context):
        with running(self._attention):
            try:
                return self._model(**context.inputs, return_dict=False)[0], None
            except StageEnd as end:
                return None, end.message

    def _begin_blocks(self, contexts):
        if self._offloaded is not None:
            for context in contexts:
                context.weights_streamed = True
            self._offloaded.begin(contexts[0].blocks, len(contexts))

    def own_control(self, control, context):
        """Of what a ControlNet gives, {place: (B or 1, T of the forward's image, C)}, what this rank's blocks add to
        their tokens, in their order."""
        return {name: context.tokens.take(control[name], 1, ("image",))
                for name in injected_networks.control_names(context, self._places) if name in control}

    def message_units(self, block):
        """Which streams each piece of a message holds that goes from one stage to the next before `block`."""
        places, skips = self._places, self._skips_over(block)
        return [*places[block - 1].list_.returns, *(places[source].with_image for source in skips)]

    @contextmanager
    def serving(self, context):
        """The model's forward runs as the context says while under this."""
        tokens = context.tokens
        check_shards(tokens.counts["image"] // tokens.row, context.mesh.sequence_degree,
                     "rows of tokens" if self.plan.row_count_argument else "tokens")
        self._agreement.meet(context)
        self._context = context
        try:
            yield
        finally:
            self._context = None

    def _skips_over(self, block):
        """Earlier blocks whose outputs are skips for this block or later ones."""
        return sorted(source for target, source in self._skips.items() if source < block <= target)

    # --- blocks ---

    def _hook_block(self, forward, place):
        names = list(inspect.signature(forward).parameters)
        unmasked = dict.fromkeys(name for name, streams in place.list_.masks.items() if not streams and name in names)

        @functools.wraps(forward)
        def block(*args, **kwargs):
            context = self._context
            if context is None:
                return forward(*args, **kwargs)
            arguments = {**dict(zip(names, args)), **kwargs}
            if place.index < context.blocks.start:
                return place.returned(self._pass_block(context, place, arguments))
            name = f"{place.index + 1} of {self.num_blocks}"
            with context.traffic.at_block(name), self._weights_here(context, place):
                if context.is_plain:                           # with a mask that masks nothing, attention is slower
                    return self._run_forward(forward, context, place, arguments | unmasked)
                outputs = self._run_block(forward, context, place, arguments)
            if place.index + 1 == context.blocks.stop < self.num_blocks:
                shards = [*outputs.values(),
                          *(context.skips[source] for source in self._skips_over(context.blocks.stop))]
                raise StageEnd(token_shards_io.pack(shards, self.message_units(context.blocks.stop), context.tokens))
            return place.returned(self._join_streams(context, place, outputs) if place.ends else outputs)
        return block

    def _run_forward(self, forward, context, place, arguments):
        if (context.compile_backend and not injected_networks.lead_layers(context)
                and self._agreement.suits_graphs(context.tokens, place.list_.streams.values())):
            return self._compiled.run(place.index, forward, context, arguments)
        return forward(**arguments)

    @contextmanager
    def _weights_here(self, context, place):
        """A block runs under this: its weights are on the device."""
        if self._offloaded is None:
            yield
            return
        self._offloaded.enter(place.index)
        yield
        self._offloaded.leave(place.index)
        context.end_block(place.index)

    def _pass_block(self, context, place, arguments):
        """What takes the place of the output of an earlier stage's block: for the last of them the message of that
        stage, else its input."""
        held = {streams: arguments[name] for name, streams in place.list_.streams.items()}
        if place.index + 1 < context.blocks.start:
            return held
        image = next(tensor for streams, tensor in held.items() if "image" in streams)
        units = self.message_units(context.blocks.start)
        widths = [held.get(streams, image).shape[2] for streams in units]
        shards = token_shards_io.unpack(context.receive_message(), units, image.shape[0], widths, context.tokens,
                                self.plan.needs_text)
        arrived = dict(zip(place.list_.returns, shards))
        context.skips.update(zip(self._skips_over(context.blocks.start), shards[len(arrived):]))
        return self._join_streams(context, place, arrived) if place.ends else arrived

    def _run_block(self, forward, context, place, arguments):
        """{streams: shard} of a block of this stage."""
        list_ = place.list_
        if place.starts:
            arguments |= {name: token_shards_io.cut(arguments[name], streams, context.tokens, self.plan.needs_text)
                          for name, streams in list_.streams.items()}
        for name, argument in list_.tokens.items():
            if arguments.get(name) is not None:
                arguments[name] = self._cut_once(context, place, arguments[name], argument)
        for name, streams in list_.masks.items():
            if arguments.get(name) is not None:
                if streams:
                    self._read_once(context, arguments[name], streams)
                arguments[name] = None
        if self.plan.row_count_argument:
            arguments[self.plan.row_count_argument] = context.tokens.own(("image",)) // context.tokens.row
        if self.plan.token_index_argument:
            name, streams = self.plan.token_index_argument
            device = arguments[next(iter(list_.streams))].device
            arguments[name] = context.cuts.setdefault(name, places_of(context, streams, device))
        if place.index in self._skips:
            arguments[self.plan.skip_name] = context.skips[self._skips[place.index]]
        if context.operations.get(f"{list_.patched}_block.{place.number}") == "skip":
            outputs = {streams: arguments[name] for name, streams in list_.streams.items()}
            output = tuple(outputs[streams] for streams in list_.returns)
        else:
            output = self._run_forward(forward, context, place, arguments)
        outputs = dict(zip(list_.returns, output if isinstance(output, tuple) else (output,)))
        if place.index in self._skips.values():
            context.skips[place.index] = outputs[place.with_image]
        injected_networks.add_to_blocks(context, place, outputs)
        for control in filter(context.control.__contains__, place.control):
            image = outputs[place.with_image]
            # to what a later block takes, not to what the next one does
            if self._skips:
                image = context.skips[place.index] = image.clone()
            token_shards_io.add_to_image(image, place.with_image, context.control.take(control), context.tokens)
        return outputs

    def _join_streams(self, context, place, shards):
        """Whole streams for the model's forward; after the last block only those of its output."""
        wanted = context.tokens.counts if place.index + 1 < self.num_blocks else self.plan.outputs
        return {streams: shard if shard is None
                else token_shards_io.join(shard, streams, context.tokens, context.mesh, context.traffic, wanted)
                for streams, shard in shards.items()}

    def _cut_once(self, context, place, value, argument):
        """Cut an argument that every block gets anew, such as rotary tables, the first time it is seen."""
        key = id(value), id(argument)
        if key not in context.cuts:
            cut = functools.partial(place.cut, context.tokens, self.plan.needs_text)
            if isinstance(value, (tuple, list)):
                arguments = argument if isinstance(argument, tuple) else (argument,) * len(value)
                result = tuple(map(cut, value, arguments))
            else:
                result = cut(value, argument)
            context.cuts[key] = (value, result)                # `value` is kept, so that its id stays its own
        return context.cuts[key][1]

    def _read_once(self, context, mask, streams):
        if id(mask) not in context.cuts:
            context.cuts[id(mask)] = mask
            context.masks.update(read_mask(mask, streams, context.tokens))

    # --- modules whose output is known, or to be had otherwise ---

    def _hook_once(self, module, forward, key, span):
        @functools.wraps(forward)
        def once(*args, **kwargs):
            if torch.compiler.is_compiling():
                return self._compiled.once(module, forward, args, kwargs)
            context = self._context
            if context is None or context.key_values is None:
                return forward(*args, **kwargs)
            batch = next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value)).shape[0]
            moment = context.moment(span, batch)
            known = context.key_values.once.get(key)
            if known is None or known[0] != moment:
                known = context.key_values.once[key] = (moment, forward(*args, **kwargs))
            return known[1]
        return once

    def _unround(self, arguments, factor, module, args):
        if self._context is None:
            return args
        exact = [self._context.inputs[name] * factor for name in arguments
                 if self._context.inputs.get(name) is not None]
        # of more times than there are images, the first are theirs
        exact = [torch.cat([each, given[len(each):]]) if len(given) > len(each) else each
                 for each, given in zip(exact, args)]
        return (*exact, *args[len(exact):])

    def _hook_positions(self, module, forward, of_patch):
        @functools.wraps(forward)
        def positions(*args, **kwargs):
            context = self._context
            if context is None or context.patch is None:
                return forward(*args, **kwargs)
            return of_patch(module, forward, context.rows, context.tokens, args, kwargs)
        return positions

    # --- attention ---

    def _hook_attention(self, forward, module, place, name, *streams):
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            if torch.compiler.is_compiling():
                return self._attention.traced(name, forward, args, kwargs)
            context = self._context
            if context is None or not context.shards_attention:
                return forward(*args, **kwargs)
            context.attention = running = RunningAttention(module, place, name, *streams)
            output = forward(*args, **kwargs)
            context.attention = None
            running.refuse_uncalled()
            return output
        return hooked

"""Hooks that run the parallel methods inside a transformer's unmodified forward.

They are installed once on a loaded model, as its plan describes: streams are cut to this rank's shards where they enter
the blocks, attention inside the listed modules is dispatched to a parallel method, blocks of other stages are skipped,
and shards are joined after the blocks. A ForwardContext describes each forward.
"""

import dataclasses
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
from .block_hooks import (
    BlockPosition,
    StageEnd,
    find_submodule,
    install_boundary_halos,
    summed,
    swap_batch_and_tokens,
    token_indices_of,
    with_halos,
)
from .compiled_blocks import outside_graphs
from .model_hooks import ModelHooks


class Hooks(ModelHooks):
    """The hooks of one transformer on this rank."""

    def __init__(self, model, plan, splits=(), offloaded=None, on_compile=lambda done, total: None):
        """Arguments as of ModelHooks."""
        blocks = [(block, list_) for list_ in plan.lists for block in model.get_submodule(list_.name)]
        super().__init__(model, plan, [block for block, _ in blocks], offloaded, on_compile)
        self._attention = AttentionFunctions(lambda: self._context, plan.needs_text)
        for block, list_ in blocks:
            # some attentions are not modules of the block that runs them
            listed = {find_submodule(block, name) for name in list_.attention | plan.cross_attention} - {None}
            for module in listed | {module for module in block.modules() if hasattr(module, "processor")}:
                self._attention.function_overrides.install(module)
            for module in block.modules():                     # in ComfyUI's blocks any module may call attention
                self._attention.function_overrides.install_if_used(module, COMFYUIS)
        if splits:
            install_tensor_hooks(model, plan, splits, self._running)
        self._amax_sync = AmaxSync(model, splits, lambda: self._context)
        self.num_blocks = len(blocks)
        self._skips = plan.skips(self.num_blocks)
        starts = [index == 0 or list_.streams != blocks[index - 1][1].streams
                  for index, (_, list_) in enumerate(blocks)] + [True]
        numbers = [number for list_ in plan.lists for number in range(len(model.get_submodule(list_.name)))]
        self._positions = [BlockPosition(index, list_, numbers[index], starts[index], starts[index + 1])
                           for index, (_, list_) in enumerate(blocks)]
        for position, (block, _) in zip(self._positions, blocks):
            self._install_inside(block, position)
            forward = block.forward
            if plan.tokens_first:
                forward = self._hook_block(swap_batch_and_tokens(forward, position), position)
                block.forward = swap_batch_and_tokens(forward, position)
            else:
                block.forward = self._hook_block(forward, position)
        self._install_outside()

    def _install_inside(self, block, position):
        plan = self.plan
        within = {name: (streams, streams) for name, streams in position.list_.attention.items()}
        for name, (streams, key_streams) in (within | plan.cross_attention).items():
            module = find_submodule(block, name)
            if module is not None:
                arguments = module, position, name, streams, key_streams, plan.window(module)
                self._compiled.blocks[position.index].attentions[name] = arguments
                module.forward = self._hook_attention(module.forward, *arguments)
        for path, span in plan.cacheable.items():
            module = find_submodule(block, path)
            if module is not None:
                self._compiled.blocks[position.index].once[path] = module, span
                module.forward = self._hook_once(module, module.forward, (position.index, path), span)
        injected_networks.install_lllite(block, position.number, plan.lllite_targets, lambda: self._context)
        if plan.audio_attention:
            injected_networks.install_audio(block, position.number, plan.audio_attention, lambda: self._context)
        if plan.text_attention:
            injected_networks.install_guide(block.get_submodule(plan.text_attention), lambda: self._context)
        for path in plan.graph_breaks:
            module = find_submodule(block, path)
            if module is not None:
                self._compiled.blocks[position.index].graph_breaks[path] = module.forward
                module.forward = outside_graphs(module.forward, path)
        for paths, hooked in ((plan.token_reductions, summed), (plan.halos, with_halos)):
            for module in map(block.get_submodule, paths):
                module.forward = hooked(module.forward, lambda: self._context)

    def _install_outside(self):
        plan, model = self.plan, self._model
        for path, span in plan.cacheable_outside.items():
            module = find_submodule(model, path)
            for index, each in enumerate(module if isinstance(module, torch.nn.ModuleList) else [module]
                                         if module is not None else []):
                each.forward = self._hook_once(each, each.forward, (path, index), span)
        install_boundary_halos(model, plan, lambda: self._context)
        if plan.passes is not None:
            path, num_tokens = plan.passes
            module = model.get_submodule(path)
            module.forward = self._hook_pass(module.forward, num_tokens)
        for path, (arguments, factor) in plan.full_precision_inputs.items():
            model.get_submodule(path).register_forward_pre_hook(functools.partial(self._unround, arguments, factor))
        for path, of_patch in plan.positions.items():
            parent, _, name = path.rpartition(".")
            owner = model.get_submodule(parent)
            if isinstance(getattr(owner, name), torch.nn.Module):              # otherwise a method
                owner, name = getattr(owner, name), "forward"
            setattr(owner, name, self._hook_positions(owner, getattr(owner, name), of_patch))

    def _hook_pass(self, forward, num_tokens):
        """ModelPlan.passes: each call shards its own tokens."""
        @functools.wraps(forward)
        def one_pass(*args):
            context = self._context
            if context is None:
                return forward(*args)
            tokens = context.tokens
            context.tokens = dataclasses.replace(tokens, counts=tokens.counts | {"image": num_tokens(*args)})
            context.state.cuts.clear()                         # of the pass before
            try:
                return forward(*args)
            finally:
                context.tokens = tokens
        return one_pass

    def _running(self):
        """The context of the running forward, for layers that communicate with other ranks."""
        assert self._context is not None, "the model's weights are sharded: run its forward through ModelHooks.run"
        return self._context

    def _forward(self, context):
        with running(self._attention):
            try:
                return self._model(**context.inputs, return_dict=False)[0], None
            except StageEnd as end:
                return None, end.message

    def _blocks_of(self, context):
        return context.blocks

    def own_control(self, control, context):
        """This rank's tokens of the residuals and control images that its blocks use, in the order of their use.
        control: {insertion point: (B or 1, T of the forward's image, C)}."""
        return {name: context.tokens.take(control[name], 1, ("image",))
                for name in injected_networks.control_names(context, self._positions) if name in control}

    def message_units(self, block):
        """See ModelHooks.message_units."""
        positions, skips = self._positions, self._skips_over(block)
        return [*positions[block - 1].list_.returns, *(positions[source].with_image for source in skips)]

    @contextmanager
    def serving(self, context):
        """See ModelHooks.serving."""
        tokens = context.tokens
        check_shards(tokens.counts["image"] // tokens.row, context.mesh.sequence_degree,
                     "rows of tokens" if self.plan.row_count_argument else "tokens")
        self._amax_sync.meet(context)
        with super().serving(context):
            yield

    def _skips_over(self, block):
        """Earlier blocks whose outputs are skips of this block or later ones."""
        return sorted(source for target, source in self._skips.items() if source < block <= target)

    # --- blocks ---

    def _hook_block(self, forward, position):
        names = list(inspect.signature(forward).parameters)
        unmasked = dict.fromkeys(name for name, streams in self.plan.masks.items()
                                 if not streams and name in names)

        @functools.wraps(forward)
        def block(*args, **kwargs):
            context = self._context
            if context is None:
                return forward(*args, **kwargs)
            arguments = {**dict(zip(names, args)), **kwargs}
            if position.index < context.blocks.start:
                return position.returned(self._pass_block(context, position, arguments))
            name = f"{position.index + 1} of {self.num_blocks}"
            with context.traffic.at_block(name), self._weights_resident(context, position.index):
                if context.is_plain:                           # attention without a mask is faster
                    return self._run_forward(forward, context, position, arguments | unmasked)
                outputs = self._run_block(forward, context, position, arguments)
            if position.index + 1 == context.blocks.stop < self.num_blocks:
                shards = [*outputs.values(),
                          *(context.state.skips[source] for source in self._skips_over(context.blocks.stop))]
                raise StageEnd(token_shards_io.pack(shards, self.message_units(context.blocks.stop), context.tokens))
            return position.returned(self._join_streams(context, position, outputs) if position.ends else outputs)
        return block

    def _run_forward(self, forward, context, position, arguments):
        if (context.options.compile_backend and not injected_networks.has_layer_networks(context)
                and position.path not in context.patches.operations
                and self._amax_sync.suits_graphs(context.tokens, position.list_.streams.values())):
            return self._compiled.run(position.index, forward, context, arguments)
        return forward(**arguments)

    def _pass_block(self, context, position, arguments):
        """Output of an earlier stage's block that this rank skips: for the last one it comes from that stage's message,
        for others it is the block's input."""
        inputs = {streams: arguments[name] for name, streams in position.list_.streams.items()}
        if position.index + 1 < context.blocks.start:
            return inputs
        image = next(tensor for streams, tensor in inputs.items() if "image" in streams)
        units = self.message_units(context.blocks.start)
        widths = [inputs.get(streams, image).shape[2] for streams in units]
        shards = token_shards_io.unpack(context.receive_message(), units, image.shape[0], widths, context.tokens,
                                self.plan.needs_text)
        arrived = dict(zip(position.list_.returns, shards))
        context.state.skips.update(zip(self._skips_over(context.blocks.start), shards[len(arrived):]))
        return self._join_streams(context, position, arrived) if position.ends else arrived

    def _run_block(self, forward, context, position, arguments):
        """Run a block of this stage; returns {streams: shard}."""
        list_ = position.list_
        if position.starts:
            arguments |= {name: token_shards_io.cut(arguments[name], streams, context.tokens, self.plan.needs_text)
                          for name, streams in list_.streams.items()}
        for name, argument in list_.tokens.items():
            if arguments.get(name) is not None:
                arguments[name] = self._cut_once(context, position, arguments[name], argument)
        for name, streams in self.plan.masks.items():
            if arguments.get(name) is not None:
                if streams:
                    self._read_once(context, arguments[name], streams)
                arguments[name] = None
        if self.plan.row_count_argument:
            arguments[self.plan.row_count_argument] = context.tokens.own(("image",)) // context.tokens.row
        if self.plan.token_index_argument:
            name, streams = self.plan.token_index_argument
            device = arguments[next(iter(list_.streams))].device
            arguments[name] = context.state.cuts.setdefault(name, token_indices_of(context, streams, device))
        if position.index in self._skips:
            arguments[self.plan.skip_name] = context.state.skips[self._skips[position.index]]
        if context.patches.operations.get(position.patched) == "skip":
            outputs = {streams: arguments[name] for name, streams in list_.streams.items()}
            output = tuple(outputs[streams] for streams in list_.returns)
        else:
            output = self._run_forward(forward, context, position, arguments)
        outputs = dict(zip(list_.returns, output if isinstance(output, tuple) else (output,)))
        if position.index in self._skips.values():
            context.state.skips[position.index] = outputs[position.with_image]
        injected_networks.add_to_blocks(context, position, outputs)
        for control in filter(context.patches.control.__contains__, position.control):
            image = outputs[position.with_image]
            # added to the skip, not to the next block's input
            if self._skips:
                image = context.state.skips[position.index] = image.clone()
            residual = context.patches.control.take(control)
            token_shards_io.add_to_image(image, position.with_image, residual, context.tokens)
        return outputs

    def _join_streams(self, context, position, shards):
        """Join shards for the model's forward; after the last block only the streams of its output have content."""
        wanted = context.tokens.counts if position.index + 1 < self.num_blocks else self.plan.outputs
        return {streams: shard if shard is None
                else token_shards_io.join(shard, streams, context.tokens, context.mesh, context.traffic, wanted)
                for streams, shard in shards.items()}

    def _cut_once(self, context, position, value, argument):
        """Cut an argument that every block gets, such as rotary tables, once a forward."""
        key = id(value), id(argument)
        if key not in context.state.cuts:
            cut = functools.partial(position.cut, context.tokens, self.plan.needs_text)
            if isinstance(value, (tuple, list)):
                arguments = argument if isinstance(argument, tuple) else (argument,) * len(value)
                result = tuple(map(cut, value, arguments))
            else:
                result = cut(value, argument)
            context.state.cuts[key] = (value, result)          # the reference to `value` keeps its id from being reused
        return context.state.cuts[key][1]

    def _read_once(self, context, mask, streams):
        if id(mask) not in context.state.cuts:
            context.state.cuts[id(mask)] = mask
            context.state.masks.update(read_mask(mask, streams, context.tokens))

    # --- cached modules, unrounded inputs, positions ---

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
        # with more timesteps than images, the first are the images'
        exact = [torch.cat([each, rounded[len(each):]]) if len(rounded) > len(each) else each
                 for each, rounded in zip(exact, args)]
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

    def _hook_attention(self, forward, module, position, name, *streams):
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            if torch.compiler.is_compiling():
                return self._attention.traced(name, forward, args, kwargs)
            context = self._context
            if context is None or not context.shards_attention:
                return forward(*args, **kwargs)
            context.state.attention = running = RunningAttention(module, position, name, *streams)
            output = forward(*args, **kwargs)
            context.state.attention = None
            running.refuse_uncalled()
            return output if running.factor is None else output * running.factor
        return hooked

"""A backend of torch.compile whose graphs, as inductor's, use the memory of what they need no more for what comes next.
Of tests.

What keeps a tensor of a graph beyond the operator that it was given to would find other numbers in it.
"""

import torch
from torch._dynamo import register_backend


@register_backend
def reusing(graph, inputs):
    """The graph, run node by node; the memory of what no later node needs becomes NaN."""
    nodes, given = list(graph.graph.nodes), sum(node.op == "placeholder" for node in graph.graph.nodes)
    last = {}                              # node -> the last one that needs it
    for node in nodes:
        last.update(dict.fromkeys(node.all_input_nodes, node))

    def run(*args):
        cached = {_memory(each) for each in args if torch.is_tensor(each)}
        values = dict(zip(nodes[:given], args))
        interpreter = torch.fx.Interpreter(graph)
        interpreter.env = values
        for node in nodes[given:]:
            if node.op == "output":
                return interpreter.run_node(node)
            values[node] = interpreter.run_node(node)
            if node.op == "get_attr":
                cached.update(map(_memory, _tensors(values[node])))
            for other in [other for other in node.all_input_nodes if last[other] is node] + [node] * (node not in last):
                ended = {_memory(each): each for each in _tensors(values.pop(other)) if each.is_floating_point()}
                needed = cached | {_memory(each) for value in values.values() for each in _tensors(value)}
                for memory in ended.keys() - needed:
                    ended[memory].untyped_storage().fill_(255)
        raise AssertionError("a graph has an output")
    return run


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


def _tensors(value):
    if torch.is_tensor(value):
        return [value]
    return [each for part in value for each in _tensors(part)] if isinstance(value, (tuple, list)) else []

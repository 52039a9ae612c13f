"""Which kernel computes attention: what ComfyUI was started with, what its nodes choose, and what the node says."""

import functools
import importlib

import pytest
import torch

from tests.support import kernel_packages
from tests.support.tolerances import within


@pytest.fixture(scope="module")
def chosen(comfyui):
    return importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.compatibility.attention_override")


@pytest.fixture
def attention(comfyui):
    return importlib.import_module("comfy.ldm.modules.attention")


def backend(comfyui, config="as ComfyUI", **options):
    supported = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.compatibility.model_options")
    choice = supported.call_backend(comfyui.config(attention=config), options)
    return choice.name, choice.is_required


def overrides(attention):
    """{name: (an override as nodes write them, the kernel that it means)}"""
    def by_variable(function):
        def override(func, *args, **kwargs):
            return function(*args, **kwargs)
        return override

    def unwrapped(func, *args, **kwargs):
        return sage.__wrapped__(*args, **kwargs)

    def by_default(func, q, k, v, heads, function=attention.attention_xformers, **kwargs):
        return function(q, k, v, heads=heads, **kwargs)

    def scaled(func, q, k, v, *args, **kwargs):
        return sage(2 * q, k, v, *args, **kwargs)

    def swapped(func, q, k, v, *args, **kwargs):
        return sage(k, q, v, *args, **kwargs)

    def changes(func, *args, **kwargs):
        return -sage(*args, **kwargs) if kwargs else None

    def two(func, *args, **kwargs):
        return (sage if kwargs.get("mask") is None else plain)(*args, **kwargs)
    sage, plain = attention.attention_sage, attention.attention_pytorch
    return {"sage": (by_variable(sage), "sage"), "unwrapped": (unwrapped, "sage"),
            "flash": (by_variable(attention.attention_flash), "flash"), "default": (by_default, "xformers"),
            "split": (by_variable(attention.attention_split), "sdpa"), "pytorch": (by_variable(plain), "sdpa"),
            "scaled": (scaled, None), "swapped": (swapped, None), "changes": (changes, None), "two": (two, None),
            "sage3": (by_variable(attention.attention3_sage), None), "print": (print, None),
            "partial": (functools.partial(by_variable(sage)), None),
            "nothing": (lambda func, *args, **kwargs: None, None)}


def test_nodes_that_pass_on_to_an_attention_of_comfyui_choose_it(comfyui, chosen, attention):
    for name, (override, expected) in overrides(attention).items():
        assert chosen.override_backend(override) == expected, name
    override, _ = overrides(attention)["sage"]
    assert backend(comfyui, "flash", optimized_attention_override=override) == ("sage", True)


@pytest.fixture
def comfy_kitchen(attention, monkeypatch):
    """ComfyUI's attention by comfy-kitchen, or one of its name where this ComfyUI has none."""
    def attention_comfy_kitchen_int8(q, k, v, heads, **kwargs):
        raise AssertionError("the workers compute it")
    attention_comfy_kitchen_int8.container_function = lambda *args, **kwargs: None
    if not hasattr(attention, "attention_comfy_kitchen_int8"):
        monkeypatch.setattr(attention, "attention_comfy_kitchen_int8", attention_comfy_kitchen_int8, raising=False)
    return attention.attention_comfy_kitchen_int8


def test_comfy_kitchen_is_chosen_by_comfyuis_option_or_its_node(comfyui, chosen, attention, comfy_kitchen, monkeypatch):
    """The node's function has another one for tensors in containers, which must be ComfyUI's of the same attention."""
    def override(_, *args, **kwargs):
        return comfy_kitchen(*args, **kwargs)
    override.container_function = comfy_kitchen.container_function
    assert backend(comfyui, optimized_attention_override=override) == ("comfy_kitchen_int8", True)
    assert chosen.override_backend(override) == "comfy_kitchen_int8"
    override.container_function = lambda *args, **kwargs: None
    assert chosen.override_backend(override) is None

    monkeypatch.setattr(attention, "optimized_attention", comfy_kitchen)
    assert backend(comfyui) == ("comfy_kitchen_int8", False)


def test_model_attention_backend_sets_the_workers_backend(comfyui, comfy_kitchen, monkeypatch):
    node = comfyui.nodes.NODE_CLASS_MAPPINGS.get("ModelAttentionBackend")
    if node is None:
        from comfy_extras import nodes_model_advanced
        node = nodes_model_advanced.NODE_CLASS_MAPPINGS.get("ModelAttentionBackend")
    if node is None:
        pytest.skip("ComfyUI has this node from 0.32.0 on")
    from comfy.ldm.modules import attention
    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "comfy_kitchen_int8", comfy_kitchen)
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2, attention="flash"))

    [plain] = node().patch(model, "pytorch attention")
    within((comfyui.sample(plain, "sd3", steps=2) - comfyui.reference("sd3", steps=2)).abs().max(), 1e-4)
    with pytest.raises(comfyui.errors.UnsupportedError, match="^Install the package, or select another attention in "
                       "xDiT Parallel Config and in nodes that select one: comfy_kitchen_int8 on cpu runs on CUDA"):
        comfyui.sample(node().patch(model, "comfy kitchen attention")[0], "sd3", steps=2)


PACKAGE = """
import functools

import torch

from comfy.ldm.modules.attention import attention_pytorch, wrap_attn
from {module} import {function}


def override(scale=1.0, swaps=False, returns=lambda out: out):
    def kernel(q, k, v):
        q, k = (k, q) if swaps else (q, k)
        return {function}({scale}q, k, v{options})
    kernel = torch.compiler.disable(kernel)

    @wrap_attn
    def attend(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **options):
        if options.get("low_precision_attention", True) is False:
            return attention_pytorch(q, k, v, heads, mask=mask, skip_reshape=skip_reshape)
        dtype = q.dtype
        q, k, v = (each.half() for each in (q, k, v))
        if skip_reshape:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        else:
            q, k, v = (each.unflatten(2, (heads, -1)) for each in (q, k, v))
        out = kernel(q, k, v).to(dtype)
        return returns(out.transpose(1, 2) if skip_output_reshape else out.flatten(2))

    def chosen(func, *args, **kwargs):
        return attend.__wrapped__(*args, **kwargs)
    return chosen
"""


@pytest.fixture
def packaged(monkeypatch, tmp_path):
    """packaged(module, function, scale="", options=""): the source above, with the packages' doubles."""
    from xdit_backend.attention import backends
    monkeypatch.setattr(backends, "capability_of", backends.capability_of)
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel_packages.use(kernel_packages.write(tmp_path), exact=False)

    def make(module, function, scale="", options=""):
        written = {"__name__": "a_pack"}
        exec(PACKAGE.format(module=module, function=function, scale=scale, options=options), written)
        return written["override"]
    yield make
    kernel_packages.forget()


def test_nodes_that_call_a_packages_attention_choose_it(comfyui, chosen, packaged):
    """Through functions of their own; not those that do something else with it."""
    sage = packaged("sageattention", "sageattn", options=', tensor_layout="NHD", is_causal=False')
    assert chosen.override_backend(sage()) == "sage"
    assert chosen.override_backend(packaged("flash_attn", "flash_attn_func")()) == "flash"
    assert backend(comfyui, "sdpa", optimized_attention_override=sage()) == ("sage", True)
    others = [sage(swaps=True), sage(returns=lambda out: -out), sage(returns=lambda out: None),
              packaged("sageattention", "sageattn", "2 * ", ', tensor_layout="NHD"')(),
              packaged("sageattention", "sageattn", options=', tensor_layout="NHD", is_causal=True')(),
              packaged("sageattention", "sageattn", options=', tensor_layout="HND"')(),
              packaged("flash_attn", "flash_attn_func", options=", window_size=(2, 2)")()]
    for number, override in enumerate(others):
        assert chosen.override_backend(override) is None, number
        with pytest.raises(comfyui.errors.UnsupportedError,
                           match=r"an attention override \(override.<locals>.chosen, which calls (sagea|flash_)"):
            backend(comfyui, optimized_attention_override=override)


def test_a_packages_attention_that_workers_lack_is_named_with_its_package(comfyui, packaged, said):
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2))
    model.model_options["transformer_options"]["optimized_attention_override"] = packaged(
        "flash_attn", "flash_attn_func")()

    with pytest.raises(comfyui.errors.UnsupportedError,
                       match=r"^Install the package, or select another attention .*nodes that select one: flash on "
                             r"cpu is not installed \(package flash-attn\)"):
        comfyui.sample(model, "sd3", steps=1)


def test_a_nodes_function_is_tried_once_a_call(comfyui, attention):
    """And where the MODEL is looked at before a run."""
    tried, called, function = [], [], attention.attention_pytorch

    def override(func, *args, **kwargs):
        tried.append(function)
        return function(*args, **kwargs)

    def wrapper(apply, given):
        called.append(len(tried))
        return apply(given["input"], given["timestep"], **given["c"])
    model = comfyui.ours("sd3", comfyui.config("cpu"))
    model.model_options["transformer_options"]["optimized_attention_override"] = override
    model.model_options["model_function_wrapper"] = wrapper
    comfyui.sample(model, "sd3", steps=3)

    assert len(called) > 2 and {after - before for before, after in zip(called, called[1:])} == {1}


def test_it_is_comfyuis_own_unless_the_node_says_otherwise(comfyui, attention, monkeypatch):
    for function, expected in {"attention_sage": "sage", "attention_flash": "flash", "attention_xformers": "xformers",
                               "attention_pytorch": "sdpa", "attention_split": "sdpa", "attention_sub_quad": "sdpa",
                               "attention3_sage": "sdpa"}.items():
        monkeypatch.setattr(attention, "optimized_attention", getattr(attention, function))
        assert backend(comfyui) == (expected, False)
        assert backend(comfyui, "flash3") == ("flash3", True)


def test_packages_are_given_what_comfyui_gives_them(comfyui, attention, tmp_path, monkeypatch):
    """Its own attention by the stand-ins, beside ours: the same arguments and the same numbers."""
    from xdit_backend.attention import backends
    monkeypatch.setattr(backends, "capability_of", backends.capability_of)
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel_packages.use(kernel_packages.write(tmp_path), exact=False)
    try:
        sage, flash = importlib.import_module("sageattention"), importlib.import_module("flash_attn")
        monkeypatch.setattr(attention, "sageattn", sage.sageattn, raising=False)
        monkeypatch.setattr(attention, "flash_attn_func", flash.flash_attn_func, raising=False)
        monkeypatch.setattr(attention, "flash_attn_wrapper",
                            lambda q, k, v, dropout_p, causal, softmax_scale: flash.flash_attn_func(
                                q, k, v, dropout_p=dropout_p, causal=causal,
                                softmax_scale=None if softmax_scale == -1.0 else softmax_scale))
        q, k, v = torch.randn(3, 1, 2, 9, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        for name, package, theirs in (("sage", sage, attention.attention_sage),
                                      ("flash", flash, attention.attention_flash)):
            wanted = theirs(q, k, v, 2, skip_reshape=True, skip_output_reshape=True, scale=0.2)
            ours = backends.attend(q, k, v, backends.BackendUse(name, True), scale=0.2)

            within((ours - wanted).abs().max(), 1e-2)
            given, mine = package.calls
            assert {**mine, "tensor_layout": ""} == {**given, "tensor_layout": ""}
        if hasattr(attention, "attention_comfy_kitchen_int8"):  # from ComfyUI 0.32.0 on
            double, mask = importlib.import_module(kernel_packages.DOUBLE), torch.randn(1, 1, 9, 9).to(q)
            monkeypatch.setattr(attention, "comfy_kitchen", double)
            wanted = attention.attention_comfy_kitchen_int8(q, k, v, 2, mask, skip_reshape=True,
                                                            skip_output_reshape=True, scale=0.2)
            use = backends.BackendUse("comfy_kitchen_int8", True)
            within((backends.attend(q, k, v, use, mask, scale=0.2) - wanted).abs().max(), 1e-2)
            given, mine = (each["scale"] for each in double.calls)
            assert given == mine and use.counts == {"comfy_kitchen_int8": 1}
    finally:
        kernel_packages.forget()


def test_the_node_says_which_ran_and_what_cannot_is_refused_by_name(comfyui, attention, said, monkeypatch):
    cfg = comfyui.config("cpu,cpu", cfg=2)
    comfyui.sample(comfyui.ours("sd3", cfg), "sd3", steps=2)
    assert not any("attention by" in text for text in said)

    monkeypatch.setattr(attention, "optimized_attention", attention.attention_sage)
    result = comfyui.sample(comfyui.ours("sd3", cfg), "sd3", steps=2)
    within((result - comfyui.reference("sd3", steps=2)).abs().max(), 1e-4)
    assert said[-1].endswith("attention by sdpa (no sage)") and comfyui.groups.runs.last.backends == "sdpa (no sage)"

    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2, attention="flash"))
    with pytest.raises(comfyui.errors.UnsupportedError,
                       match=r"^Install the package, or select another attention .*: flash on cpu is not installed "
                              r"\(package flash-attn\)"):
        comfyui.sample(model, "sd3", steps=2)
    model = comfyui.ours("sd3", cfg)
    model.model_options["transformer_options"]["optimized_attention_override"] = lambda func, *args, **kwargs: func(
        *args, **kwargs)
    with pytest.raises(comfyui.errors.UnsupportedError, match="an attention override .*set attention in xDiT Parallel"):
        comfyui.sample(model, "sd3", steps=2)

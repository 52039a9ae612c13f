"""The packages and arrows of the project: which package may import which. Read from the source, nothing is run."""

import ast
import graphlib
import re

import pytest

from tests.support.architecture import (
    ROOT,
    essential,
    find_arrows,
    find_device_types,
    find_packages,
    imports,
    sources,
)

# package -> packages it may import, besides itself
ARROWS = {
    "nodes": ["nodes.bridge.compatibility", "nodes.bridge.model", "nodes.bridge.upscale", "nodes.bridge.vae",
              "nodes.bridge.workers", "xdit_backend.autoencoders", "xdit_backend.config", "xdit_backend.demo_model",
              "xdit_backend.models", "xdit_backend.protocol"],
    "nodes.bridge.compatibility": ["xdit_backend.comfyui", "xdit_backend.config", "xdit_backend.models",
                                   "xdit_backend.protocol"],
    "nodes.bridge.model": ["nodes.bridge.compatibility", "nodes.bridge.sampling", "nodes.bridge.workers",
                           "xdit_backend.checkpoints", "xdit_backend.config", "xdit_backend.hooks",
                           "xdit_backend.host", "xdit_backend.memory", "xdit_backend.models.common",
                           "xdit_backend.planner", "xdit_backend.protocol"],
    "nodes.bridge.sampling": ["nodes.bridge.compatibility", "nodes.bridge.workers", "xdit_backend.host",
                              "xdit_backend.memory", "xdit_backend.partition", "xdit_backend.planner",
                              "xdit_backend.protocol"],
    "nodes.bridge.server": ["nodes.bridge.model", "nodes.bridge.upscale", "nodes.bridge.vae", "nodes.bridge.workers",
                            "xdit_backend.autoencoders", "xdit_backend.checkpoints", "xdit_backend.config",
                            "xdit_backend.memory", "xdit_backend.planner", "xdit_backend.protocol",
                            "xdit_backend.system"],
    "nodes.bridge.upscale": ["nodes.bridge.workers", "xdit_backend.checkpoints", "xdit_backend.host",
                             "xdit_backend.protocol"],
    "nodes.bridge.vae": ["nodes.bridge.compatibility", "nodes.bridge.workers", "xdit_backend.autoencoders",
                         "xdit_backend.planner", "xdit_backend.protocol"],
    "nodes.bridge.workers": ["xdit_backend.config", "xdit_backend.host", "xdit_backend.memory",
                             "xdit_backend.multi_node", "xdit_backend.partition", "xdit_backend.planner",
                             "xdit_backend.protocol"],
    "xdit_backend.__main__": ["xdit_backend.host", "xdit_backend.multi_node", "xdit_backend.protocol",
                              "xdit_backend.tools.bench", "xdit_backend.tools.report"],
    "xdit_backend.attention": ["xdit_backend.protocol"],
    "xdit_backend.autoencoders": ["xdit_backend.protocol"],
    "xdit_backend.checkpoints": ["xdit_backend.autoencoders", "xdit_backend.comfyui", "xdit_backend.memory",
                                 "xdit_backend.models", "xdit_backend.models.common", "xdit_backend.partition",
                                 "xdit_backend.planner", "xdit_backend.protocol", "xdit_backend.system"],
    "xdit_backend.comfyui": ["xdit_backend.protocol", "xdit_backend.system"],
    "xdit_backend.config": ["xdit_backend.protocol"],
    "xdit_backend.demo_model": ["xdit_backend.models", "xdit_backend.protocol", "xdit_backend.system"],
    "xdit_backend.distributed": ["xdit_backend.partition", "xdit_backend.protocol", "xdit_backend.system"],
    "xdit_backend.hooks": ["xdit_backend.attention", "xdit_backend.distributed", "xdit_backend.memory",
                           "xdit_backend.parallel", "xdit_backend.partition", "xdit_backend.protocol"],
    "xdit_backend.host": ["xdit_backend.comfyui", "xdit_backend.memory", "xdit_backend.partition",
                          "xdit_backend.planner", "xdit_backend.protocol", "xdit_backend.system"],
    "xdit_backend.memory": ["xdit_backend.system"],
    "xdit_backend.models": ["xdit_backend.memory", "xdit_backend.models.common", "xdit_backend.protocol"],
    "xdit_backend.models.common": ["xdit_backend.memory", "xdit_backend.protocol"],
    "xdit_backend.multi_node": ["xdit_backend.checkpoints", "xdit_backend.comfyui", "xdit_backend.host",
                                "xdit_backend.protocol", "xdit_backend.system"],
    "xdit_backend.parallel": ["xdit_backend.attention", "xdit_backend.autoencoders", "xdit_backend.distributed",
                              "xdit_backend.memory", "xdit_backend.partition", "xdit_backend.protocol",
                              "xdit_backend.system"],
    "xdit_backend.partition": ["xdit_backend.protocol"],
    "xdit_backend.planner": ["xdit_backend.config", "xdit_backend.partition", "xdit_backend.protocol"],
    "xdit_backend.protocol": ["xdit_backend.system"],
    "xdit_backend.system": [],
    "xdit_backend.tools.bench": ["xdit_backend.autoencoders", "xdit_backend.checkpoints", "xdit_backend.config",
                                 "xdit_backend.demo_model", "xdit_backend.distributed", "xdit_backend.hooks",
                                 "xdit_backend.host",
                                 "xdit_backend.memory", "xdit_backend.parallel", "xdit_backend.partition",
                                 "xdit_backend.planner", "xdit_backend.protocol", "xdit_backend.system",
                                 "xdit_backend.tools.dry_run"],
    "xdit_backend.tools.report": ["xdit_backend.checkpoints", "xdit_backend.config", "xdit_backend.demo_model",
                                  "xdit_backend.host", "xdit_backend.models", "xdit_backend.partition",
                                  "xdit_backend.planner", "xdit_backend.protocol", "xdit_backend.system",
                                  "xdit_backend.tools.bench", "xdit_backend.tools.dry_run"],
    "xdit_backend.tools.dry_run": ["xdit_backend.autoencoders", "xdit_backend.checkpoints", "xdit_backend.config",
                                   "xdit_backend.distributed", "xdit_backend.hooks", "xdit_backend.memory",
                                   "xdit_backend.models", "xdit_backend.models.common", "xdit_backend.partition",
                                   "xdit_backend.planner", "xdit_backend.protocol", "xdit_backend.worker"],
    "xdit_backend.worker": ["xdit_backend.attention", "xdit_backend.autoencoders", "xdit_backend.checkpoints",
                            "xdit_backend.comfyui", "xdit_backend.distributed", "xdit_backend.hooks",
                            "xdit_backend.memory", "xdit_backend.models", "xdit_backend.parallel",
                            "xdit_backend.partition", "xdit_backend.protocol", "xdit_backend.system"],
    "nodes.bridge": [],
}
COMFYUI = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "server", "execution",
           "latent_preview"}


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(module):
    """The most specific package a dotted module belongs to, or None."""
    packages = [package for package in ARROWS if module == package or module.startswith(package + ".")]
    return max(packages, key=len) if packages else None


@pytest.mark.parametrize("path", sources("nodes") + sources("xdit_backend"),
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    own = name_of(path)
    package = package_of(own)
    for name in imports(path):
        target = package_of(name)
        assert package is None or target in (None, package) or target in ARROWS[package], f"{own} imports {name}"
        # a process of its own
        if own.startswith("xdit_backend") and own != "xdit_backend.tools.bench.baseline_comfyui":
            assert name.split(".")[0] not in COMFYUI | {"nodes"}, f"{own} imports {name}"


def test_every_package_has_its_arrows():
    """A file that belongs to no package could import what it likes."""
    assert {*find_packages(), "nodes.bridge"} == set(ARROWS)


def test_no_files_import_each_other_in_a_circle():
    """Inside of functions neither."""
    modules = {name_of(path): path for path in sources("nodes") + sources("xdit_backend")}
    del modules["nodes"]                                       # who imports that means ComfyUI's
    graph = {name: {found if found in modules else found.rpartition(".")[0] for found in imports(path)} & set(modules)
             for name, path in modules.items()}

    assert list(graphlib.TopologicalSorter(graph).static_order())              # raises CycleError


def test_no_packages_import_each_other_in_a_circle():
    assert essential(find_arrows(find_packages()))
    with pytest.raises(ValueError, match="in a circle: a, b"):
        essential({"a": {"b"}, "b": {"a", "c"}, "c": set()})


@pytest.mark.parametrize("path", sources("xdit_backend"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_backend_keeps_no_module_global_state(path):
    """Module level holds constants (capitals), functions and classes; nothing is declared global."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            assert all(name.isupper() or name in ("log", "aten", "__all__") or "Tuple" in name for name in names), names


@pytest.mark.parametrize("path", sources("nodes") + sources("xdit_backend") + sources("tests"),
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_files_say_what_they_are_for(path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""

    assert 1 <= len(docstring.splitlines()), path


def test_one_function_makes_process_groups():
    """NCCL splits them off the world's communicator, which must have no operation under way."""
    makers = re.compile(r"\b(new_group|split_group|new_subgroups\w*|shrink_group|init_device_mesh)\b")
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in sources("nodes") + sources("xdit_backend")}
    # diffusers' own parallelism, in a process of its own
    del texts["xdit_backend.tools.bench.baseline_diffusers"]
    mesh = texts.pop("xdit_backend.distributed.mesh")
    function, = (node for node in ast.parse(mesh).body if getattr(node, "name", "") == "make_group")
    inside = makers.findall(ast.get_source_segment(mesh, function))

    assert sorted(set(inside)) == ["new_group", "split_group"] and len(makers.findall(mesh)) == len(inside)
    assert [name for name, text in texts.items() if makers.search(text)] == []


def test_nothing_is_pickled():
    for path in sources("nodes") + sources("xdit_backend"):
        assert not any(name.split(".")[0] in ("pickle", "dill", "cloudpickle") for name in imports(path)), path


PLATFORM_MODULES = {"_winapi", "fcntl", "grp", "msvcrt", "nt", "posix", "pwd", "resource", "winreg"}
PLATFORM_TESTS = re.compile(r"\bsys\.platform\b|\bos\.name\b|\bplatform\.(system|platform|win32_\w+)\b|"
                            r"\bgetwindowsversion\b|hasattr\((os|signal|socket|select)\b|\bwin32\b|\bdarwin\b")


def find_platform_tests(text):
    """Tests of the operating system in a source text, and imports of modules that only some systems have."""
    names = {alias.name.split(".")[0] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)
             for alias in node.names} & PLATFORM_MODULES
    return [*(found[0] for found in PLATFORM_TESTS.finditer(text)), *sorted(names)]


def test_only_one_package_knows_which_system_it_runs_on():
    """start.py runs before the package can be imported."""
    found = {name_of(path): find_platform_tests(path.read_text(encoding="utf-8"))
             for path in [*sources("nodes"), *sources("xdit_backend"), ROOT / "__init__.py"]
             if not name_of(path).startswith("xdit_backend.system")}

    assert {name: tests for name, tests in found.items() if tests} == {}


@pytest.mark.parametrize("text", ["import sys\nif sys.platform == 'win32': pass", "import os\nos.name == 'nt'",
                                  "import fcntl", "import os\nhasattr(os, 'getuid')"])
def test_a_test_of_the_system_is_found(text):
    assert find_platform_tests(text)


# They serve particular GPUs: attention backends, comfy-kitchen's kernels, and tools that measure or imitate one.
OF_PARTICULAR_GPUS = ("xdit_backend.system", "xdit_backend.attention", "xdit_backend.tools",
                      "xdit_backend.checkpoints.quantisation.kitchen_layers")


def test_no_other_package_names_a_type_of_device():
    """system/accelerator.py knows this machine's."""
    found = {name_of(path): find_device_types(path.read_text(encoding="utf-8"))
             for path in [*sources("nodes"), *sources("xdit_backend"), ROOT / "__init__.py"]
             if not name_of(path).startswith(OF_PARTICULAR_GPUS)}

    assert {name: types for name, types in found.items() if types} == {}


@pytest.mark.parametrize("text", ["device.type == 'cuda'", "import torch\ntorch.cuda.synchronize()", "tensor.is_cuda",
                                  "name = f'cuda:{index}'", "model.cuda()", "torch.zeros(1, device='xpu:0')"])
def test_a_named_type_of_device_is_found(text):
    assert find_device_types(text)


@pytest.mark.parametrize("text", ["torch.version.cuda", "'such as \"cuda:0,cuda:1\"'", "device.type != 'cpu'"])
def test_a_version_and_an_example_are_no_named_type_of_device(text):
    assert not find_device_types(text)


def interface_of(path):
    """({name: parameters of a function, or of a class's public methods}, __all__) of a module."""
    names, exported = {}, ()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names[node.name] = ast.unparse(node.args)
        elif isinstance(node, ast.ClassDef):
            names[node.name] = {each.name: ast.unparse(each.args) for each in node.body
                                if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")}
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            exported = ast.literal_eval(node.value)
    return {name: value for name, value in names.items() if not name.startswith("_")}, exported


def test_both_systems_define_the_same_interface():
    folder = ROOT / "xdit_backend" / "system"
    (posix, exported), (windows, windows_exported) = map(interface_of, (folder / "posix.py", folder / "windows.py"))
    facts, _ = interface_of(folder / "windows_facts.py")
    used = {node.attr for path in [*sources("nodes"), *sources("xdit_backend")]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "system"}

    assert exported == windows_exported and used <= set(exported) and set(posix) <= set(exported)
    assert {name: (facts | windows)[name] for name in posix} == posix

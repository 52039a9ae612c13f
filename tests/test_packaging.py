"""What ComfyUI's registry is given: metadata as its own reader takes it,
and an archive with what runs and nothing else."""

import importlib.util
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tests.comfyui_server import PACK, PACK_FILES, ROOT, Host, comfyui_folder

MAX_BYTES = 100 * 10 ** 6                   # the demo model's weights are most of it


def git(*arguments):
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: there are no tracked files to pack")
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def archive():
    """Tracked files that .comfyignore does not leave out, as the registry's client packs them."""
    return set(git("ls-files")) - set(git("ls-files", "--cached", "--ignored", "--exclude-from=.comfyignore"))


def test_the_archive_has_what_runs_and_nothing_else(archive):
    tracked = set(git("ls-files"))
    runs = {name for name in tracked if name.split("/")[0] in PACK_FILES}

    assert runs <= archive
    assert archive - runs == {"README.md", "README.zh.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md",
                              "SECURITY.md", "requirements.txt",
                              *(
                                  name for name in tracked
                                  if re.fullmatch(r"docs/(?!adding_a_|adding_an_)[^/]+", name))}
    assert sum((ROOT / name).stat().st_size for name in archive) < MAX_BYTES


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_archive_contains_every_file_that_the_readme_links(archive, readme):
    """Includes the troubleshooting page, which errors name."""
    text = (ROOT / readme).read_text(encoding="utf-8")
    links = map("".join, re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text))
    files = {link.partition("#")[0] for link in links if "://" not in link}

    assert "docs/troubleshooting.md" in files
    assert files <= archive


def test_metadata_is_what_the_registry_reads():
    comfyui = comfyui_folder()
    if comfyui is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`")
    read = (f"import sys; sys.path.insert(0, {str(comfyui)!r}); from comfy_config.config_parser import "
            f"extract_node_configuration; " \
           f"one = extract_node_configuration({str(ROOT)!r}); print(one.project.name, one.project.version, "
           f"one.tool_comfy.publisher_id, " \
           f"one.tool_comfy.display_name, one.project.supported_os, one.project.supported_accelerators, " \
           f"one.project.supported_comfyui_version, one.project.license, sep='|')")
    if importlib.util.find_spec("pydantic_settings") is None:
        pytest.skip("ComfyUI's requirements are not installed")
    shown = subprocess.run([sys.executable, "-c", read], stdout=subprocess.PIPE, text=True,
                           check=True).stdout.strip().split("|")

    name, version, publisher, display, system, accelerator, comfyui_version, license = shown
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) and re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert (publisher, display) == ("xdit", "xDiT") and "LICENSE" in license
    assert "Linux" in system and "CUDA" in accelerator and comfyui_version == ">=0.30.0"


@pytest.mark.parametrize("remote", ["https://github.com/owner-1/some.pack.git", "git@github.com:owner-1/some.pack"])
def test_a_release_has_the_registrys_addresses_of_where_it_is_published(archive, tmp_path, remote):
    """Twice the same: it replaces what it wrote."""
    comfyui = comfyui_folder()
    if comfyui is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`")
    for file in ("pyproject.toml", "README.md", "README.zh.md"):
        shutil.copy2(ROOT / file, tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "remote", "add", "origin", "https://github.com/earlier/place"], cwd=tmp_path, check=True)
    release = [sys.executable, "-m", "tests.release", "--folder", str(tmp_path)]
    subprocess.run(release, cwd=ROOT, check=True)
    subprocess.run(["git", "remote", "set-url", "origin", remote], cwd=tmp_path, check=True)
    subprocess.run(release, cwd=ROOT, check=True)

    read = f"import sys; sys.path.insert(0, {str(comfyui)!r}); from comfy_config import config_parser; " \
           f"one = config_parser.extract_node_configuration({str(tmp_path)!r}); " \
           f"print(one.project.urls.repository, one.tool_comfy.icon, one.project.version, one.tool_comfy.publisher_id)"
    shown = subprocess.run([sys.executable, "-c", read], stdout=subprocess.PIPE, text=True, check=True).stdout.split()

    raw = "https://raw.githubusercontent.com/owner-1/some.pack/main/web"
    version = re.search(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert shown == ["https://github.com/owner-1/some.pack", f"{raw}/icon.svg", version, "xdit"]
    written = (tmp_path / "pyproject.toml").read_text(encoding="utf-8")
    assert written.count("Icon = ") == 1 and re.findall(r'(?m)^Banner = "(.+)"$', written) == [f"{raw}/banner.svg"]
    for readme in ("README.md", "README.zh.md"):
        blocks = (tmp_path / readme).read_text(encoding="utf-8").split("```")
        assert any("\ngit clone https://github.com/owner-1/some.pack xdit-comfyui\n" in block for block in blocks)


def test_a_release_without_an_address_says_what_to_give(tmp_path):
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    ended = subprocess.run([sys.executable, "-m", "tests.release", "--folder", str(tmp_path), "--repository",
                            "somewhere"], cwd=ROOT,
                           capture_output=True, text=True)

    assert ended.returncode == 1 and "--repository" in ended.stderr and "somewhere" in ended.stderr
    assert (tmp_path / "pyproject.toml").read_text(encoding="utf-8") == (ROOT / "pyproject.toml").read_text(
        encoding="utf-8")


@pytest.mark.slow
def test_what_the_archive_holds_runs_in_an_empty_comfyui(archive, tmp_path):
    """Unpacked where the registry's client unpacks it: all nodes are there, their help, and the templates."""
    if comfyui_folder() is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`")
    folder = tmp_path / "custom_nodes" / PACK
    for name in archive:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)

    with Host(comfyui_folder(), tmp_path) as host:
        nodes, templates = host.get("/object_info"), host.get("/api/workflow_templates")
        pages = [host.get(f"/extensions/{PACK}/docs/{name}.md") for name in nodes if name.startswith("XDiT")]

    assert {"XDiTLoadModel", "XDiTParallelConfig", "XDiTParallelSampler", "XDiTVAEDecode", "XDiTVAEEncode",
            "XDiTLoadClipVae"} <= set(nodes)
    assert all(page.startswith(b"# ") for page in pages) and "Demo" in templates[PACK]


def test_the_changelog_begins_with_the_version():
    version = re.search(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    sections = re.findall(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))

    assert sections[0] == version


@pytest.mark.parametrize("name, width, height", [("icon", 400, 400), ("banner", 1260, 540)])
def test_icon_and_banner_have_the_registrys_shapes(archive, name, width, height):
    """An icon is square, at most 400 x 400; a banner is 21:9."""
    root = ElementTree.parse(ROOT / "web" / f"{name}.svg").getroot()

    assert f"web/{name}.svg" in archive and (root.get("width"), root.get("height")) == (str(width), str(height))

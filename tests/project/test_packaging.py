"""Releases for ComfyUI's registry: metadata, addresses, the files in the archive, and the CI that precedes them."""

import importlib.util
import os
import posixpath
import re
import shutil
import subprocess
import sys
import warnings
from xml.etree import ElementTree

import pytest
import yaml

from tests.programs.release import PLACEHOLDER, addresses
from tests.support.comfyui_server import PACK, PACK_FILES, ROOT, Host, comfyui_folder

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
    pages = {name for name in tracked if name.startswith("docs/")}
    assert archive - runs == {"README.md", "README.zh.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
                              "requirements.txt", *pages}
    assert sum((ROOT / name).stat().st_size for name in archive) < MAX_BYTES


def linked_files(page):
    """Files of the repository that a Markdown page links to or shows, as paths from the repository's root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = ["".join(found).partition("#")[0] for found in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text)]
    return {posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) for target in targets
            if target and not re.match(r"\w+:", target)}


def test_every_page_that_the_readmes_lead_to_is_in_the_archive(archive):
    """Directly or through other pages, with their images. Errors name the troubleshooting page."""
    linked, new = set(), {"README.md", "README.zh.md", "docs/README.md"}
    while new:
        linked |= new
        new = set().union(*(linked_files(page) for page in new if page.endswith(".md"))) - linked

    assert {name for name in linked if not (ROOT / name).is_dir()} - archive == set()
    assert {"CONTRIBUTING.md", "docs/contribute/testing.md", "workflows/Demo.jpg"} <= linked
    assert any(name.endswith("troubleshooting.md") for name in linked)


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


@pytest.fixture
def release(tmp_path):
    """Runs `python -m tests.programs.release` on a copy of the files that it reads and writes, in a git repository."""
    for file in ("pyproject.toml", "README.md", "README.zh.md", "CHANGELOG.md"):
        shutil.copy2(ROOT / file, tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "tests.programs.release", "--folder", str(tmp_path), *arguments],
                              cwd=ROOT,
                              capture_output=True, text=True)
    return run


@pytest.mark.parametrize("remote", ["https://github.com/owner-1/some.pack.git", "git@github.com:owner-1/some.pack"])
def test_a_release_has_the_addresses_of_the_remote(release, tmp_path, remote):
    """A second release replaces the addresses of the first."""
    comfyui = comfyui_folder()
    if comfyui is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`")
    subprocess.run(["git", "remote", "add", "origin", "https://github.com/earlier/place"], cwd=tmp_path, check=True)
    assert release().returncode == 0
    subprocess.run(["git", "remote", "set-url", "origin", remote], cwd=tmp_path, check=True)
    assert release().returncode == 0

    read = f"import sys; sys.path.insert(0, {str(comfyui)!r}); from comfy_config import config_parser; " \
           f"one = config_parser.extract_node_configuration({str(tmp_path)!r}); urls = one.project.urls; " \
           f"print(urls.repository, urls.documentation, urls.issues, one.tool_comfy.icon, one.project.version, " \
           f"one.tool_comfy.publisher_id)"
    shown = subprocess.run([sys.executable, "-c", read], stdout=subprocess.PIPE, text=True, check=True).stdout.split()

    page, raw = "https://github.com/owner-1/some.pack", "https://raw.githubusercontent.com/owner-1/some.pack/main/web"
    version = re.search(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert shown == [page, f"{page}/blob/main/docs/README.md", f"{page}/issues", f"{raw}/icon.svg", version, "xdit"]
    written = (tmp_path / "pyproject.toml").read_text(encoding="utf-8")
    assert written.count("Icon = ") == 1 and re.findall(r'(?m)^Banner = "(.+)"$', written) == [f"{raw}/banner.svg"]
    for readme in ("README.md", "README.zh.md"):
        blocks = (tmp_path / readme).read_text(encoding="utf-8").split("```")
        assert any(f"\ngit clone {page} xdit-comfyui\n" in block for block in blocks)


def test_a_release_with_placeholders_or_without_a_date_is_rejected(release, tmp_path):
    """Each placeholder is named; the check passes once all of them and the date are set."""
    paths = [tmp_path / name for name in ("pyproject.toml", "README.md", "README.zh.md", "CHANGELOG.md")]
    project, *readmes, changelog = paths
    version = re.search(r'(?m)^version = "(.+)"$', project.read_text(encoding="utf-8"))[1]
    assert release("--repository", "https://github.com/owner-1/some.pack").returncode == 0
    heading = re.compile(r"(?m)^## .*$")
    dated = heading.sub(f"## {version} (2026-01-31)", changelog.read_text(encoding="utf-8"), count=1)
    changelog.write_text(dated, encoding="utf-8")
    ready = {path: path.read_text(encoding="utf-8") for path in paths}
    assert release("--check").returncode == 0

    unset = [(project, f"pyproject.toml: {key} is",
              re.sub(rf'(?m)^({key} = "[^"]*)owner-1/some.pack', r"\1OWNER/NAME", ready[project]))
             for key in addresses("owner-1", "some.pack")]
    unset += [(readme, f"{readme.name}: git clone has {address}",
               ready[readme].replace("git clone https://github.com/owner-1/some.pack", f"git clone {address}"))
              for readme in readmes for address in ("<this repository>", "https://github.com/OWNER/NAME")]
    unset += [(changelog, "CHANGELOG.md: ", heading.sub(f"## {version} (not released yet)", dated, count=1))]
    for path, problem, text in unset:
        assert text != ready[path]
        path.write_text(text, encoding="utf-8")
        checked = release("--check")
        assert checked.returncode == 1 and re.findall(r"(?m)^- (.*)$", checked.stderr)[0].startswith(problem)
        assert checked.stderr.count("\n- ") == 1
        path.write_text(ready[path], encoding="utf-8")


def test_addresses_are_placeholders_or_of_one_repository():
    """Placeholders are reported as a warning: a checkout has them until it is published."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    written = {key: re.findall(rf'(?m)^{key} = "(.*)"$', text) for key in addresses(*PLACEHOLDER)}
    owner, name = re.match(r"https://github\.com/([\w.-]+)/([\w.-]+)$", written["Repository"][0]).groups()

    assert written == {key: [address] for key, address in addresses(owner, name).items()}
    if (owner, name) == PLACEHOLDER:
        warnings.warn(f"Unset before publishing: {', '.join(written)} in pyproject.toml. "
                      f"Run python -m tests.programs.release.", stacklevel=1)


@pytest.mark.parametrize("repository", ["somewhere", "https://github.com/OWNER/NAME"])
def test_a_release_without_an_address_says_what_to_give(release, tmp_path, repository):
    ended = release("--repository", repository)

    assert ended.returncode == 1 and "--repository" in ended.stderr and repository in ended.stderr
    for file in ("pyproject.toml", "README.md", "README.zh.md"):
        assert (tmp_path / file).read_text(encoding="utf-8") == (ROOT / file).read_text(encoding="utf-8")


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
            "XDiTUpscaleImage", "XDiTLoadClipVae"} <= set(nodes)
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


def test_ci_runs_the_tests_and_keeps_their_record():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["linux"]
    used = {step["uses"].partition("@")[0]: step.get("with", {}) for step in job["steps"] if "uses" in step}
    recorded = re.search(r"--record (\S+)/", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))[1]

    assert ".ci/run" in [step.get("run") for step in job["steps"]] and os.access(ROOT / ".ci" / "run", os.X_OK)
    assert job["runs-on"].startswith("ubuntu") and job["timeout-minutes"] > 45
    assert used["actions/checkout"]["fetch-depth"] == 0                # portions go by the commit count
    assert used["actions/setup-python"]["python-version"] == "3.11"
    files = used["actions/setup-python"]["cache-dependency-path"].split()
    assert files and all((ROOT / file).is_file() for file in files)
    windows = workflow["jobs"]["windows"]
    assert windows["runs-on"].startswith("windows")
    assert "python start.py test --windows" in [step.get("run") for step in windows["steps"]]
    kept = used["actions/upload-artifact"]
    assert kept["path"] == recorded and kept["include-hidden-files"]   # hidden folders are left out by default


def test_issue_forms_have_what_github_requires():
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= form.keys(), path.name
            assert all(part["attributes"].get("label") or part["type"] == "markdown" for part in form["body"])

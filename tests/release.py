"""Writes the addresses that ComfyUI's registry asks for into pyproject.toml, and that of git clone into the READMEs:
python -m tests.release [--repository ADDRESS]

The repository, and the icon and the banner in it, are where the code is published: without --repository at git's remote
"origin". Says what else a release needs. Run it again after the code has moved.
"""

import argparse
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GITHUB = re.compile(
    r"(?:https://github\.com/|git@github\.com:|ssh://git@github\.com/)([\w.-]+)/([\w.-]+?)(?:\.git)?/?$")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", help='address on GitHub; default: that of the remote "origin"')
    parser.add_argument("--branch", default="main", help="whose icon and banner are shown (default: main)")
    parser.add_argument("--folder", type=Path, default=ROOT, help="a checkout (default: this one)")
    options = parser.parse_args()
    path = options.folder / "pyproject.toml"
    repository = options.repository or origin(options.folder)
    try:
        text = with_addresses(path.read_text(encoding="utf-8"), repository, options.branch)
    except ValueError as error:
        sys.exit(str(error))
    path.write_text(text, encoding="utf-8")
    for readme in options.folder.glob("README*.md"):
        readme.write_text(with_clone(readme.read_text(encoding="utf-8"), repository), encoding="utf-8")
    print(f"{path} and the READMEs have the addresses. Before publishing: commit them, and give {date.today()} to the "
          f"version's section in CHANGELOG.md.")


def origin(folder):
    """The address of git's remote "origin"; "" where there is none."""
    return subprocess.run(["git", "config", "--get", "remote.origin.url"], cwd=folder, capture_output=True,
                          text=True).stdout.strip()


def with_addresses(text, repository, branch):
    """pyproject.toml's text with Repository, Icon and Banner of this repository.
    Raises ValueError where it is none that is known."""
    match = GITHUB.match(repository)
    if match is None:
        raise ValueError(f'The repository\'s address is "{repository}", and the registry takes one such as '
                         f'https://github.com/OWNER/NAME. '
                         f"Give it with --repository.")
    owner, name = match.groups()
    web = f"https://raw.githubusercontent.com/{owner}/{name}/{branch}/web"
    text = re.sub(r'(?m)^(Icon|Banner) = ".*"\n', "", text)
    text = re.sub(r"(?m)^\[project\.urls\]\n(?:[^\[\n].*\n)*\n?", "", text)
    text = text.replace("[tool.comfy]\n", f'[tool.comfy]\nIcon = "{web}/icon.svg"\nBanner = "{web}/banner.svg"\n', 1)
    comment = text.index("# What ComfyUI's registry asks for")
    return f'{text[:comment]}[project.urls]\nRepository = "https://github.com/{owner}/{name}"\n\n{text[comment:]}'


def with_clone(text, repository):
    """A README's text whose git clone can be pasted."""
    owner, name = GITHUB.match(repository).groups()
    return re.sub(r"(?m)^git clone .+ xdit-comfyui$", f"git clone https://github.com/{owner}/{name} xdit-comfyui", text)


if __name__ == "__main__":
    main()

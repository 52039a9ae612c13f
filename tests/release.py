"""Writes the addresses that ComfyUI's registry asks for into pyproject.toml: python -m tests.release [--repository
ADDRESS]

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
    try:
        text = with_addresses(path.read_text(encoding="utf-8"), options.repository or origin(options.folder),
                              options.branch)
    except ValueError as error:
        sys.exit(str(error))
    path.write_text(text, encoding="utf-8")
    print(f"{path} has the addresses. Before publishing: commit it, and give {date.today()} to the version's section "
          f"in CHANGELOG.md.")


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


if __name__ == "__main__":
    main()

"""Release addresses: python -m tests.programs.release [--repository ADDRESS] [--check]

Writes the repository's address, and those of the icon and the banner in it, into pyproject.toml, and the address of
`git clone` into the READMEs. Without --repository it is the address of git's remote "origin". Run it again after the
repository has moved. --check writes nothing, and fails while a placeholder is left or the changelog has no date.
"""

import argparse
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GITHUB = re.compile(
    r"(?:https://github\.com/|git@github\.com:|ssh://git@github\.com/)([\w.-]+)/([\w.-]+?)(?:\.git)?/?$")
PLACEHOLDER = ("OWNER", "NAME")
CLONE = re.compile(r"(?m)^git clone (.+) xdit-comfyui$")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", help='address on GitHub; default: that of the remote "origin"')
    parser.add_argument("--branch", default="main", help="branch of the icon and the banner (default: main)")
    parser.add_argument("--folder", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--check", action="store_true", help="only report what a release still needs")
    options = parser.parse_args()
    if options.check:
        problems = unset(options.folder)
        if problems:
            sys.exit("Not ready to publish:\n" + "\n".join(f"- {problem}" for problem in problems))
        print(f"{options.folder} is ready to publish.")
        return
    path = options.folder / "pyproject.toml"
    repository = options.repository or origin(options.folder)
    try:
        text = with_addresses(path.read_text(encoding="utf-8"), repository, options.branch)
    except ValueError as error:
        sys.exit(str(error))
    path.write_text(text, encoding="utf-8")
    for readme in options.folder.glob("README*.md"):
        readme.write_text(with_clone(readme.read_text(encoding="utf-8"), repository), encoding="utf-8")
    print(f"{path} and the READMEs have the addresses. Commit them, give the first section of CHANGELOG.md its date "
          f"({date.today()}), and run this with --check before publishing.")


def origin(folder):
    """Address of git's remote "origin", or "" if there is none."""
    return subprocess.run(["git", "config", "--get", "remote.origin.url"], cwd=folder, capture_output=True,
                          text=True).stdout.strip()


def addresses(owner, name, branch="main"):
    """Keys of pyproject.toml with their addresses in a repository on GitHub."""
    page, raw = f"https://github.com/{owner}/{name}", f"https://raw.githubusercontent.com/{owner}/{name}/{branch}"
    return {"Repository": page, "Documentation": f"{page}/blob/{branch}/docs/README.md", "Issues": f"{page}/issues",
            "Icon": f"{raw}/web/icon.svg", "Banner": f"{raw}/web/banner.svg"}


def with_addresses(text, repository, branch):
    """Text of pyproject.toml with the addresses of `repository`.

    Raises ValueError if `repository` is not on GitHub, or a key is not exactly once in the text.
    """
    match = GITHUB.match(repository)
    if match is None or match.groups() == PLACEHOLDER:
        raise ValueError('Give the address of the repository with --repository, such as https://github.com/me/my-pack: '
                         f'it is "{repository}".')
    for key, address in addresses(*match.groups(), branch).items():
        text, count = re.subn(rf'(?m)^{key} = ".*"$', f'{key} = "{address}"', text)
        if count != 1:
            raise ValueError(f'Give pyproject.toml one line {key} = "...": it has {count}.')
    return text


def with_clone(text, repository):
    """Text of a README whose git clone can be pasted."""
    owner, name = GITHUB.match(repository).groups()
    return CLONE.sub(f"git clone https://github.com/{owner}/{name} xdit-comfyui", text)


def unset(folder):
    """Reasons why a checkout cannot be published yet, as sentences."""
    project = (folder / "pyproject.toml").read_text(encoding="utf-8")
    problems, remedy = [], "Run python -m tests.programs.release."
    for key in addresses(*PLACEHOLDER):
        values = re.findall(rf'(?m)^{key} = "(.*)"$', project)
        if len(values) != 1 or "/".join(PLACEHOLDER) in values[0]:
            problems.append(f"pyproject.toml: {key} is {values[0] if values else 'missing'}. {remedy}")
    for readme in sorted(folder.glob("README*.md")):
        cloned = CLONE.findall(readme.read_text(encoding="utf-8"))
        matches = [match for address in cloned if (match := GITHUB.match(address))]
        if not cloned or len(matches) < len(cloned) or any(match.groups() == PLACEHOLDER for match in matches):
            problems.append(f"{readme.name}: git clone has {cloned[0] if cloned else 'no address'}. {remedy}")
    version = re.search(r'(?m)^version = "(.+)"$', project)[1]
    section = re.search(r"(?m)^## (.*)$", (folder / "CHANGELOG.md").read_text(encoding="utf-8"))[1]
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", section):
        problems.append(f'CHANGELOG.md: the first section is "{section}". It has to be "{version} ({date.today()})", '
                        f"with the day of the release.")
    return problems


if __name__ == "__main__":
    main()

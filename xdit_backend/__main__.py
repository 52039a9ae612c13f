"""The commands of this package: python -m xdit_backend bench, bench vae, and bench quality."""

import argparse
import sys

from . import bench, bench_quality, bench_vae

COMMANDS = {"bench": bench, "bench vae": bench_vae, "bench quality": bench_quality}


def main():
    arguments = sys.argv[1:]
    if " ".join(arguments[:2]) in COMMANDS:
        arguments[:2] = [" ".join(arguments[:2])]
    parser = argparse.ArgumentParser(prog="python -m xdit_backend")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.__doc__.splitlines()[0]))
    options = parser.parse_args(arguments)
    COMMANDS[options.command].main(options)


if __name__ == "__main__":
    main()

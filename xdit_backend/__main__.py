"""The commands of this package: python -m xdit_backend bench, and bench vae."""

import argparse
import sys

from . import bench, bench_vae


def main():
    arguments = sys.argv[1:]
    module = bench_vae if arguments[:2] == ["bench", "vae"] else bench
    if module is bench_vae:
        arguments[:2] = ["bench vae"]
    parser = argparse.ArgumentParser(prog="python -m xdit_backend")
    commands = parser.add_subparsers(dest="command", required=True)
    for each, each_name in ((bench, "bench"), (bench_vae, "bench vae")):
        each.add_arguments(commands.add_parser(each_name, help=each.__doc__.splitlines()[0]))
    module.main(parser.parse_args(arguments))


if __name__ == "__main__":
    main()

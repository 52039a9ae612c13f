"""The commands of this package: python -m xdit_backend bench."""

import argparse

from . import bench


def main():
    parser = argparse.ArgumentParser(prog="python -m xdit_backend")
    commands = parser.add_subparsers(dest="command", required=True)
    bench.add_arguments(commands.add_parser("bench", help=bench.__doc__.splitlines()[0]))
    bench.main(parser.parse_args())


if __name__ == "__main__":
    main()

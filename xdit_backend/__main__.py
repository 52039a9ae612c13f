"""The commands of python -m xdit_backend: bench COMMAND (one file of tools/bench each), plan, weights, report, doctor,
join and key."""

import argparse
import sys

from .host import doctor
from .multi_node import join, show_key
from .protocol.errors import XDiTError
from .tools.bench import (
    cost_model_accuracy,
    displaced,
    estimate_accuracy,
    exchange,
    gpu,
    loading,
    methods,
    plan,
    quality,
    size,
    startup,
    vae,
    weights,
)
from .tools.report import report

BENCHES = {"methods": methods, "displaced": displaced, "vae": vae, "quality": quality, "planner": cost_model_accuracy,
           "reach": estimate_accuracy, "loading": loading, "start": startup, "size": size, "card": gpu,
           "exchange": exchange}


def main():
    options = make_parser().parse_args(completed(sys.argv[1:]))
    try:
        options.run(options)
    except XDiTError as error:
        sys.exit(str(error))


def make_parser():
    parser = argparse.ArgumentParser(prog="python -m xdit_backend",
                                     description="Measures and inspects xDiT for ComfyUI on this machine.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    bench = commands.add_parser("bench", help="time the parallel methods or the VAE, measure the quality of "
                                              "PipeFusion's images or the accuracy of estimates",
                                description="Without a command, or with layouts in its place, it runs `methods`.")
    benches = bench.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in BENCHES.items():
        _add(benches, name, module)
    _add(commands, "plan", plan)
    _add(commands, "weights", weights)
    _add(commands, "report", report)
    _add(commands, "doctor", doctor)
    _add(commands, "join", join)
    _add(commands, "key", show_key)
    return parser


def _add(commands, name, module):
    """Add a command that is a module: its docstring is the help text, followed by its add_arguments and main."""
    summary, _, details = module.__doc__.partition("\n\n")
    one = commands.add_parser(name, help=summary[0].lower() + summary[1:].rstrip("."), description=summary,
                              epilog=details, formatter_class=Defaults)
    module.add_arguments(one)
    one.set_defaults(run=module.main)


class Defaults(argparse.HelpFormatter):
    """Help formatter that shows each option's default as it would be typed."""

    def _get_help_string(self, action):
        if action.default in (None, False, (), argparse.SUPPRESS):
            return action.help
        default = " ".join(map(str, action.default)) if isinstance(action.default, (list, tuple)) else action.default
        return f"{action.help} (default: {default})"

    def _get_default_metavar_for_optional(self, action):
        return "N" if action.type in (int, float) else super()._get_default_metavar_for_optional(action)


def completed(arguments):
    """The arguments with the command added that `bench` alone, or `bench one ulysses2`, stands for."""
    if arguments[:1] == ["bench"] and not (set(arguments[1:2]) & {*BENCHES, "-h", "--help"}):
        return ["bench", "methods", *arguments[1:]]
    return arguments


if __name__ == "__main__":
    main()

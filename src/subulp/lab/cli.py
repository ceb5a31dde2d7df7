"""The ``subulp`` command: one module of :mod:`subulp.lab` for each of its commands.

A command module has a docstring whose first line is its help text, ``add_arguments(parser)`` and ``run(args) -> int``
(the exit status: 0 done, 1 a check failed, 2 it could not run).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import subulp

COMMANDS = ("demo", "doctor", "bench")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="subulp", description=subulp.__doc__)
    parser.add_argument("--version", action="version", version=f"subulp {subulp.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"subulp.lab.{name}")
        summary, _, details = (module.__doc__ or "").partition("\n")
        command = subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=details.strip() or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; ``argv`` defaults to the process's arguments."""
    args = make_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())

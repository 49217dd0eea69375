"""The command line: `python -m hybridkv COMMAND`. Each command is a module with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from hybridkv.errors import HybridKVError

COMMANDS = ("demo", "plan", "replay", "depth", "kernels")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: the command found something wrong; 2: wrong usage, said in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridkv",
        description="KV caches for hybrid and looped language models: plan memory, replay traffic. No GPU is needed.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"hybridkv.cli.{name}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except HybridKVError as error:
        print(f"hybridkv {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        return 0
    except KeyboardInterrupt:
        print(f"hybridkv {args.command}: stopped", file=sys.stderr)
        return 130

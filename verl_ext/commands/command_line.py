"""The frame of a command: help, errors in one line, exit codes, Ctrl-C."""

import signal
import sys
from collections.abc import Callable, Sequence
from importlib import resources

from verl_ext.commands.errors import DataError, UsageError


def run_command(arguments: Sequence[str], usage: str, config_name: str, work: Callable[[Sequence[str]], str]) -> int:
    """Do `work(arguments)`, print what it returns, and return the exit code.

    0: done, or `--help` asked for, which shows `usage` and `conf/<config_name>.yaml`; 1: `DataError` or `OSError`;
    2: `UsageError` or no arguments; 130: Ctrl-C or a polite kill.
    """
    if not arguments or {"-h", "--help"} & set(arguments):
        options = resources.files("verl_ext.conf").joinpath(f"{config_name}.yaml")
        print(f"{usage}\n\n{options.read_text(encoding='utf-8')}")
        return 0 if arguments else 2
    # A polite kill cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        told = work(arguments)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(told)
    return 0

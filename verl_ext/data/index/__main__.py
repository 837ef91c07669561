"""The command `python -m verl_ext.data.index`."""

import sys
from collections.abc import Sequence

from verl_ext.commands.command_line import run_command
from verl_ext.data.index.config import CONFIG_NAME, load_config

USAGE = (
    "usage: python -m verl_ext.data.index 'sources={books:books/,web:web.jsonl}'"
    " output_dir=DIR model.path=MODEL_OR_TOKENIZER"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code: 0, 1 for unusable data, 2 for a mistake in the command."""
    return run_command(arguments, USAGE, CONFIG_NAME, _index)


def _index(arguments: Sequence[str]) -> str:
    config = load_config(arguments)
    from verl_ext.data.index.run import build_index  # heavy: not for a command with a mistake in it

    return f"{build_index(config).table()}\n\nwritten to {config.output_dir}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

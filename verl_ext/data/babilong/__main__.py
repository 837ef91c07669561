"""The command `python -m verl_ext.data.babilong`."""

import sys
from collections.abc import Sequence

from verl_ext.commands.command_line import run_command
from verl_ext.data.babilong.config import CONFIG_NAME, load_config

USAGE = (
    "usage: python -m verl_ext.data.babilong output_dir=DIR model.path=MODEL_OR_TOKENIZER"
    " 'tasks=[qa1]' 'sizes=[0k,32k]' samples=5000"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code: 0, 1 where it failed underway, 2 for a mistake in what it was given."""
    return run_command(arguments, USAGE, CONFIG_NAME, _generate)


def _generate(arguments: Sequence[str]) -> str:
    config = load_config(arguments)
    from verl_ext.data.babilong.run import generate  # heavy: not for a command with a mistake in it

    return f"{generate(config)}\nwritten to {config.output_dir}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

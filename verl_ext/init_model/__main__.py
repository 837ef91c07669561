"""The command `python -m verl_ext.init_model`."""

import sys
from collections.abc import Sequence

from verl_ext.commands.command_line import run_command
from verl_ext.init_model.config import CONFIG_NAME, load_config

USAGE = (
    "usage: python -m verl_ext.init_model model=minimind_104m output_dir=DIR"
    " ('tokenizer.train_on=[train.jsonl]' | tokenizer.path=TOKENIZER)"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code: 0, 1 for unusable text, 2 for a mistake in the command."""
    return run_command(arguments, USAGE, CONFIG_NAME, _init_model)


def _init_model(arguments: Sequence[str]) -> str:
    config = load_config(arguments)
    from transformers.utils import logging  # heavy: not for a command with a mistake in it

    from verl_ext.init_model.run import init_model

    logging.set_verbosity_error()
    return f"{init_model(config)}\nwritten to {config.output_dir}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The command `python -m verl_ext.tokenize`."""

import sys
from collections.abc import Sequence

from verl_ext.commands.command_line import run_command
from verl_ext.commands.tokenizer import leave_out_torch
from verl_ext.tokenize.config import CONFIG_NAME, load_config

USAGE = (
    "usage: python -m verl_ext.tokenize 'sources={gsm8k:train.jsonl,code:code.json}'"
    " output_dir=DIR model.path=MODEL_OR_TOKENIZER"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code: 0, 1 for unusable data, 2 for a mistake in the command."""
    return run_command(arguments, USAGE, CONFIG_NAME, _tokenize)


def _tokenize(arguments: Sequence[str]) -> str:
    config = load_config(arguments)
    leave_out_torch(config.model)
    # heavy: not for a command with a mistake in it
    from rich.console import Console

    from verl_ext.tokenize.preview import previews_text
    from verl_ext.tokenize.run import tokenize

    report = tokenize(config)
    parts = [report.table(), previews_text(report.previews, Console()), f"written to {config.output_dir}"]
    return "\n\n".join(part.strip("\n") for part in parts if part)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The command `python -m verl_ext.data.babilong`."""

import signal
import sys
from collections.abc import Sequence
from importlib import resources

from verl_ext.data.babilong.config import load_config
from verl_ext.tokenize.errors import DataError, UsageError

USAGE = (
    "usage: python -m verl_ext.data.babilong output_dir=DIR model.path=MODEL_OR_TOKENIZER"
    " 'tasks=[qa1]' 'sizes=[0k,32k]' samples=5000"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code: 0, 1 where it failed underway, 2 for a mistake in what it was given."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(f"{USAGE}\n\n{resources.files('verl_ext.conf').joinpath('babilong.yaml').read_text(encoding='utf-8')}")
        return 0 if arguments else 2
    # A polite kill cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = load_config(arguments)
        from verl_ext.data.babilong.run import generate  # heavy: not for a command with a mistake in it

        summary = generate(config)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{summary}\nwritten to {config.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

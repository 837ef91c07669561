"""The command line `verl-ext COMMAND …`, also `python -m verl_ext COMMAND …`.

On several nodes, torchrun starts the training: `torchrun … -m verl_ext.fsdp_sft_trainer …`.
"""

import importlib
import os
import sys
from collections.abc import Sequence

from verl_ext import __version__
from verl_ext.options import choice_problem
from verl_ext.progress import announce

# {group of the help: {command: (its module, its description)}}
GROUPS = {
    "run": {
        "train": ("verl_ext.commands.train", "raw files to a trained model; verl-ext train run.yaml"),
        "launch": ("verl_ext.commands.launch", "one node of a run on several, by torchrun or on Ray"),
        "plan": ("verl_ext.tools.plan.command", "packs, memory and time of a run before it starts, without GPUs"),
        "recipes": ("verl_ext.commands.recipes", "the recipes of the package: list, show, copy"),
    },
    "data": {
        "tokenize": ("verl_ext.commands.tokenize", "chats and texts to a tokenized dataset with targets"),
        "index": ("verl_ext.commands.index", "texts to Megatron's .bin and .idx, for data=multidoc"),
        "show": ("verl_ext.tools.show.command", "an audit of data, any document or pack, the curves of runs"),
        "synthesize": ("verl_ext.tools.synthesis.command", "documents and instructions to long chats, by a model"),
        "babilong": ("verl_ext.tools.babilong.command", "BABILong samples of any length"),
    },
    "after": {
        "chat": ("verl_ext.commands.chat", "a conversation in the terminal with a run, an export or an adapter"),
        "export": ("verl_ext.commands.export", "a checkpoint as a folder for plain transformers, without GPUs"),
        "judge": ("verl_ext.tools.judging.command", "answers to long-context benchmarks, scored by rules or a judge"),
        "grid": ("verl_ext.tools.judging.grid", "models that were judged once for each seed, in one table"),
    },
    "more": {
        "migrate": ("verl_ext.tools.migrate.command", "a run of axolotl, LLaMA-Factory, ms-swift, TRL or verl as ours"),
        "init-model": ("verl_ext.tools.init_model.command", "a model with random weights, and its tokenizer"),
        "preflight": ("verl_ext.commands.preflight", "whether the nodes of a run reach node 0 with the same packages"),
        "env": ("verl_ext.commands.env", "versions, GPUs and settings, for a bug report"),
        "completion": ("verl_ext.commands.completion", "a script by which bash, zsh or fish completes these words"),
    },
}
EARLIER = {"launch-ray": "verl_ext.launch.ray"}  # names that still work
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}
SLOW = ("train", "plan")  # to import: seconds, before which a line is printed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code.

    0: done; 1: unusable data; 2: a mistake on the command line; 130: interrupted; 141: nobody reads the output, as
    behind `| head`. Training adds the codes of its ranks.
    """
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return 141


def _run(arguments: Sequence[str]) -> int:
    arguments = ["train", *arguments] if len(arguments) > 1 and arguments[0] in ("-h", "--help") else arguments
    name, *rest = arguments or ["--help"]
    if name in COMMANDS:
        if name in SLOW and rest and not {"-h", "--help"} & set(rest):
            announce(name)
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    if name in EARLIER:
        return importlib.import_module(EARLIER[name]).main(rest)
    if name in ("-V", "--version"):
        print(f"verl-ext {__version__}")
        return 0
    if name not in ("-h", "--help"):
        print(f"error: {choice_problem('the command', name, COMMANDS)}", file=sys.stderr)
        return 2
    width = max(map(len, COMMANDS))
    print("usage: verl-ext COMMAND [key=value ...]")
    for group, commands in GROUPS.items():
        print(f"\n{group}", *(f"  {command:<{width}}  {what}" for command, (_, what) in commands.items()), sep="\n")
    print("\nverl-ext COMMAND --help lists a command's options.")
    return 0 if arguments else 2


if __name__ == "__main__":
    sys.exit(main())

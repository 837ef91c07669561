"""The command line `verl-ext COMMAND …`, also `python -m verl_ext COMMAND …`.

On several nodes, torchrun starts the training: `torchrun … -m verl_ext.fsdp_sft_trainer …`.
"""

import importlib
import sys
from collections.abc import Sequence

from verl_ext.options import choice_problem
from verl_ext.progress import announce

# command: (its module, its description)
COMMANDS = {
    "train": ("verl_ext.commands.train", "raw files to a trained model: tokenize and torchrun in one command"),
    "tokenize": ("verl_ext.commands.tokenize", "chats and texts to a tokenized dataset with targets and categories"),
    "index": ("verl_ext.commands.index", "texts to Megatron's .bin and .idx, for data=multidoc"),
    "plan": ("verl_ext.tools.plan.command", "the packs, memory and time of a run, before it starts and without GPUs"),
    "show": ("verl_ext.tools.show.command", "an audit of data, a look at any document or pack, the curves of runs"),
    "babilong": ("verl_ext.tools.babilong.command", "BABILong samples of any length"),
    "synthesize": (
        "verl_ext.tools.synthesis.command",
        "documents and instructions to long chats, by a served model",
    ),
    "export": ("verl_ext.commands.export", "a checkpoint as a folder for plain transformers, without GPUs"),
    "init-model": ("verl_ext.tools.init_model.command", "a model with random weights, and its tokenizer"),
    "judge": (
        "verl_ext.tools.judging.command",
        "answers to long-context benchmarks, scored by rules or a judge model",
    ),
    "grid": ("verl_ext.tools.judging.grid", "models that were judged once for each seed, in one table"),
    "migrate": (
        "verl_ext.tools.migrate.command",
        "a configuration of axolotl, LLaMA-Factory, ms-swift, TRL or verl as a command of `verl-ext train`",
    ),
    "launch": ("verl_ext.launch.run", "a node of a run: torchrun with the topology of the environment"),
    "launch-ray": ("verl_ext.launch.ray", "a run on a Ray cluster of these nodes, or as a job of one"),
    "preflight": ("verl_ext.commands.preflight", "whether the nodes of a run reach node 0, with the same packages"),
}
SLOW = ("train", "plan")  # to import: seconds, before which a line is printed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code.

    0: done; 1: unusable data; 2: a mistake on the command line; 130: interrupted. Training adds the codes of its ranks.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    name, *rest = arguments or ["--help"]
    if name in COMMANDS:
        if name in SLOW and rest and not {"-h", "--help"} & set(rest):
            announce(name)
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    if name not in ("-h", "--help"):
        print(f"error: {choice_problem('the command', name, COMMANDS)}", file=sys.stderr)
        return 2
    width = max(map(len, COMMANDS))
    print("usage: verl-ext COMMAND [key=value ...]\n")
    print("\n".join(f"  {command:<{width}}  {what}" for command, (_, what) in COMMANDS.items()))
    print("\nverl-ext COMMAND --help lists a command's options.")
    return 0 if arguments else 2


if __name__ == "__main__":
    sys.exit(main())

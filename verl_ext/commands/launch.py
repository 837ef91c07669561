"""The command `verl-ext launch`: one node of a run on several, by torchrun or on Ray."""

import sys
from collections.abc import Sequence

from verl_ext.commands.command_line import key_help, print_help
from verl_ext.config.key_table import refuse_early
from verl_ext.config.run_file import trainer_words
from verl_ext.launch import ray, run
from verl_ext.options import check_choice

# {backend: what starts the words}
BACKENDS = {
    "torchrun": run.main,
    "ray": lambda words: ray.main(["node", *words]),
    "ray_job": lambda words: ray.main(["submit", *words]),
}
_USAGE = """\
usage: verl-ext launch [backend=torchrun|ray|ray_job] [FILE.yaml] [key=value …]

One node of a training run, with the topology of the environment (NNODES=4 NODE_RANK=0 MASTER_ADDR=host0 on the first of
four), and the overrides of the trainer as they are. docs/guides/launch/nodes.md lists the variables; DRY_RUN=1 prints
the lines and starts nothing.

torchrun  After SIGTERM, SIGINT or SIGUSR1 the ranks of all nodes save at the end of their step, and the command ends
          with 75: run it again to resume.
ray       MASTER_PORT is 6379. Node 0 starts Ray's head and, with overrides, the run, whose exit code is that of the
          command; the cluster ends with it. Without overrides, the cluster waits for jobs. The other nodes join the
          head, for as long as it lives. RAY_AUTH_MODE must be set, the same on every node: token (Ray's; each node
          needs the token) or disabled.
ray_job   A job on the cluster at RAY_ADDRESS. NNODES, NPROC_PER_NODE and MAX_RESTARTS become overrides where they are
          set. RUNTIME_ENV, a JSON text, and WORKING_DIR, a folder, go to `ray job submit`: variables of the ranks,
          files that Ray copies to every node.

--help KEY, --help NODE and --help all say what keys mean, as those of `verl-ext train` do."""


def main(words: Sequence[str]) -> int:
    """Start this node's part of a run, or a job; return the exit code."""
    if {"-h", "--help"} & set(words):
        return print_help(lambda topic: key_help("launch", topic) if topic else _USAGE, words)
    given = [word for word in words if word.startswith("backend=")]
    backend, words = (["backend=torchrun", *given][-1].partition("=")[2], [word for word in words if word not in given])
    try:
        check_choice("backend", backend, BACKENDS)
        refuse_early(trainer_words(words), trains=bool(words))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return BACKENDS[backend](words)

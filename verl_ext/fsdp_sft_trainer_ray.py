r"""The training program on a Ray cluster, with restarts after failures.

    python -m verl_ext.fsdp_sft_trainer_ray data.train_dir=DIR model.path=MODEL trainer.nnodes=2 \
        trainer.n_gpus_per_node=8

Every node runs `verl-ext launch` with the arguments of this command. The run uses the cluster at RAY_ADDRESS, else one
that runs on this machine, else it starts its own cluster, which ends with the run.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":
    from verl_ext.progress import announce

    announce("starting on Ray; importing Ray and verl")  # which takes seconds

import hydra
import ray
from omegaconf import DictConfig
from ray.exceptions import RayError

from verl_ext.checkpoint.layout import saved_folders
from verl_ext.config.check import batch_problem
from verl_ext.config.compose import prepare_overrides
from verl_ext.config.run import RayOptions, TrainerOptions
from verl_ext.config.run_file import trainer_words
from verl_ext.config.schema import check_keys
from verl_ext.launch.protocol import TRAINING_FAILED, USER_ERROR, Ending
from verl_ext.launch.ray_cluster import ray_cluster
from verl_ext.launch.ray_nodes import placed_nodes, ray_reason
from verl_ext.options import must, plain

_GIVEN_BACK = 15.0  # seconds until the run's own cluster gets back the resources of ended ranks


def run_on_ray(config: DictConfig, arguments: list[str]) -> int:
    """Run the ranks of a composed config; return the exit code.

    arguments: those of the command line, for every rank. Raises ValueError for a mistake seen before the ranks start.
    """
    # Check before the wait for nodes: the ranks, which check everything, exist only after it.
    check_keys(config)
    options, trainer = RayOptions.read(plain(config.ray)), TrainerOptions.read(plain(config.trainer))
    if trainer.overwrite and options.max_restarts:
        needed = f"be false where a run may be restarted (ray.max_restarts={options.max_restarts})"
        got = "true: a restart would remove what the run has written"
        raise ValueError(must("trainer.overwrite", needed, got))
    folder = Path(trainer.default_local_dir).expanduser()
    if not folder.is_absolute() and "runtime_resources" in Path.cwd().parts:
        where = "in a folder that all nodes share, where Ray runs the job in a copy of the working directory"
        raise ValueError(must("trainer.default_local_dir", f"be an absolute path, {where}", folder))
    nodes, per_node = trainer.nnodes, trainer.n_gpus_per_node
    restarts, end = 0, Ending(code=0)

    # A restart may have fewer nodes, but a first start has those that the user asked for.
    def suits(count: int) -> bool:
        fewer = restarts > 0 and count >= options.min_nodes and not batch_problem(config, count * per_node)
        return count == nodes or fewer

    def start() -> str:
        resumes = trainer.resume_from_path or (trainer.resume_mode == "auto" and saved_folders(folder))
        return "the last checkpoint" if resumes else "the first step, since no checkpoint is saved,"

    # The cluster outlives the attempts, so a restart finds nodes that have joined meanwhile.
    with ray_cluster(max(per_node, os.cpu_count() or 1)) as is_own:
        patience = min(options.timeout, _GIVEN_BACK) if is_own else options.timeout  # no node joins its own cluster
        has_gpus = any(node["Alive"] and node["Resources"].get("GPU") for node in ray.nodes())
        on_gpu = trainer.device == "cuda" or (trainer.device == "auto" and has_gpus)
        while True:
            try:
                with placed_nodes(nodes, per_node, suits, on_gpu, patience, _say) as placed:
                    if restarts:
                        _say(f"restart {restarts} of {options.max_restarts}: {end}; going on from {start()} {placed}")
                    end = placed.run(arguments, nodes)
            except RayError as error:
                end = Ending(f"Ray could not start the ranks ({ray_reason(error)})")
            except ValueError as error:
                if not restarts:
                    raise
                _say(f"error: {end}, and {error}")
                return TRAINING_FAILED
            # A success, a mistake or a request to stop is final; any other end may come from a lost node.
            if end.is_final:
                return end.code
            if restarts == options.max_restarts:
                _say(f"error: {end}; the same command goes on from {start()}")
                return end.code
            restarts += 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _mistakes_in_one_line() -> Iterator[None]:
    """Exit with USER_ERROR after a ValueError, 130 after an interruption."""
    try:
        yield
    except ValueError as error:
        _say(f"error: {error}")
        raise SystemExit(USER_ERROR) from None
    except KeyboardInterrupt:
        _say("interrupted before the ranks had started")
        raise SystemExit(128 + signal.SIGINT) from None


def main() -> None:
    """Compose the configuration, as every rank does again; run the ranks."""
    with _mistakes_in_one_line():
        arguments = trainer_words(sys.argv[1:])
        sys.argv[1:], _ = prepare_overrides(arguments)  # rank 0 prints the translations

    @hydra.main(version_base="1.3", config_path="pkg://verl_ext.conf", config_name="sft")
    def drive(config: DictConfig) -> None:
        with _mistakes_in_one_line():  # inside Hydra, which would print mistakes in its own words
            raise SystemExit(run_on_ray(config, arguments))

    drive()


if __name__ == "__main__":
    main()

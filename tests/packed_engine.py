"""verl's training worker around the packed engine, ready to train, on the ranks that ``run_ranks`` started."""

import contextlib
import os
from collections.abc import Sequence

from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

from verl_ext.config import compose
from verl_ext.plugin import select_engine

_FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


def build_worker(model: str | os.PathLike, sequence_parallel: int = 1, overrides: Sequence[str] = ()) -> TrainingWorker:
    """A worker in full fp32 whose engine is initialised; its learning rate is 0, so steps leave the parameters alone.

    ``overrides`` are command-line overrides of conf/sft.yaml; call it on every rank of an open process group.
    """
    select_engine()
    config = compose(
        [
            f"model.path={model}",
            "data.train_dir=unused",
            "parallel=cpu",
            f"engine.ulysses_sequence_parallel_size={sequence_parallel}",
            f"engine.mixed_precision={_FP32}",
            "optim.lr=0",
            *overrides,
        ]
    )
    optimizer = omega_conf_to_dataclass(config.optim)
    optimizer.total_training_steps = 1000
    worker_config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=omega_conf_to_dataclass(config.model),
        engine_config=omega_conf_to_dataclass(config.engine),
        optimizer_config=optimizer,
        checkpoint_config=omega_conf_to_dataclass(config.checkpoint),
        profiler_config=omega_conf_to_dataclass(config.profiler),
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        worker = TrainingWorker(config=worker_config)
        worker.reset()
    return worker

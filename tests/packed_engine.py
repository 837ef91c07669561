"""verl's training worker around the packed engine, ready to train, on the ranks that ``run_ranks`` started."""

import contextlib
import os
from collections.abc import Sequence

from verl.workers.engine_workers import TrainingWorker

from verl_ext.config import compose
from verl_ext.config.run import worker_config
from verl_ext.plugin import select_engine
from verl_ext.values import plain

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
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        worker = TrainingWorker(worker_config(plain(config), total_steps=1000))
        worker.reset()
    return worker

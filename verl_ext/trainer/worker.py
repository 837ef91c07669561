"""verl's training worker from a composed configuration: engine, optimizer, checkpoints, profiler."""

from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig


def training_worker(config: DictConfig, total_steps: int) -> TrainingWorker:
    """A worker whose weights are not read yet: ``reset`` does that. ``VERL_ENGINE_VENDOR`` names its engine.

    ``total_steps`` is the length of the learning-rate schedule.
    """
    optimizer = omega_conf_to_dataclass(config.optim)
    optimizer.total_training_steps = total_steps
    return TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=omega_conf_to_dataclass(config.model),
            engine_config=omega_conf_to_dataclass(config.engine),
            optimizer_config=optimizer,
            checkpoint_config=omega_conf_to_dataclass(config.checkpoint),
            profiler_config=omega_conf_to_dataclass(config.profiler),
        )
    )

"""The datasets of a run, opened from its config."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.config.own_data import splits_validation
from verl_ext.data import MultiDocDataset, PackDataset, SFTDataSet
from verl_ext.trainer.dataset_class import dataset_class
from verl_ext.trainer.range_sharing import share_token_range
from verl_ext.trainer.scan_sharing import share_scan


def open_sets(config: DictConfig) -> tuple[PackDataset, PackDataset | None]:
    """The training and validation sets with their packs planned; None where there is no validation."""
    cls: Any = dataset_class(config)
    tokenizer = _tokenizer(config) if cls.needs_tokenizer else None

    def opened(which: str, paths: Any, limit: int, **options: Any) -> PackDataset:
        data = config.data.copy()
        if which == "val_dir":
            data.mixture = None  # a validation set is measured as it is
        key = f"data.{which}"
        return cls(parquet_files=paths, tokenizer=tokenizer, config=data, max_samples=limit, key=key, **options)

    data = config.data
    of_run, of_validation = _run_options(config) if issubclass(cls, MultiDocDataset) else ({}, {})
    train, val = OmegaConf.select(data, "train_dir"), data.val_dir
    train_limit, val_limit = data.train_max_samples, data.val_max_samples
    if config.trainer.eval_only and val is not None and train == val:
        measured = opened("val_dir", val, val_limit, **of_validation)  # it stands in for data.train_dir
        return measured, measured
    if splits_validation(config):
        part = opened("train_dir", train, train_limit, split="train", **of_run)
        return part, opened("train_dir", train, val_limit, split="val", **of_validation)
    train_set = opened("train_dir", train, train_limit, **of_run)
    return train_set, None if val is None else opened("val_dir", val, val_limit, **of_validation)


def read_together(dataset: PackDataset) -> None:
    """Give a dataset what only its tokens tell, on every rank; all ranks call it together."""
    if isinstance(dataset, SFTDataSet):
        share_scan(dataset)
    elif isinstance(dataset, MultiDocDataset):
        share_token_range(dataset)


def _run_options(config: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a stream of documents must know of the run: how long it is, and that it is measured."""
    steps = config.trainer.total_training_steps
    samples = config.data.num_samples or (steps and steps * config.data.train_batch_size)
    return {"num_samples": samples, "epochs": config.trainer.total_epochs}, {"validates": True}


def _tokenizer(config: DictConfig) -> Any:
    from verl.utils import hf_tokenizer

    from verl_ext.commands.tokenizer import check_round_trip, check_tokenizer

    model = config.model
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    path = model.tokenizer_path or model.path
    try:
        tokenizer = hf_tokenizer(path, trust_remote_code=bool(model.trust_remote_code))
    except (OSError, ValueError) as error:
        raise ValueError(f"{key} must hold a tokenizer; got {path} ({str(error).splitlines()[0]})") from None
    check_tokenizer(tokenizer, path, key)
    check_round_trip(tokenizer, path, key)
    return tokenizer

"""The needs of a resume: the checkpoint to load, and the facts that both runs must share.

The definition of an option says whether a resumed run must have its value: ``option(…, resume="same")``. For an option
with ``resume="may_grow"``, a checkpoint holds the resulting dataset facts, which may change only if the stream of the
same samples grows. A checkpoint also holds facts about the data, the packs, the model and its weights.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_ext.checkpoint import layout
from verl_ext.config.resolve import PATHS
from verl_ext.data.reading import Ranks
from verl_ext.files import writable_problem
from verl_ext.nodes import UNKNOWN
from verl_ext.text.sources import local_path
from verl_ext.values import Options, nearest_name, options_of, show

# The keys of verl's own dataclasses that affect a step; our options declare this in their definitions.
_KEYS_OF_VERL = {
    "model": ("lora_rank", "lora_alpha", "target_modules"),
    "optim": (
        *("optimizer", "optimizer_impl", "override_optimizer_config", "lr", "betas", "weight_decay", "clip_grad"),
        *("lr_warmup_steps", "lr_warmup_steps_ratio", "min_lr_ratio", "num_cycles", "zero_indexed_step"),
    ),
    "engine": ("model_dtype", "mixed_precision"),
}
# The keys of a model's config.json that do not change its weights.
_FREE_MODEL_KEYS = (
    *("dtype", "torch_dtype", "transformers_version", "architectures", "use_cache", "output_router_logits"),
)
BASE = "the weights in model.path"  # the key of their digest in a checkpoint
_ANEW = {  # checkpoint.load_contents: what a resumed run does without an entry
    "model": "the weights are those of model.path",
    "optimizer": "the optimizer's state begins empty",
    "extra": "the learning rate's schedule begins at its first step",
}
_GROUPING_KEYS = ("data.balance", "data.cost", "data.shuffle")
_COUNTERS = ("skipped_steps", "skipped_in_a_row", "spikes", "total_tokens", "total_target_tokens")


class OutputAction(Enum):
    """The treatment of the output folder before training."""

    FRESH = "fresh"  # it does not exist or is empty
    RESUME = "resume"  # from one of OutputDecision.checkpoints
    REPLACE = "replace"  # rank 0 alone deletes its files first; a checkpoint may lie elsewhere


@dataclass(frozen=True)
class OutputDecision:
    """The decision for trainer.default_local_dir.

    Attributes:
        checkpoints: the global_step folders, the newest first, checked by file sizes alone; the run resumes from the
            first whole one.
        damaged: a line about the damage of each newer checkpoint.
    """

    action: OutputAction
    checkpoints: tuple[Path, ...] = ()
    damaged: tuple[str, ...] = ()


def check_output(config: DictConfig, world_size: int | None = None) -> OutputDecision:
    """Decide the treatment of a run's output folder without changing anything.

    Call it before any rank deletes files. ``world_size`` is the number of ranks of this run, None if unknown.

    Raises:
        ValueError: If the folder is not writable, files would be overwritten without trainer.overwrite=true, the folder
            to replace contains something that the run reads, or a checkpoint cannot be resumed.
    """
    trainer = config.trainer
    folder = Path(trainer.default_local_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"trainer.default_local_dir must be a folder; got the file {folder}")
    if problem := writable_problem("trainer.default_local_dir", str(folder)):
        raise ValueError(problem)
    allowed, requeued = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if trainer.overwrite and (allowed, requeued) != ("0", "0"):
        restarts = f"MAX_RESTARTS={allowed}" if allowed != "0" else f"slurm requeued it {requeued} times"
        raise ValueError(
            f"trainer.overwrite must be false where a run may be restarted ({restarts}); got true: a restart "
            "would remove what the run has written"
        )
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    used = any(name not in (*layout.NOTES, layout.RUN_LOCK) and not layout.is_unfinished(name) for name in names)
    named = trainer.resume_from_path if trainer.resume_mode != "disable" else None
    if trainer.resume_mode == "resume_path" or named:
        return _resume_named(config, folder, used, named, world_size)
    if not used:
        return OutputDecision(OutputAction.FRESH)
    if trainer.overwrite:
        _check_replaceable(config, folder)
        return OutputDecision(OutputAction.REPLACE)
    is_auto = trainer.resume_mode == "auto"
    whole, wrong = layout.whole_checkpoints(folder) if is_auto else ([], {})
    if not whole:
        why = _why_not_resumable(folder, wrong) if is_auto else "trainer.resume_mode is disable"
        raise ValueError(
            f"trainer.default_local_dir must be empty or new; got {folder}, which has files in it and {why}: choose "
            "another folder, or trainer.overwrite=true to replace it"
        )
    check_ranks(whole[0], world_size)
    damaged = tuple(f"{checkpoint} is damaged: {reason}" for checkpoint, reason in wrong.items())
    return OutputDecision(OutputAction.RESUME, tuple(whole), damaged)


def _why_not_resumable(folder: Path, wrong: Mapping[Path, str]) -> str:
    """Return the reason why `trainer.resume_mode=auto` cannot resume in a folder with files."""
    if not wrong:
        return "holds no checkpoint to resume from"
    whole = [path for path in wrong if layout.damage(path) is None]  # in verl's format
    if whole:
        tracker = folder / layout.TRACKER
        named = (tracker.read_text().strip() or "empty") if tracker.is_file() else "missing"
        return (
            f"whose {tracker.name} is {named}, which names no whole checkpoint; resume the last whole one by "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={whole[0]}"
        )
    return "no whole checkpoint: " + "; ".join(f"{path.name}: {reason}" for path, reason in wrong.items())


def _resume_named(
    config: DictConfig, folder: Path, used: bool, named: str | None, world_size: int | None
) -> OutputDecision:
    key = "trainer.resume_from_path"
    if not named:
        raise ValueError(f"{key} is required with trainer.resume_mode=resume_path; got null")
    checkpoint = Path(named).expanduser()
    if not checkpoint.is_dir() or "global_step_" not in checkpoint.name:
        raise ValueError(f"{key} must be an existing global_step_N folder; got {named}")
    if wrong := layout.damage(checkpoint):
        raise ValueError(f"{key} must be a whole checkpoint; got {named}: {wrong}")
    check_ranks(checkpoint, world_size)
    if used and config.trainer.overwrite:
        _check_replaceable(config, folder)
        return OutputDecision(OutputAction.REPLACE, (checkpoint,))
    if used and folder.resolve() not in checkpoint.resolve().parents:
        raise ValueError(
            f"trainer.default_local_dir must be empty or new, or hold {key}; got {folder}: choose another folder, or "
            "trainer.overwrite=true to replace it"
        )
    return OutputDecision(OutputAction.RESUME, (checkpoint,))


def check_ranks(checkpoint: Path, world_size: int | None) -> None:
    """Raise ValueError if `world_size` ranks cannot read a whole checkpoint."""
    saved = layout.resumable_ranks(checkpoint)
    if None not in (world_size, saved) and saved != world_size:
        raise ValueError(
            f"the checkpoint {checkpoint} was saved by {saved} rank(s) in verl's own form and can only be resumed by "
            f"as many; got {world_size} (trainer.overwrite=true starts anew)"
        )


def _check_replaceable(config: DictConfig, folder: Path) -> None:
    """Refuse to replace a folder that contains input of the run, the working or the home directory."""
    read = {key: OmegaConf.select(config, key) for key in PATHS if key != "trainer.default_local_dir"}
    for name, source in (OmegaConf.select(config, "data.mixture.sources") or {}).items():
        read[f"data.mixture.sources.{name}.train_dir"] = source.get("train_dir")
    held = [(key, path) for key, value in read.items() for path in _paths_in(value)]
    held += [("the working directory", os.getcwd()), ("the home directory", "~")]
    for name, value in held:
        path = Path(value).expanduser().resolve()
        if os.path.exists(path) and path.is_relative_to(folder.resolve()):
            raise ValueError(
                f"trainer.default_local_dir must not hold {name} with trainer.overwrite=true, which would delete it; "
                f"got {folder}"
            )


def _paths_in(value: Any) -> list[str]:
    """Return the paths in an option, which may be none, one, a list, or {name: path}."""
    if isinstance(value, DictConfig):
        return [path for held in value.values() for path in _paths_in(held)]
    values = value if isinstance(value, ListConfig) else [value]
    return [local_path(str(path)) for path in values if path]


def verified(output: OutputDecision, ranks: Ranks) -> Path | None:
    """Return the checkpoint to resume from, after comparing checksums; collective.

    Raises ValueError if none is whole, or if the named one is not.
    """
    damaged = list(output.damaged)
    for checkpoint in output.checkpoints:
        wrong = next(filter(None, ranks.gather(layout.changed_file(checkpoint, ranks.rank, ranks.size))), None)
        if wrong is None:
            check_ranks(checkpoint, ranks.size)
            if damaged and ranks.rank == 0:
                print(*(f"warning: {line}" for line in damaged), sep="\n", file=sys.stderr)
                print(f"warning: going on from {checkpoint} in its place", file=sys.stderr, flush=True)
            return checkpoint
        damaged.append(f"{checkpoint} is damaged: {wrong}")
    if damaged:
        raise ValueError("; ".join(damaged) + ": choose another trainer.default_local_dir, or trainer.overwrite=true")
    return None


def begins_anew(loaded: Iterable[str], evaluates: bool = False) -> Iterator[str]:
    """Yield what a checkpoint does not give to a resumed run, or to a measurement, with `checkpoint.load_contents`."""
    parts = ("model",) if evaluates else tuple(_ANEW)
    yield from (_ANEW[part] for part in parts if part not in loaded)


def options_that(rule: str, classes: Iterable[type]) -> list[str]:
    """Return the dotted keys of options with ``resume=rule``; redefined options inherit the rule."""
    keys = [
        f"{cls.prefix}.{name}"  # type: ignore[attr-defined]
        for cls in classes
        for base in reversed(cls.__mro__)
        if dataclasses.is_dataclass(base) and issubclass(base, Options)
        for name, option in options_of(base).items()
        if option.resume == rule
    ]
    return list(dict.fromkeys(keys))


def shared_options(values: Mapping[str, Any], classes: Iterable[type], rule: str = "same") -> dict[str, Any]:
    """Return {dotted key: configured value} of the options in `classes` that a resumed run must share."""
    keys = (key.split(".") for key in options_that(rule, classes))
    return {f"{node}.{name}": values[node][name] for node, name in keys if name in values[node]}


def upstream_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted key: configured value} of verl's own options that a resumed run must share."""
    return {f"{node}.{name}": values[node][name] for node, names in _KEYS_OF_VERL.items() for name in names}


def model_shape(hf_config: Any) -> dict[str, Any]:
    """Return the part of a model's config that determines the meaning of its weights."""
    described = json.loads(hf_config.to_json_string(use_diff=False))
    return {key: value for key, value in described.items() if key not in _FREE_MODEL_KEYS and key[0] != "_"}


class RunState:
    """The facts of a checkpoint's run, and its progress.

    The packs of every step depend on the dataset, the budget, the strategy and the seed. So a checkpoint needs no
    loader position but only these facts, to refuse a resume that would silently train on other packs, or another model.
    The groups of packs with similar cost depend on the layout of the ranks, which a resume may change; a resumed run
    keeps its first groups.

    Attributes:
        fingerprint: the facts that must be the same in a resumed run, by dotted key.
        grouping: `Run.grouping` of this run, and of the checkpoint once one is loaded.
        skipped_steps: the skipped steps of the run so far, including those before a resume.
        skipped_in_a_row: the skipped steps since the last trained step.
        spikes: the number of loss spikes so far; recent_losses: the losses of the last trained steps.
        total_tokens, total_target_tokens: the sums over the steps of the run so far.
        folder: the folder of the run, for messages.
        allowed: the keys that may differ, `trainer.allow_resume_mismatch`.
    """

    def __init__(
        self, fingerprint: dict[str, Any], grouping: dict[str, Any], folder: str, allowed: Sequence[str] = ()
    ) -> None:
        self.fingerprint = _as_json(fingerprint)
        self.grouping = grouping
        self.skipped_steps = self.skipped_in_a_row = self.spikes = 0
        self.total_tokens = self.total_target_tokens = 0
        self.recent_losses: list[float] = []
        self.folder = folder
        self.allowed = allowed

    def state_dict(self) -> dict[str, Any]:
        """Return the facts and the progress to save with the model."""
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return {**self.fingerprint, "grouping": self.grouping, **counters, "recent_losses": list(self.recent_losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint; raise ValueError like :meth:`check`.

        Packs keep their groups unless an option for grouping is allowed to change.
        """
        self.check(state)
        own = {key: self.fingerprint[key] for key in _GROUPING_KEYS if key in self.fingerprint}
        regroups = any(state.get(key, value) != value for key, value in own.items())
        grouping = self.grouping if regroups else state.get("grouping", self.grouping)
        losses = state.get("recent_losses", [])
        counters = {name: state.get(name, 0) for name in _COUNTERS}  # a checkpoint of an earlier version may lack them
        is_sound = _is_like(grouping, self.grouping) and isinstance(losses, list)
        if not is_sound or {*map(type, counters.values())} != {int} or not {*map(type, losses)} <= {float}:
            raise ValueError(f"a checkpoint must say how far its run was; that of {self.folder} has {show(counters)}")
        self.grouping, self.recent_losses = grouping, losses
        vars(self).update(counters)

    def check_allowed(self) -> None:
        """Raise ValueError if `allowed` has a name that checkpoints do not hold."""
        names = [_option_of(key) for key in self.fingerprint]
        for name in self.allowed:
            if name not in names:
                nearest = nearest_name(name, names)
                raise ValueError(
                    f"trainer.allow_resume_mismatch must name what a checkpoint remembers; got {name}"
                    + (f" (nearest: {nearest})" if nearest else f", not among {', '.join(sorted(set(names)))}")
                )

    def check(self, state: dict[str, Any]) -> None:
        """Compare this run with the state of a checkpoint.

        Raises:
            ValueError: If a key differs, so that a step would mean other packs, or the weights another model.
        """
        for key, value in self.fingerprint.items():
            name = _option_of(key)
            if key not in state or state[key] == UNKNOWN:  # an earlier version did not know the weights of a Hub model
                continue
            if _as_json(state[key]) != value and name not in self.allowed:
                raise ValueError(
                    f"{key} is {value}, but the run in {self.folder} was trained with {state[key]}: resume with that, "
                    f"or allow the change by trainer.allow_resume_mismatch=[{name}], or choose another "
                    "trainer.default_local_dir, or trainer.overwrite=true"
                )


def _option_of(key: str) -> str:
    """Return the option in a key such as "packs in data.train_dir"."""
    return next((word.strip("(),") for word in key.split() if "." in word), key)


def _is_like(grouping: Any, own: dict[str, Any]) -> bool:
    """Tell whether a checkpoint's grouping has the form of this run's grouping."""
    if not isinstance(grouping, dict) or grouping.keys() != own.keys():
        return False
    if not own:
        return True
    size, cost = grouping["group_size"], grouping["cost"]
    numbers = isinstance(cost, list) and all(x is None or type(x) in (int, float) for x in cost)
    return type(size) is int and size >= 1 and numbers and 0 < len(cost) <= len(own["cost"])


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))

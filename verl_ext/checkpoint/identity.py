"""The facts that a resumed run must share with its checkpoint.

The definition of an option says whether a resumed run must have its value: ``option(…, resume="same")``. For an option
with ``resume="may_grow"``, a checkpoint holds the resulting dataset facts, which may change only if the stream of the
same samples grows. A checkpoint also holds facts about the data, the packs, the model and its weights.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_ext.config.best import is_of_answers
from verl_ext.config.model import model_kind
from verl_ext.config.run import RunConfig, TrainerOptions
from verl_ext.data.dataset import CONTENT, DIGEST, PackDataset
from verl_ext.data.options import DataOptions
from verl_ext.engines.schedule import OptimOptions
from verl_ext.environment import UNKNOWN
from verl_ext.models.qwen_titans import settings_of_today
from verl_ext.options import Options, nearest_hint, options_of, spell

# The keys of verl's own dataclasses that affect a step; our options declare this in their definitions.
_KEYS_OF_VERL = {
    "model": ("lora_rank", "lora_alpha", "target_modules", "target_parameters", "exclude_modules"),
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
MEMORY = "model.memory"
BASE = "the weights in model.path"  # the key of their digest in a checkpoint
REFERENCE_WEIGHTS = "the weights of the reference (reference.path)"
_TOTAL = "trainer.total_training_steps"
SCHEDULE = f"the length of the learning rate's schedule ({_TOTAL})"
_GROUPING_KEYS = ("data.balance", "data.cost", "data.shuffle")
_WATCHED: dict[str, Any] = {"metric": str, "value": float | int | None, "step": int, "waited": int}
_COUNTERS = ("skipped_steps", "skipped_in_a_row", "high_in_a_row", "spikes", "total_tokens", "total_target_tokens")


def run_facts(
    config: RunConfig,
    hf_config: Any,
    train_set: PackDataset,
    schedule_steps: int,
    content: str | None,
    base: str | None,
) -> dict[str, Any]:
    """Return the values that determine each step's packs, and the weights' model.

    schedule_steps, content, base: as in :class:`verl_ext.trainer.run.Run`. A measurement may use other data than the
    training, so only the model counts for it.
    """
    values, optim = config.values, config.values["optim"]
    # The weights have a meaning only in this model, so these facts count even for a measurement.
    model = {f"model.config.{key}": value for key, value in model_shape(hf_config).items()}
    kind = model_kind(values)
    if (memory := kind.memory_settings(hf_config)) is not None:
        model.pop("model.config.memory", None)  # contains settings that another run of the same weights may change
        model[MEMORY] = memory
    model |= shared_options(values, [kind])
    if base is not None:
        model[BASE] = base
    if config.trainer.eval_only:
        return model
    # A constant rate without a relative warmup does not depend on the length of the run.
    if optim["lr_scheduler_type"] != "constant" or optim["lr_warmup_steps_ratio"]:
        model[SCHEDULE] = schedule_steps
    return {
        **shared_options(values, [DataOptions, config.dataset_class.Options]),
        **upstream_options(values),
        **shared_options(values, [TrainerOptions, OptimOptions]),
        **shared_options(values, [OptimOptions], "ahead"),
        **config.loss.fingerprint,
        **train_set.plan_options(),
        "packs in data.train_dir": len(train_set),
        DIGEST: train_set.digest,
        **({} if content is None else {CONTENT: content}),
        **model,
    }


def allowed_changes(config: RunConfig, extends: bool, keeps_rates: bool) -> list[str]:
    """Return the options that a resumed run may change.

    They are the user's, and those without effect on finished steps. extends, keeps_rates: as in
    :class:`verl_ext.trainer.run.Run`.
    """
    allowed = list(config.trainer.allow_resume_mismatch)
    if extends:  # PackDataset.extends compares the rest
        allowed += options_that("may_grow", [DataOptions, config.dataset_class.Options])
    if keeps_rates:
        allowed += [_TOTAL, *options_that("ahead", [OptimOptions])]
    return allowed


def options_that(rule: str, classes: Iterable[type]) -> list[str]:
    """Return the dotted keys of options, also redefined, with ``resume=rule``."""
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
    """Return {dotted key: configured value} of the options with ``resume=rule``."""
    keys = (key.split(".") for key in options_that(rule, classes))
    return {f"{node}.{name}": values[node][name] for node, name in keys if name in values[node]}


def upstream_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted key: configured value} of verl's options that affect steps."""
    return {f"{node}.{name}": values[node].get(name) for node, names in _KEYS_OF_VERL.items() for name in names}


def model_shape(hf_config: Any) -> dict[str, Any]:
    """Return the keys of a model's config that give weights their meaning."""
    described = json.loads(hf_config.to_json_string(use_diff=False))
    return {key: value for key, value in described.items() if key not in _FREE_MODEL_KEYS and key[0] != "_"}


@dataclasses.dataclass
class Watched:
    """The best value of a metric so far.

    Attributes:
        metric: its name; a score of answers is better if it is higher, a loss if it is lower.
        value: the best value; None before the first measurement.
        step: the step of that value.
        waited: the measurements since.
    """

    metric: str
    value: float | None = None
    step: int = 0
    waited: int = 0

    def measure(self, value: float, step: int, least: float = 0.0) -> None:
        """Take a measurement, which is an improvement by more than `least`."""
        gain = math.inf
        if self.value is not None:
            gain = value - self.value if is_of_answers(self.metric) else self.value - value
        if math.isfinite(value) and gain > least:
            self.value, self.step, self.waited = value, step, 0
        else:
            self.waited += 1


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
        high_in_a_row: the steps since the last loss that was not above trainer.max_loss.
        spikes: the number of loss spikes so far; recent_losses: the losses of the last trained steps.
        total_tokens, total_target_tokens: the sums over the steps of the run so far.
        watched: {key: the `Watched` of its metric} of `RunConfig.watched`.
        folder: the folder of the run, for messages.
        allowed: the keys that may differ, `trainer.allow_resume_mismatch`.
    """

    def __init__(
        self, fingerprint: dict[str, Any], grouping: dict[str, Any], folder: str, allowed: Sequence[str] = ()
    ) -> None:
        self.fingerprint = _as_json(fingerprint)
        self.grouping = grouping
        self.skipped_steps = self.skipped_in_a_row = self.high_in_a_row = self.spikes = 0
        self.total_tokens = self.total_target_tokens = 0
        self.recent_losses: list[float] = []
        self.watched: dict[str, Watched] = {}
        self.folder = folder
        self.allowed = allowed

    def state_dict(self) -> dict[str, Any]:
        """Return the facts and the progress to save with the model."""
        counters = {name: getattr(self, name) for name in _COUNTERS}
        watched = {key: vars(best).copy() for key, best in self.watched.items()}
        progress = {**counters, "recent_losses": list(self.recent_losses), "watched": watched}
        return {**self.fingerprint, "grouping": self.grouping, **progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint; raise ValueError like :meth:`check`.

        Packs keep their groups unless an option for grouping is allowed to change.
        """
        self.check(state)
        own = {key: self.fingerprint[key] for key in _GROUPING_KEYS if key in self.fingerprint}
        regroups = any(state.get(key, value) != value for key, value in own.items())
        grouping = self.grouping if regroups else state.get("grouping", self.grouping)
        losses, watched = state.get("recent_losses", []), state.get("watched", {})
        counters = {name: state.get(name, 0) for name in _COUNTERS}  # a checkpoint of an earlier version may lack them
        is_sound = _is_like(grouping, self.grouping) and isinstance(losses, list) and _are_watched(watched)
        if not is_sound or {*map(type, counters.values())} != {int} or not {*map(type, losses)} <= {float}:
            raise ValueError(f"a checkpoint must say how far its run was; that of {self.folder} has {spell(counters)}")
        self.grouping, self.recent_losses = grouping, losses
        self.watched = {key: Watched(**best) for key, best in watched.items()}
        vars(self).update(counters)

    def check_allowed(self) -> None:
        """Raise ValueError if `allowed` has a name that checkpoints do not hold."""
        names = [_option_of(key) for key in self.fingerprint]
        for name in self.allowed:
            if name not in names:
                hint = nearest_hint(name, names) or f", not among {', '.join(sorted(set(names)))}"
                must = "trainer.allow_resume_mismatch must name what a checkpoint remembers"
                raise ValueError(f"{must}; got {name}{hint}")

    def check(self, state: dict[str, Any]) -> None:
        """Compare this run with the state of a checkpoint.

        Raises:
            ValueError: If a key differs, so that a step would mean other packs, or the weights another model.
        """
        for key, value in self.fingerprint.items():
            name = _option_of(key)
            if key not in state or state[key] == UNKNOWN:  # an earlier version did not know the weights of a Hub model
                continue
            saved = _as_json(state[key])
            if key == MEMORY and isinstance(saved, dict):
                saved = settings_of_today(saved)
            if saved != value and name not in self.allowed:
                raise ValueError(
                    f"{key} is {value}, but the run in {self.folder} was trained with {saved}: resume with that, "
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


def _are_watched(watched: Any) -> bool:
    """Tell whether a checkpoint's watched metrics have their form."""
    entries = list(watched.values()) if isinstance(watched, dict) else [None]
    return all(
        isinstance(best, dict)
        and best.keys() == _WATCHED.keys()
        and all(isinstance(best[name], kind) for name, kind in _WATCHED.items())
        for best in entries
    )


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))

"""The facts that a resumed run must share with its checkpoint.

The definition of an option says whether a resumed run must have its value: ``option(…, resume="same")``. For an option
with ``resume="may_grow"``, a checkpoint holds the resulting dataset facts, which may change only if the stream of the
same samples grows. A checkpoint also holds facts about the data, the packs, the model and its weights.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_ext.config.keys import KEYS
from verl_ext.config.model import model_kind
from verl_ext.config.run import RunConfig, TrainerOptions
from verl_ext.config.upstream import select
from verl_ext.config.weights import TENSORS
from verl_ext.data.packs.dataset import CONTENT, DIGEST, PackDataset
from verl_ext.data.packs.options import DataOptions
from verl_ext.engines.router import asks_for_router_loss
from verl_ext.engines.schedule import OptimOptions
from verl_ext.environment import UNKNOWN
from verl_ext.options import Options, must, nearest_hint, options_of, spell

# The keys of a model's config.json that do not change its weights.
_FREE_MODEL_KEYS = (
    *("dtype", "torch_dtype", "transformers_version", "architectures", "use_cache", "output_router_logits"),
)
BASE = "the weights in model.path"  # the key of their digest in a checkpoint
REFERENCE_WEIGHTS = "the weights of the reference (reference.path)"
ROUTERS = "a router loss (model.override_config.output_router_logits)"
_TOTAL = "trainer.total_training_steps"
SCHEDULE = f"the length of the learning rate's schedule ({_TOTAL})"
_GROUPING_OPTIONS = ("balance", "cost", "shuffle")  # of the data node


def run_facts(
    config: RunConfig,
    hf_config: Any,
    train_set: PackDataset,
    schedule_steps: int,
    content: str | None,
    base: str | None,
    reference: str | None,
) -> dict[str, Any]:
    """Return the values that determine each step's packs, and the weights' model.

    schedule_steps, content, base, reference: as in :class:`verl_ext.trainer.run.Run`; a run without a reference has
    None. A measurement may use other data than the training, so only the model counts for it.
    """
    values, optim = config.values, config.values["optim"]
    # The weights have a meaning only in this model, so these facts count even for a measurement.
    model = {f"model.config.{key}": value for key, value in model_shape(hf_config).items()}
    kind = model_kind(values)
    model = kind.identity(hf_config, model) | shared_options(values, [kind])
    model |= weight_facts(BASE, base)
    if config.trainer.eval_only:
        return model
    # A constant rate without a relative warmup does not depend on the length of the run.
    if optim["lr_scheduler_type"] != "constant" or optim["lr_warmup_steps_ratio"]:
        model[SCHEDULE] = schedule_steps
    model[ROUTERS] = asks_for_router_loss(hf_config)
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
        **weight_facts(REFERENCE_WEIGHTS, reference),
    }


def weight_facts(name: str, digest: str | None) -> dict[str, str]:
    """Return a digest of weights as two facts; older checkpoints lack that of the tensors."""
    files, _, tensors = (digest or "").partition(TENSORS)
    return ({name: files} if files else {}) | ({f"{name}, tensor by tensor": tensors} if tensors else {})


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
    return {key.name: select(values, key.name) for key in KEYS if key.is_resumed}


def model_shape(hf_config: Any) -> dict[str, Any]:
    """Return the keys of a model's config that give weights their meaning."""
    described = json.loads(hf_config.to_json_string(use_diff=False))
    return {key: value for key, value in described.items() if key not in _FREE_MODEL_KEYS and key[0] != "_"}


def resumed_grouping(data: Mapping[str, Any], own: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the grouping of packs of a resumed run: its checkpoint's, if the options are the same.

    Args:
        data: the values of the data node.
        own: the grouping that this run's layout of ranks would have.
        saved: the facts of the checkpoint. Raises ValueError if their grouping has another form.
    """
    if any(saved.get(f"data.{name}", data[name]) != data[name] for name in _GROUPING_OPTIONS):
        return own
    grouping = saved.get("grouping", own)
    if not _is_like(grouping, own):
        raise ValueError(must("a checkpoint", "say how its packs are grouped", f"grouping={spell(grouping)}"))
    return grouping


@dataclasses.dataclass(frozen=True)
class Identity:
    """The facts of a run that its checkpoints hold and a resumed run must share.

    The packs of every step depend on the dataset, the budget, the strategy and the seed. So a checkpoint needs no
    loader position but only these facts, to refuse a resume that would silently train on other packs, or another model.
    The groups of packs with similar cost depend on the layout of the ranks, which a resume may change; a resumed run
    keeps its first groups.

    Attributes:
        facts: what must be the same in a resumed run, by dotted key.
        grouping: `Opened.grouping`, which is saved beside them.
        folder: the folder of the run, for messages.
        allowed: the options that may differ (:func:`allowed_changes`).
    """

    facts: Mapping[str, Any]
    grouping: Mapping[str, Any]
    folder: str
    allowed: Sequence[str] = ()

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {**self.facts, "grouping": dict(self.grouping)}

    def check_allowed(self) -> None:
        """Raise ValueError if `allowed` has a name that checkpoints do not hold."""
        names = [_option_of(key) for key in self.facts]
        for name in self.allowed:
            if name not in names:
                hint = nearest_hint(name, names) or f", not among {', '.join(sorted(set(names)))}"
                raise ValueError(must("trainer.allow_resume_mismatch", "name what a checkpoint remembers", name) + hint)

    def check(self, saved: Mapping[str, Any]) -> None:
        """Compare this run with the facts of a checkpoint.

        Raises:
            ValueError: If a key differs, so that a step would mean other packs, or the weights another model.
        """
        for key, fact in self.facts.items():
            name = _option_of(key)
            if key not in saved or saved[key] == UNKNOWN:  # an earlier version did not know the weights of a Hub model
                continue
            own, before = json.loads(json.dumps(fact)), saved[key]
            if before != own and name not in self.allowed:
                raise ValueError(
                    f"{key} is {own}, but the run in {self.folder} was trained with {before}: resume with that, "
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

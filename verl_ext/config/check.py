"""Checks of a whole run before loading models, one line a mistake.

They cover combinations of options, paths, and the model. ranks = data-parallel size × sequence-parallel size;
packs of a step = data-parallel size × micro-batch size × gradient accumulation.
"""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

from verl_ext.config.best import is_of_answers
from verl_ext.config.model import ModelFacts, model_kind
from verl_ext.config.model_override import override
from verl_ext.config.newer import FIRST_VERSION
from verl_ext.config.run import AFTER_EACH_EPOCH, RunConfig, frequencies
from verl_ext.config.schema import foreign_option_problems
from verl_ext.config.support import CP, SP
from verl_ext.config.upstream import fixed_value_problems
from verl_ext.config.weights import held_back, weight_problems
from verl_ext.engines.activations import NEEDS_CHECKPOINTS
from verl_ext.engines.adam8bit import AdamW8bit
from verl_ext.engines.optimizer import OWN, built_optimizer, step_problem
from verl_ext.engines.router import asks_for_router_loss
from verl_ext.engines.schedule import OptimOptions, schedule_problems
from verl_ext.layers.mixers import positions_of_padding
from verl_ext.layers.towers import model_class, without_code
from verl_ext.losses import PREFERENCE_MODES, PreferenceOptions
from verl_ext.options import choice_problem, first_line, must, nearest_hint, options_of, refuse, spell
from verl_ext.parallel.experts import KEY as EP
from verl_ext.plugin import register_architectures

_ON_GPU_ALONE = ("bitsandbytes", "torchao")  # packages whose optimizers take no steps on a CPU
_OF_GPU = ("capturable", "foreach", "fused")  # options that are refused on a CPU
# In a trial of an optimizer, because they have checks of their own.
_SOUND: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_run(config: RunConfig, hf_config: Any = None) -> ModelFacts:
    """Check a configuration against its machine and model; return the model's facts.

    Args:
        config: a config in which each value is valid by itself.
        hf_config: the model's Hugging Face config if it is loaded already; else it is read from `model.path`, without
            weights.

    Raises:
        ValueError: If there are mistakes, with a line for each.
    """
    kind = model_kind(config.values)
    problems: list[str | None] = [
        *data_problems(config),
        batch_problem(config, config.machine.world_size),
        *run_path_problems(config),
        *device_problems(config),
        rate_problem(config),
        optimizer_problem(config),
        *schedule_problems(config.optim),
        *library_problems(config),
        *fixed_value_problems(config.values),
        *preference_problems(config),
        *kind.config_problems(config),
    ]
    if config.trainer.eval_only and config.trainer.overwrite:
        problems.append(must("trainer.overwrite", "be false with trainer.eval_only=true, which replaces no run", True))
    # The model is examined even after other mistakes, so that one start reports all of them.
    path = str(config.model_options.hf_config_path or config.model_options.path or "")
    model = None
    if hf_config is not None or (path and not _is_missing(path)):
        try:
            model = kind.examine(config, _hf_config(config, path) if hf_config is None else hf_config)
            problems += wrap_problems(config, model.hf_config)
            if config.eval.prompts is not None:
                problems += kind.answer_problems(config, model.hf_config)
        except ValueError as error:
            problems += str(error).splitlines()
    refuse(problems)
    assert model is not None, "path_problems says why there is none"
    return model


def preference_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each mismatch of loss, data and reference."""
    mode, path = config.loss.mode, config.reference.path
    compares, has_units = mode in PreferenceOptions.modes, config.dataset_class.has_units
    if compares and not has_units:
        got = f"data.custom_cls.name={config.dataset_class.__name__}, whose packs have no answers"
        yield must("data", f"be preference with loss.mode={mode}", got)
    elif has_units and not compares:
        needed = f"be one of {', '.join(PreferenceOptions.modes)} with data=preference"
        yield must("loss", f"{needed} (data=chosen trains on the preferred answers alone)", f"loss.mode={mode}")
    needs = compares and PREFERENCE_MODES[mode].has_reference
    if path is not None and not needs:
        yield must("reference.path", f"be null with loss.mode={mode}, which has no reference", path)
    elif path is not None and _is_missing(str(path)):
        yield must("reference.path", "be an existing folder or a hub name", path)
    elif path is not None and (given := [*config.model_options.new_tokens, *config.model_options.new_special_tokens]):
        yield must("reference.path", f"be null with model.new_tokens={spell(given)}, which the reference lacks", path)
    elif path is None and needs and config.trainer.eval_only:
        yield "reference.path is required with trainer.eval_only=true, where the model is not its reference; got null"


def _hf_config(config: RunConfig, path: str) -> Any:
    """Read the config of the model, and apply `model.override_config` to it."""
    options = config.model_options
    key = "model.hf_config_path" if options.hf_config_path else "model.path"
    hf_config = read_hf_config(os.path.expanduser(path), bool(options.trust_remote_code), key)
    override(hf_config, options.override_config)
    coefficient = options.override_config.get("router_aux_loss_coef")
    if coefficient and not asks_for_router_loss(hf_config):
        raise ValueError(
            "model.override_config.router_aux_loss_coef needs model.override_config.output_router_logits=true; "
            f"got {coefficient} without it"
        )
    return hf_config


def data_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each other family's option, and each missing path."""
    yield from foreign_option_problems(config.values)
    train_dir, val_dir, family = config.data.train_dir, config.data.val_dir, config.dataset
    evaluates = config.trainer.eval_only
    if family.needs_train_dir and train_dir in (None, "", []):
        yield f"data.train_dir is required: {family.reads}; got {spell(train_dir)}"
    # A set that is only measured also stands for data.train_dir; it is reported once.
    if not (evaluates and train_dir == val_dir):
        yield from family.path_problems("data.train_dir", train_dir)
    yield from family.path_problems("data.val_dir", val_dir)
    test_freq = config.trainer.test_freq
    by_steps = any(every == AFTER_EACH_EPOCH or every > 0 for every in frequencies(test_freq))
    per_epoch, has_set = config.trainer.tests_per_epoch, val_dir or family.splits_validation
    if (by_steps or per_epoch or evaluates) and not has_set:
        asks = f"trainer.tests_per_epoch={per_epoch}" if per_epoch else "trainer.eval_only=true"
        yield f"data.val_dir is required with {f'trainer.test_freq={spell(test_freq)}' if by_steps else asks}; got null"
    # A metric that is measured only at the end can neither choose a checkpoint nor end a run.
    for key, metric in config.watched.items():
        of_answers = is_of_answers(metric)
        if not (config.eval.prompts if of_answers else has_set):
            yield f"{'eval.prompts' if of_answers else 'data.val_dir'} is required with {key}={metric}; got null"
        elif of_answers and config.eval.freq is None:
            yield f"eval.freq is required with {key}={metric}, which is else measured only at the end; got null"
        elif not (of_answers or by_steps or per_epoch):
            needed = f"say how often to validate with {key}={metric}"
            yield must("trainer.test_freq or trainer.tests_per_epoch", needed, f"{spell(test_freq)} and null")


def batch_problem(config: Any, ranks: int) -> str | None:
    """Return a line if ranks or packs do not divide evenly.

    Ranks form sequence-parallel groups; packs form micro-batches. config: a RunConfig or its composed config.
    """
    ulysses, groups = config.engine.ulysses_sequence_parallel_size, config.parallel.context_parallel_size
    keys, sizes = (SP, f"{ulysses}") if groups == 1 else (f"{SP} × {CP}", f"{ulysses} × {groups}")
    if ranks % (ulysses * groups):
        return must(keys, "divide the number of ranks", f"{sizes} with {ranks} rank{'s' * (ranks > 1)}")
    shard = config.engine.fsdp_size
    if shard != -1 and (shard < 1 or ranks % shard):
        return must("engine.fsdp_size", "divide the number of ranks or be -1", f"{shard} with {ranks}")
    of_shards = "the number of ranks" if shard == -1 else "engine.fsdp_size"
    if (ranks if shard == -1 else shard) % config.parallel.expert_parallel:
        got = f"{config.parallel.expert_parallel} with {ranks if shard == -1 else shard}"
        return must(EP, f"divide {of_shards}", got)
    batch, micro = config.data.train_batch_size, config.data.micro_batch_size_per_gpu
    packs = ranks // (ulysses * groups)
    if batch % (packs * micro) == 0:
        return None
    product = f"{packs} × {micro} = {packs * micro} (ranks {ranks}, {keys} {sizes})"
    needed = f"be a multiple of the data-parallel size × data.micro_batch_size_per_gpu = {product}"
    return must("data.train_batch_size", needed, batch)


def check_categories(loss: Any, names: Sequence[str]) -> None:
    """Raise ValueError if weights name missing categories or leave no weight.

    Args:
        loss: the options of the loss.
        names: the categories of the training data.
    """
    key, weights = "loss.category_weights", loss.category_weights or {}
    refuse(choice_problem(f"a name in {key}", name, names) for name in weights)
    if names and all(weights.get(name, 1.0) == 0 for name in names):
        raise ValueError(must(key, "leave a category a weight above 0", f"0 for all of {', '.join(names)}"))


def check_watched(config: RunConfig, measured: Sequence[str], asked: Iterable[str]) -> None:
    """Raise ValueError for a watched metric that no validation has.

    measured: the metrics of a validation. asked: the categories of the prompts.
    """
    bins = config.trainer.bins.names
    scores = ["val/answer", *(f"val/answer/{name}" for name in asked), *(f"val/answer_{name}" for name in bins)]
    for key, metric in config.watched.items():
        names = scores if is_of_answers(metric) else measured
        if metric not in names:
            needed = f"be a metric that a validation of this run has, such as {names[0]}"
            raise ValueError(must(key, needed, metric) + nearest_hint(metric, names))


def check_positions(longest_document: int, max_tokens: int, hf_config: Any) -> None:
    """Raise ValueError if a document needs positions that the model lacks.

    Positions restart with every document, so a pack may be longer, but a document, which has at most
    min(longest_document, max_tokens) tokens, may not.
    """
    positions = model_positions(hf_config)
    longest = min(longest_document, max_tokens)
    if positions is not None and longest > positions:
        needed = f"be at most the model's {positions} positions while a document is longer than those"
        got = f"{max_tokens} and a longest document of {longest} tokens"
        hint = "lower it with data.over_length=drop, truncate or split, or extend the model by model.override_config"
        raise ValueError(must("data.max_tokens", needed, f"{got}: {hint}"))


def model_positions(hf_config: Any) -> int | None:
    """Return a model's positions, including RoPE scaling; None if unnamed.

    Some configs (Llama 3) include the scaling in max_position_embeddings, others (YaRN for Qwen) do not; this function
    takes the larger value.
    """
    text = hf_config.get_text_config()
    positions = base = getattr(text, "max_position_embeddings", None)
    if not positions:
        return None
    ropes = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    ropes += [inner for rope in ropes if isinstance(rope, dict) for inner in rope.values()]  # one per layer type
    for rope in ropes:
        if isinstance(rope, dict) and rope.get("factor") and rope.get("rope_type", rope.get("type")) != "default":
            positions = max(positions, int(rope["factor"] * (rope.get("original_max_position_embeddings") or base)))
    cls = model_class(hf_config)
    return int(positions) - (positions_of_padding(cls, text) if cls is not None else 0)


def run_path_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each missing path; the loader checks Hub names."""
    options = config.model_options
    if not options.path:
        yield f"model.path is required: a folder or hub name of a model; got {spell(options.path)}"
    for name in ("path", "hf_config_path", "tokenizer_path", "lora_adapter_path"):
        value = getattr(options, name)
        if value and _is_missing(str(value)):
            yield must(f"model.{name}", "be an existing folder or a hub name", value)
    folder = os.path.expanduser(str(options.tokenizer_path or ""))
    if os.path.isdir(folder) and not any(re.search(r"token|vocab|\.model$", name) for name in os.listdir(folder)):
        yield must("model.tokenizer_path", "hold a tokenizer", options.tokenizer_path)
    adapter = str(options.lora_adapter_path or "")
    if adapter and not options.lora_rank:
        yield must("model.lora_rank", f"be at least 1 with model.lora_adapter_path={adapter}", 0)
    if os.path.isdir(adapter) and not os.path.isfile(os.path.join(adapter, "adapter_config.json")):
        yield must("model.lora_adapter_path", "hold an adapter_config.json", adapter)
    resume = config.trainer.resume_from_path
    if resume and config.trainer.resume_mode != "disable" and not os.path.isdir(os.path.expanduser(resume)):
        yield must("trainer.resume_from_path", "be an existing global_step_N folder", resume)


def check_weight_files(config: RunConfig) -> None:
    """Raise ValueError if a local `model.path` has no whole weights."""
    if os.path.isdir(config.model_folder):
        refuse(weight_problems(config.model_folder))


def device_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each option that device or packages forbid."""
    device, engine, accelerator = config.trainer.device, config.engine, config.machine.accelerator
    on_cpu = device == "cpu" or accelerator is None
    if accelerator == "npu":
        got = f"{device} and a visible NPU"
        yield must("trainer.device", "be cuda or cpu, on a machine that shows no NPU", got)
    elif device == "cuda" and accelerator is None:
        yield f"parallel=fsdp2 (trainer.device={device}) needs a GPU; none is visible; use parallel=cpu"
    elif device == "cpu" and accelerator is not None:
        yield (
            f"parallel=cpu (trainer.device=cpu) needs a process that sees no accelerator, since verl chooses its "
            f"platform once; got a visible {accelerator}: start it with CUDA_VISIBLE_DEVICES="
        )
    if engine.offload_policy and on_cpu:
        yield must("engine.offload_policy", "be false on CPU, where host memory holds everything", True)
    if config.model_options.activation_offload and not config.model_options.enable_gradient_checkpointing:
        yield NEEDS_CHECKPOINTS
    if config.model_options.use_liger and accelerator and importlib.util.find_spec("liger_kernel") is None:
        yield "model.use_liger=true needs the package liger-kernel, which is not installed: pip install 'verl-ext[gpu]'"


def library_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each module of `model.external_lib` that fails to import."""
    libraries = config.model_options.external_lib or []
    for name in libraries if isinstance(libraries, (list, tuple)) else [libraries]:
        try:
            importlib.import_module(name)
        except Exception as error:  # a user's module may raise anything
            yield must("model.external_lib", "be a module that can be imported", name) + f" ({first_line(error)})"


def wrap_problems(config: RunConfig, hf_config: Any) -> Iterator[str | None]:
    """Yield a line for each class of `engine.wrap_policy.transformer_layer_cls_to_wrap` that the model lacks."""
    key, cls = "transformer_layer_cls_to_wrap", model_class(hf_config)
    names = (config.engine.wrap_policy or {}).get(key)
    if cls is None or names is None:
        return
    known = [name for name, kind in vars(sys.modules[cls.__module__]).items() if isinstance(kind, type)]
    layers = sorted(name for name in known if name.endswith(("Layer", "Block")))
    for name in names if isinstance(names, (list, tuple)) else [names]:
        yield None if name in known else choice_problem(f"engine.wrap_policy.{key}", name, layers)


def rate_problem(config: RunConfig) -> str | None:
    """Return a line if a training has no learning rate."""
    return replace(options_of(OptimOptions)["lr"], required=True).problem("optim.lr", config.optim.lr)


def optimizer_problem(config: RunConfig) -> str | None:
    """Return a line if the optimizer is unknown or takes no steps.

    Also if it refuses its options; the trial steps on small shards.
    """
    optim, key = config.optim, "optim.optimizer_impl"
    if not isinstance(optim.optimizer_impl, str) or not optim.optimizer_impl:
        return must(key, "be a module that is installed", optim.optimizer_impl)
    try:
        names = {
            **vars(importlib.import_module(optim.optimizer_impl)),
            **(OWN if optim.optimizer_impl == "torch.optim" else {}),
        }
    except ImportError as error:
        return must(key, "be a module that is installed", f"{optim.optimizer_impl} ({first_line(error)})")
    kinds = {name for name, kind in names.items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    if not kinds:
        return must(key, "be a module of optimizers", optim.optimizer_impl)
    if spell(optim.optimizer) not in names:  # a list is unhashable
        return choice_problem("optim.optimizer", optim.optimizer, sorted(kinds - {"Optimizer"}))
    # A trial on small parameters shows what an optimizer refuses before weights are loaded.
    steps = 0 if optim.optimizer_impl.split(".")[0] in _ON_GPU_ALONE else 2
    if not isinstance(given := optim.override_optimizer_config or {}, Mapping):
        return must("optim.override_optimizer_config", "be a mapping of names to values", given)
    ignored = _OF_GPU if config.trainer.device != "cpu" and optim.optimizer != AdamW8bit.__name__ else ()

    def problem_of(options: dict[str, Any]) -> str | None:
        trial = replace(optim, **_SOUND, override_optimizer_config=options)
        return step_problem(lambda parameters: built_optimizer(parameters, trial), steps)

    if not (problem := problem_of({name: value for name, value in given.items() if name not in ignored})):
        return _state_problem(config)
    if given and not problem_of({}):
        return must("optim.override_optimizer_config", f"be options of {optim.optimizer}", given) + f" ({problem})"
    needed = "be an optimizer that takes steps of FSDP2's shards of matrices and vectors, with a weight decay"
    return must("optim.optimizer", needed, f"{optim.optimizer} ({problem})")


def _state_problem(config: RunConfig) -> str | None:
    """Return a line if checkpoints would hold the state of an optimizer outside torch.optim."""
    contents = {"save_contents": config.checkpoint.save_contents, "load_contents": config.checkpoint.load_contents}
    key = next((key for key, parts in contents.items() if "optimizer" in parts), None)
    if key is None or config.optim.optimizer_impl == "torch.optim" or config.trainer.eval_only:
        return None
    needed = f"leave out optimizer with optim.optimizer_impl={config.optim.optimizer_impl}"
    needed = f"{needed}, whose state not every number of ranks could resume"
    return must(f"checkpoint.{key}", needed, list(contents[key]))


def _is_missing(path: str) -> bool:
    """Tell whether a path is neither a folder nor a Hub name."""
    is_local = path.startswith((".", "/", "~")) or _HUB_NAME.fullmatch(path) is None
    return is_local and not os.path.isdir(os.path.expanduser(path))


def read_hf_config(path: str, trusted: bool = False, key: str = "model.path") -> Any:
    """Read the config of a folder or Hub name, whose code may run if `trusted`; or raise ValueError."""
    from transformers import AutoConfig

    register_architectures()
    try:
        with held_back("configuration_utils"):  # which logs the whole config before it raises
            return without_code(AutoConfig.from_pretrained(path, trust_remote_code=trusted), trusted)
    except Exception as error:  # a config class raises any error that the values cause
        reason = first_line(error)
        kind = re.search(r"model type `([\w-]+)`", reason)
        if kind and (since := FIRST_VERSION.get(kind[1])):
            place = "docs/reference/newer_models.md"
            reason = f"transformers has {kind[1]} from {since} on, not in {version('transformers')}: {place}"
        raise ValueError(must(key, "hold a model's config.json", f"{path} ({reason})")) from error

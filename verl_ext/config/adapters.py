"""LoRA adapters of PEFT that can be trained and exported."""

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import torch

from verl_ext.config.adapter_weights import adapter_weight_problems, tables_in
from verl_ext.config.architecture import Architecture
from verl_ext.engines.lora import (
    ALL_LINEAR,
    LoraOptions,
    adapted_parts,
    as_written,
    counted_parts,
    expected_parts,
    given_settings,
)
from verl_ext.engines.new_rows import ROWS, embeddings_and_head, is_whole, trained_rows
from verl_ext.engines.optimizer import rate_problems
from verl_ext.layers.towers import name_hint, outside_text, text_alone
from verl_ext.layers.trial import isolation_problem
from verl_ext.options import first_line, must, nearest_hint, options_of, plain, spell

if TYPE_CHECKING:
    from verl_ext.config.run import RunConfig

# Variants of LoRA whose training needs more than the layers' own forward, or an input that packs lack.
_NOT_TRAINED = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config"),
    *("monteclora_config", "use_bdlora", "use_qalora", "velora_config"),
)
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of init_lora_weights


def with_adapters(model: torch.nn.Module, peft_config: Any) -> Any:
    """Return PEFT's model around a plain one, in place, with new adapters.

    Around a model on the meta device the adapters are there too, so that nothing is computed.
    """
    from peft import get_peft_model  # here and below, because it takes seconds and only a run with adapters needs it

    peft_config, device = copy.deepcopy(peft_config), next(model.parameters()).device
    told = {name: getattr(peft_config, name) for name in ("base_model_name_or_path", "init_lora_weights")}
    if device.type == "meta":
        peft_config.init_lora_weights = False
    with warnings.catch_warnings(), device:
        warnings.simplefilter("ignore")  # about tied weights, which an export writes as they are
        adapted = get_peft_model(model, peft_config)
    vars(peft_config).update(told)  # of the base that was trained on, not of a checkpoint's folder
    return adapted


def lora_problems(config: "RunConfig", model: Architecture) -> list[str]:
    """List adapters whose modules are missing, or cannot be trained or exported.

    The latter are the input embeddings, and a head that shares their weights. PEFT cannot train rows of new tokens in a
    module that has adapters.
    """
    options, adapter = config.model_options, config.model_options.lora_adapter_path
    tied = getattr(model.hf_config, "tie_word_embeddings", False)
    is_local = adapter and (os.path.exists(adapter) or adapter.startswith((".", "/", "~")))
    if not options.lora_rank or (is_local and not os.path.isfile(os.path.join(adapter, "adapter_config.json"))):
        return []  # path_problems reports it
    from peft.tuners.tuners_utils import check_target_module_exists as targets_module

    settings = given_settings(options)
    targets, parameters = plain(options.target_modules), plain(config.values["model"].get("target_parameters"))
    if problems := list(_setting_problems(settings, adapter, targets, parameters)):
        return problems
    key = "model.lora_adapter_path: target_modules" if adapter else "model.target_modules"
    try:
        lora = _lora_config(config, model)
    except (OSError, TypeError, ValueError) as error:
        return [must("model.lora_adapter_path", "hold an adapter of LoRA", f"{adapter}: {first_line(error)}")]
    if adapter and (problems := list(_variant_problems(lora, adapter))):
        return problems
    given = lora.target_modules if isinstance(lora.target_modules, str) else sorted(lora.target_modules or ())
    if model.module is not None and (problems := list(_name_problems(model, lora, key))):
        return problems
    # Adapters of these modules could not be sharded, or not exported.
    embedding = "model.embed_tokens"
    if model.module is not None:
        ids = model.module.get_input_embeddings()
        embedding = next(name for name, module in model.module.named_modules() if module is ids)
    refused = ["lm_head", embedding] if tied else [embedding]
    named = [name for name in refused if lora.target_modules and targets_module(lora, name)]
    if named:
        why = "tied weights are exported as one" if tied else "verl 0.9.1's FSDP2 cannot shard an adapter there"
        return [must(key, f"leave out {' and '.join(named)}: {why}", given)]
    if problems := list(_new_token_problems(model, lora, key, spell(adapter or given))):
        return problems
    # What names do not tell, a copy of the model with these adapters does.
    return [] if model.module is None else list(_merge_problems(config, model, lora))


def _lora_config(config: "RunConfig", model: Architecture) -> Any:
    """Return a run's LoraConfig with the names that the user wrote; an adapter folder's stays as it is.

    Raises OSError, TypeError or ValueError for a folder whose config cannot be read.
    """
    from peft import LoraConfig

    options = config.model_options
    if options.lora_adapter_path:
        return LoraConfig.from_pretrained(options.lora_adapter_path)
    lora: Any = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        target_modules=plain(options.target_modules),
        target_parameters=plain(config.values["model"].get("target_parameters")),
        exclude_modules=plain(options.exclude_modules),
        **given_settings(options),
    )
    if model.module is not None:
        vars(lora).update(trained_rows(model.module, model.new_pieces, lora.modules_to_save or ()))
        lora.exclude_modules = text_alone(model.module, lora.exclude_modules)
    return lora


def adapter_notices(config: "RunConfig", model: Architecture) -> Iterator[str]:
    """Yield a line that says where the adapters of a run are, and one about weights beside them."""
    if not config.model_options.lora_rank or model.module is None:
        return
    lora, folder = _lora_config(config, model), config.model_options.lora_adapter_path
    parts = expected_parts(model.module, lora if folder else as_written(model.module, lora))
    yield f"adapters of rank {lora.r} are on {counted_parts(parts)}"
    tables = tables_in(model.module, folder) if folder else {}
    if others := sorted(key for key, name in tables.items() if not is_whole(name, lora.modules_to_save or ())):
        yield f"model.lora_adapter_path also holds {', '.join(others)}, in place of those of model.path"


def _setting_problems(settings: Mapping[str, Any], adapter: str | None, targets: Any, parameters: Any) -> Iterator[str]:
    """Yield a line for each adapter option that PEFT ignores or refuses."""
    for name in settings if adapter else ():
        default = spell(options_of(LoraOptions)[name].default)
        decides = f"model.lora_adapter_path={adapter}, whose adapter_config.json decides it"
        yield must(f"model.{name}", f"be {default} with {decides}", settings[name])
    layers = settings.get("layers_to_transform")
    if layers is not None and isinstance(targets, str):
        yield must("model.target_modules", f"be a list of names with model.layers_to_transform={layers}", targets)
    if layers is not None and parameters:
        instead = "whose names can have a layer (layers.1.mlp.experts.down_proj)"
        yield must("model.layers_to_transform", f"be null with model.target_parameters, {instead}", layers)
    for name in ("lora_dropout", "use_dora"):
        if parameters and name in settings:
            default = spell(options_of(LoraOptions)[name].default)
            why = "model.target_parameters, whose adapters change weights and not inputs"
            yield must(f"model.{name}", f"be {default} with {why}", settings[name])


def _name_problems(model: Architecture, lora: Any, key: str) -> Iterator[str]:
    """Yield a line for the first name that the text model lacks, over which PEFT passes in silence."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists as targets_module

    outside = tuple(f"{name}." for name in outside_text(model.module))
    whose = f"the text model of a {model.cls.__name__}" if outside else f"a {model.cls.__name__}"
    modules = {name: part for name, part in model.module.named_modules() if not f"{name}.".startswith(outside)}
    parameters = [name for name, _ in model.module.named_parameters() if not name.startswith(outside)]
    given = lora.target_modules
    for target in () if given in (None, ALL_LINEAR) else [given] if isinstance(given, str) else sorted(given):
        alone = LoraConfig(target_modules=target if isinstance(given, str) else [target])
        if not any(targets_module(alone, name) for name in modules):
            hint = nearest_hint(target, {name.rpartition(".")[2] for name in modules})
            yield must(key, f"name modules of {whose}", target) + hint
            return
    for target in lora.target_parameters or ():
        if not any(f".{name}".endswith(f".{target}") for name in parameters):
            of_modules = key.replace("target_modules", "target_parameters")
            yield must(of_modules, f"name parameters of {whose}", target) + name_hint(target, parameters)
    # A module that is trained whole is copied, so that it may hold nothing that others share.
    for name in lora.modules_to_save or ():
        saved = [part for path, part in modules.items() if path.endswith(name)]
        named = any(f".{path}".endswith(f".{name}") for path in modules)
        if not named or not all(map(_can_be_whole, saved)):
            hint = nearest_hint(
                name, {path.rpartition(".")[2] for path, part in modules.items() if _can_be_whole(part)}
            )
            of_modules = key.replace("target_modules", "modules_to_save")
            yield must(of_modules, f"name embeddings and linear layers of {whose}", name) + hint
    layers = lora.layers_to_transform
    for layer in [layers] if isinstance(layers, int) else layers or ():
        alone = copy.copy(lora)
        alone.layers_to_transform = [layer]
        if not any(targets_module(alone, name) for name in modules):
            of_modules = key.replace("target_modules", "layers_to_transform")
            yield must(of_modules, f"name layers of {whose} with adapters", layer)


def _new_token_problems(model: Architecture, lora: Any, key: str, got: str) -> Iterator[str]:
    """Yield a line for rows of new tokens that adapters cannot train."""
    from peft.tuners.tuners_utils import check_target_module_exists as targets_module

    if not model.new_pieces or model.module is None:
        return
    ends = embeddings_and_head(model.module)
    rows, whole, node = lora.trainable_token_indices or {}, lora.modules_to_save or (), key.partition(":")[0]
    rows = rows if isinstance(rows, dict) else {ends[0]: rows}
    if len({is_whole(name, whole) for name in ends}) > 1 and getattr(model.hf_config, "tie_word_embeddings", False):
        needed = f"name both or none of {' and '.join(ends)}, which are tied, with model.new_tokens"
        yield must(key.replace("target_modules", "modules_to_save"), needed, list(whole))
        return
    if getattr(model.module.get_submodule(ends[-1]), "bias", None) is not None:
        drops = f"a {model.cls.__name__}, of whose head PEFT would drop the bias"
        yield must("model.new_tokens", f"be [] with adapters of {drops}", f"{len(model.new_pieces)} of them")
    for name in trained_rows(model.module, model.new_pieces, whole).get(ROWS, {}):
        if lora.target_modules and targets_module(lora, name):
            yield must(key, f"leave out {name} with model.new_tokens, whose rows are trained there", got)
        of_part = next((found for end, found in rows.items() if f".{name}".endswith(f".{end}")), ())
        if missing := sorted({*model.new_pieces} - {*of_part}):
            yield must(node, f"train the rows of model.new_tokens in {name}", f"{got}, without row {missing[0]}")


def _can_be_whole(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.Embedding, torch.nn.Linear))


def _variant_problems(lora: Any, adapter: str) -> Iterator[str]:
    """Yield a line for each adapter property that training does not compute."""
    key = "model.lora_adapter_path"
    if (kind := str(lora.peft_type.value)) != "LORA":
        yield must(key, "hold an adapter of LoRA", f"{adapter}, of {kind}")
        return
    for name in _NOT_TRAINED:
        if getattr(lora, name, None):
            yield must(key, f"hold an adapter without {name}, which packs do not train", adapter)
    if str(lora.init_lora_weights).startswith(_CHANGE_BASE):
        got = f"{adapter} of init_lora_weights={lora.init_lora_weights}, which takes a part of them"
        hint = " (PEFT's save_pretrained converts it: path_initial_model_for_weight_conversion)"
        yield must(key, "hold an adapter of the weights in model.path as they are", got + hint)


def _merge_problems(config: "RunConfig", model: Architecture, lora: Any) -> Iterator[str]:
    """Yield a line if adapters do not fit, or cannot be merged."""
    module: Any = copy.deepcopy(model.module)
    key, got = "model.lora_adapter_path", config.model_options.lora_adapter_path
    if got is None:
        key, got = "model.target_modules", spell(plain(config.model_options.target_modules))
        lora = as_written(module, lora)
    expected = expected_parts(module, lora)
    try:
        adapted = with_adapters(module, lora)
    except Exception as error:  # PEFT raises any error for modules that it does not adapt
        for name, value in given_settings(config.model_options).items():
            if name in str(error):  # of the experts among all-linear
                key, got = f"model.{name}", spell(value)
        needed = f"be adapters that a {model.name} can have"
        if any("bnb" in frame.name or "bitsandbytes" in frame.filename for frame in extract_tb(error.__traceback__)):
            needed = "be applied by a PEFT whose bitsandbytes can be imported (reinstall or uninstall it)"
        yield must(key, needed, f"{got} ({first_line(error)})")
        return
    if other := set(expected) ^ set(adapted_parts(adapted)):
        yield must(key, "be names that PEFT adapts as they are written", f"{got} ({counted_parts(other)} differ)")
        return
    # The tensors of a folder are compared before its adapters are merged, and told last.
    folder = config.model_options.lora_adapter_path
    differences = [*adapter_weight_problems(model.module, adapted, folder)] if folder else []
    yield from rate_problems(adapted, config.optim.lr_of)
    if failure := _trial(model, lora, adapted):
        yield must(key, f"be adapters with which a {model.name} computes", f"{got} ({failure})")
        return
    if "hf_model" in config.checkpoint.save_contents:
        try:
            adapted.merge_and_unload()
        except Exception as error:
            needed = f"leave out hf_model for adapters that cannot be merged ({first_line(error)})"
            line = must("checkpoint.save_contents", needed, list(config.checkpoint.save_contents))
            yield f"{line}: verl-ext export form=adapter writes them as they are"
            return
    yield from differences


def _trial(model: Architecture, lora: Any, adapted: Any) -> str | None:
    """Return the error of a small model with adapters, or None.

    Only adapters of parameters are tried, because PEFT wraps their modules in others of its own.
    """
    from peft.tuners.lora.layer import ParamWrapper

    if not any(isinstance(module, ParamWrapper) for module in adapted.modules()):
        return None
    try:
        trial = with_adapters(model.trial(), lora)
    except Exception:  # small sizes do not suit the config, or lack the layers that are named
        return None
    try:
        isolation_problem(trial)
    except Exception as error:  # a DeepSeek's layer reads its router's buffer, which a wrapper does not show
        return f"PEFT's model fails: {first_line(error)}"
    return None

"""Writes the options and commands of docs/reference and the table of keys: python docs/make_configuration.py"""

import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Collection, Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.utils import get_class
from omegaconf import OmegaConf

from verl_ext.__main__ import COMMANDS, main
from verl_ext.answers import AnswerOptions
from verl_ext.attention import AttentionOptions
from verl_ext.commands.command_line import key_of
from verl_ext.config import key_table, schema
from verl_ext.config.best import BestOptions
from verl_ext.config.compose import PRIMARY, compose
from verl_ext.config.keys import is_name_of_verl, with_fact
from verl_ext.config.run import RayOptions, TrainerOptions
from verl_ext.config.schema import dataset_families, model_kinds
from verl_ext.config.weights import ModelNode
from verl_ext.data.packs.options import DataOptions
from verl_ext.engines.schedule import OptimOptions
from verl_ext.losses import LossOptions, PreferenceOptions, ReferenceOptions
from verl_ext.options import Option, Options, options_of, spell
from verl_ext.parallel.shards import ParallelOptions

NEEDED = ("optim.lr", "model.path")  # by every training, though other programs may do without
REFERENCE = Path(__file__).parent / "reference"
EXAMPLES = yaml.safe_load(Path(__file__).with_name("option_examples.yaml").read_text(encoding="utf-8"))
# What keys of verl mean here, where its own comments say less; and the groups of choices.
MEANINGS = {
    "model.path": "folder of the model, or its name on the Hub",
    "optim.weight_decay": "weight decay of the optimizer; optim.decay says of which parameters",
    "optim.lr_warmup_steps_ratio": "share of the steps in which the rate rises from 0; not used with lr_warmup_steps",
    "optim.lr_warmup_steps": "steps in which the rate rises from 0; -1: lr_warmup_steps_ratio",
    "optim.min_lr_ratio": "what is left of the rate at the end of a schedule",
    "optim.optimizer": "class of optim.optimizer_impl: AdamW, AdamW8bit, Muon, or another",
    "optim.betas": "decay of the two moments of Adam",
    "optim.clip_grad": "greatest norm of the gradient",
    "model.lora_rank": "rank of the adapters; 0: all weights are trained (model=lora: 32)",
    "model.lora_alpha": "scale of the adapters, as a multiple of 1 / lora_rank",
    "model.target_modules": "layers that get adapters: all-linear, or a list of names",
    "model.lora_adapter_path": "folder of adapters to start from",
    "model.override_config": "values in place of those of the model's config.json",
    "model.enable_gradient_checkpointing": "true: activations are computed again in the backward pass, to save memory",
    "model.use_liger": "true: Liger's kernels, on a GPU",
    "model.custom_chat_template": "chat template in place of the tokenizer's: a text or a file",
    "engine.ulysses_sequence_parallel_size": "ranks that share a sequence by Ulysses",
    "engine.offload_policy": "true: parameters, gradients and optimizer lie in the memory of the host",
    "engine.model_dtype": "data type of the stored weights: fp32 or bf16",
    "engine.fsdp_size": "ranks that share one copy of the weights; -1: all",
    "engine.strategy": "must be fsdp2",
    "engine.mixed_precision.param_dtype": "data type of computation; null: bf16 on a GPU, fp32 on a CPU",
    "engine.mixed_precision.reduce_dtype": "data type in which gradients are summed over ranks",
    "checkpoint.save_contents": "parts of a checkpoint: model, optimizer, extra, hf_model",
    "checkpoint.load_contents": "parts of a checkpoint that a resumed run reads",
    "data.apply_chat_template_kwargs": "arguments of the chat template",
    "data.custom_cls.path": "file or module of a dataset class of your own",
    "data.custom_cls.name": "name of a dataset class of your own",
    "loss.custom_cls.path": "file or module of a loss of your own",
    "loss.custom_cls.name": "name of a loss of your own",
    "data": "kind of dataset",
    "engine": "engine of verl",
    "loss": "what is minimized",
    "model": "kind of model: packed: any causal language model; lora: with adapters",
    "optim": "node of the optimizer",
    "parallel": "device, and ranks that share a sequence",
    "profiler": "profiler of verl",
    "recipe": "recipe that the run builds on; `verl-ext recipes` lists them",
}


def pages() -> dict[str, str]:
    """The texts of the pages below docs/reference, by their paths."""
    nodes = {name: list(lines) for name, lines in _node_pages()}
    commands = {name: list(_command_page(name)) for name in COMMANDS}
    made = {f"configuration/{name}.md": lines for name, lines in nodes.items()}
    made["configuration/README.md"] = [
        "# Configuration",
        "",
        "The options of a run, a page for each node of its configuration. `python docs/make_configuration.py` makes",
        "these pages from the options in the code, and a test compares both.",
        "",
        "The nodes `model`, `engine`, `optim`, `checkpoint` and `profiler` have verl's own keys too. `--cfg job`",
        "prints every key, and `verl-ext train --help KEY` explains one.",
        "",
        *(f"- [{lines[0].removeprefix('# ')}]({name}.md)" for name, lines in nodes.items()),
    ]
    made |= {f"cli/verl-ext-{name}.md": lines for name, lines in commands.items()}
    made["cli/README.md"] = [
        "# Command line",
        "",
        "What `verl-ext --help` and the help of each command print, with an example of every option.",
        "[Commands](../commands.md) says what the commands are for, and how values are written.",
        "",
        *(f"- [`verl-ext {name}`](verl-ext-{name}.md): {COMMANDS[name][1]}" for name in COMMANDS),
    ]
    return {name: "\n".join(lines).rstrip() + "\n" for name, lines in made.items()}


def _node_pages() -> Iterator[tuple[str, Iterator[str]]]:
    """The name and the lines of the page of each node."""
    yield "data", _data_page()
    nodes: dict[str, list[tuple[str, type[Options]]]] = {}
    for title, cls in _nodes().items():
        nodes.setdefault(cls.prefix.partition(".")[0], []).append((title, cls))
    for node, tables in nodes.items():
        yield node, _page(f"`{node}`", tables)


def _data_page() -> Iterator[str]:
    families = dataset_families()
    yield from _page("`data`", [("Whatever the dataset", DataOptions)])
    for choice, family in families.items():
        yield from ("", f"## `data={choice}`: `{family.__name__}`", "")
        yield f"`data.train_dir` names {family.Options.reads}."
        yield from _options(family.Options, options_of(DataOptions))


def _page(title: str, tables: Collection[tuple[str, type[Options]]]) -> Iterator[str]:
    yield f"# {title}"
    for name, cls in tables:
        if name != title:
            yield from ("", f"## {name}")
        yield from _options(cls, level=2 + (name != title))


def _command_page(name: str) -> Iterator[str]:
    yield from (f"# verl-ext {name}", "", "```", *_help(name), "```")
    tables = _options_of_command(name)
    for command, cls in tables.items():
        of_all = options_of(tables[name]) if command != name and name in tables else {}
        if command != name:
            yield from ("", f"## `verl-ext {command}`" + ", beside those of all tasks" * bool(of_all))
        yield from _options(cls, of_all, 2 + (command != name))


def _help(name: str) -> Iterator[str]:
    """What --help prints before the options, or all of it for a command that has none."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, patch.dict("os.environ", COLUMNS="100"):
        main([name, "--help"])
    text = printed.getvalue()
    yield from (text.partition("\n  ")[0] if _options_of_command(name) else text).rstrip().splitlines()


def _nodes() -> dict[str, type[Options]]:
    """The options of the trainer's nodes, whatever the dataset, by their titles."""
    titles: dict[str, type[Options]] = {
        "`model`, beside verl's": ModelNode,
        "`loss`": LossOptions,
        "`loss` of preferences": PreferenceOptions,
        "`reference`": ReferenceOptions,
        "`attention`": AttentionOptions,
        "`parallel`": ParallelOptions,
        "`optim`, beside verl's": OptimOptions,
        "`trainer`": TrainerOptions,
        "`checkpoint`, beside verl's": BestOptions,
        "`eval`": AnswerOptions,
        "`ray`, for `verl_ext.fsdp_sft_trainer_ray`": RayOptions,
    }
    for name, kind in model_kinds().items():
        titles |= {f"`{own.prefix}` of `model={name}`": own for own in kind.config_options}
    return titles


def _options_of_command(name: str) -> dict[str, type[Options]]:
    """The options of a command and of its subcommands, by their names."""
    module = COMMANDS[name][0]
    content = vars(import_module(module))
    held = [value for value in content.values() if isinstance(value, type)]
    homes = (module, f"{module.rpartition('.')[0]}.options")
    own = [value for value in held if issubclass(value, Options) and value.__module__ in homes]
    tables = {name: own[-1]} if own else {}  # nodes stand first; a command without options passes its words on
    for kind, of in content.get("SUBCOMMANDS", {}).items():
        if issubclass(cls := getattr(of, "options", of), Options):
            tables[f"{name} {kind}"] = cls
    return tables


def _options(cls: type[Options], without: Collection[str] = (), level: int = 3) -> Iterator[str]:
    """The options of a class, each with a heading to link to."""
    for key, field in _fields(cls, f"{cls.prefix}." if cls.prefix else "", without):
        row = key_of(key, field)
        values = " ".join(f"`{choice}`" for choice in field.choices) or row.values
        default = row.default if row.default == "required" else f"`{row.default}`"
        meaning = re.sub(r"([<*])", r"\\\1", row.meaning)
        yield from ("", f"{'#' * level} `{key}`", "", f"{meaning[:1].upper()}{meaning[1:]}.", "")
        yield f"{values} · default: {default} · example: `{_example(cls, key, field)}`"


def _example(cls: type[Options], key: str, field: Option) -> str:
    """An override that gives an option another value than its default, where its type says one."""
    names = [cls.__name__, *key.split(".")]
    ends = (".".join(names[start:]) for start in range(len(names)))
    found = next((EXAMPLES[end] for end in ends if end in EXAMPLES), None)
    if found is None and field.choices:
        found = next((choice for choice in field.choices if choice != spell(field.default)), field.choices[0])
    elif found is None and (said := re.search(r"e\.g\. ([\w.]+)", field.meaning)):
        found = said[1]
    elif found is None and field.type is bool:
        found = spell(not field.default)
    elif found is None and field.type in (int, float):
        found = spell(_other_number(field))
    if found is None:
        raise ValueError(f"docs/option_examples.yaml needs an example of {key}")
    return f"{key}={found}"


def _other_number(field: Option) -> float:
    """A number that the bounds of an option allow."""
    if not field.default:
        least = field.least or 0
        return max(least, 1) if field.most is None else field.most / 2 if field.type is float else max(int(least), 1)
    other = field.default * 2
    return other if field.most is None or other <= field.most else field.default / 2


def _fields(cls: type[Options], prefix: str, without: Collection[str] = ()) -> Iterator[tuple[str, Option]]:
    """The options with their dotted keys, those of nodes below too."""
    for name, field in options_of(cls).items():
        if name in without:
            continue
        if field.is_node:
            yield from _fields(field.type, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def table() -> str:
    """The text of the table of keys: a key a line."""
    commands = {key_table.TRAINER: list(_keys_of_trainer())}
    for name in COMMANDS:
        for command, cls in _options_of_command(name).items():
            own = [key_of(*each) for each in _fields(cls, f"{cls.prefix}." if cls.prefix else "")]
            commands[command] = [*own, *commands.get(command, [])]
    known = sorted(schema.known_keys())
    groups = {name: sorted({*schema.options(name)}) if name != "recipe" else [] for name in schema.groups()}
    rows = (f'"{name}": [\n' + ",\n".join(map(_line, of)) + "\n]" for name, of in commands.items())
    parts = {
        "verl": version("verl"),
        "names": list(COMMANDS),
        "groups": groups,
        "free": sorted(schema.free_form()),
        "known": known,
    }
    head = (f'"{name}": {_line(value)}' for name, value in parts.items())
    return "{\n" + ",\n".join([*head, '"commands": {\n' + ",\n".join(rows) + "\n}"]) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _keys_of_trainer() -> Iterator[key_table.KeyRow]:
    """The keys of a run: the groups, our options by node, and the keys of verl."""
    schema.register()
    with initialize_config_module(schema.CONF, version_base=None):
        chosen = hydra_compose(PRIMARY, return_hydra_config=True).hydra.runtime.choices
    for group in schema.groups():
        own = sorted({*schema.options(group)})
        values = " | ".join(own * (group != "recipe"))
        yield key_table.KeyRow(group, spell(chosen.get(group)), values, MEANINGS[group])
    rows = [key_of(*each) for each in _fields(DataOptions, "data.")]
    rows += [key_of(*each) for each in _fields(dataset_families()["packed"].Options, "data.")]
    rows += [key_of(*each) for title, cls in _nodes().items() for each in _fields(cls, f"{cls.prefix}.")]
    for choice, family in dataset_families().items():
        theirs = (key_of(*each, f"data={choice}") for each in _fields(family.Options, "data."))
        rows += [row for row in theirs if row[:4] not in [other[:4] for other in rows]]
    seen: dict[str, key_table.KeyRow] = {}
    for row in rows:
        if row.of or row.key not in seen:  # the nodes of a loss and of a loss of preferences share keys
            yield row._replace(default="required") if row.key in NEEDED else row
        seen[row.key] = row
    left = [key for key in sorted(schema.known_keys() - seen.keys()) if "_target_" not in key]
    nodes = {key.rpartition(".")[0] for key in schema.known_keys()}
    composed, said = compose([]), _comments_of_verl()
    for key in left:
        if key in nodes or key in with_fact("fixed") or is_name_of_verl(key) or key.startswith("model.mtp."):
            continue
        field = _field_of_verl(composed, key)
        if field is not None and dataclasses.is_dataclass(field.type):
            continue
        default = OmegaConf.select(composed, key, default=None if field is None else field.default)
        default = OmegaConf.to_container(default) if OmegaConf.is_config(default) else default
        kind = key_of(key, field).values if field is not None else ""
        shown = "required" if key in NEEDED else spell(default)
        yield key_table.KeyRow(key, shown, kind, MEANINGS.get(key) or said.get(key, "verl's"))


def _field_of_verl(composed: Any, key: str) -> Option | None:
    """The field of verl's dataclass that a key is."""
    node, _, name = key.rpartition(".")
    target = OmegaConf.select(composed, f"{node}._target_")
    cls = get_class(target) if target else None
    return options_of(cls).get(name) if cls is not None and dataclasses.is_dataclass(cls) else None


def _comments_of_verl() -> dict[str, str]:
    """What verl's files say above a key, by the dotted keys: the first sentence."""
    said = {}
    for name, node in (("model/hf_model", "model."), ("profiler/profiler", "profiler."), ("sft_trainer_engine", "")):
        said |= _comments(name, node)
    for name in ("optim", "engine"):
        said |= _comments(f"{name}/fsdp", f"{name}.")
    return said


def _comments(name: str, prefix: str) -> dict[str, str]:
    text = files("verl.trainer.config").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    lines, said = text.splitlines(), {}
    above: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        if not (found := re.match(r"(\s*)([A-Za-z_]\w*):", line)):
            continue
        above = [*(each for each in above if each[0] < len(found[1])), (len(found[1]), found[2])]
        comment: list[str] = []
        while number and lines[number - 1].strip().startswith("#"):
            number -= 1
            comment.insert(0, lines[number].strip("# "))
        if comment:
            first = re.split(r"(?<=\w)\.(?=\s|$)| Examples?\b| Note that\b", " ".join(comment))[0]
            said[prefix + ".".join(name for _, name in above)] = first
    return said


if __name__ == "__main__":
    key_table.TABLE.write_text(table(), encoding="utf-8")
    for name, text in pages().items():
        (REFERENCE / name).parent.mkdir(exist_ok=True)
        (REFERENCE / name).write_text(text, encoding="utf-8")

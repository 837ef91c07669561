"""Writes docs/configuration.md from the options dataclasses: python docs/make_configuration.py"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from verl_ext.__main__ import COMMANDS
from verl_ext.answers import AnswerOptions
from verl_ext.attention import AttentionOptions
from verl_ext.config.best import BestOptions
from verl_ext.config.run import RayOptions, TrainerOptions
from verl_ext.config.schema import dataset_families, model_kinds
from verl_ext.config.weights import ModelNode
from verl_ext.data.options import DataOptions
from verl_ext.engines.schedule import OptimOptions
from verl_ext.losses import LossOptions, PreferenceOptions, ReferenceOptions
from verl_ext.options import Option, Options, options_of, spell
from verl_ext.parallel.shards import ParallelOptions

PAGE = Path(__file__).parent / "configuration.md"


def page() -> str:
    """The text of docs/configuration.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield from (
        "# Configuration",
        "",
        "Made from the options dataclasses by `python docs/make_configuration.py`; a test compares it with them. The",
        "nodes `model`, `engine`, `optim`, `checkpoint` and `profiler` are verl's; `--cfg job` prints every key.",
        "",
        "## Training: `python -m verl_ext.fsdp_sft_trainer`",
        "",
        "### `data`, whatever the dataset",
        "",
    )
    yield from _table(DataOptions)
    for choice, family in dataset_families().items():
        yield from (
            "",
            f"### `data={choice}`: `{family.__name__}`",
            "",
            f"`data.train_dir` names {family.Options.reads}.",
            "",
        )
        yield from _table(family.Options)
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
    for title, cls in titles.items():
        yield from ("", f"### {title}", "")
        yield from _table(cls)
    for name, (module, _) in COMMANDS.items():
        content = vars(import_module(module))
        held = [value for value in content.values() if isinstance(value, type)]
        homes = (module, f"{module.rpartition('.')[0]}.options")
        own = [value for value in held if issubclass(value, Options) and value.__module__ in homes]
        tables = {name: own[-1]} if own else {}  # nodes stand first; a command without options passes its words on
        for kind, of in content.get("SUBCOMMANDS", {}).items():
            tables[f"{name} {kind}"] = of.options
        for command, cls in tables.items():
            yield from ("", f"## `verl-ext {command}`", "")
            yield from _table(cls)


def _table(cls: type[Options]) -> Iterator[str]:
    yield "| key | default | values | meaning |"
    yield "|---|---|---|---|"
    yield from _rows(cls, f"{cls.prefix}." if cls.prefix else "")


def _rows(cls: type[Options], prefix: str) -> Iterator[str]:
    for name, field in options_of(cls).items():
        if isinstance(field.type, type) and issubclass(field.type, Options):
            yield from _rows(field.type, f"{prefix}{name}.")
            continue
        default = "required" if field.required and field.default in (None, "") else f"`{spell(field.default)}`"
        cells = (f"`{prefix}{name}`", default, _values(field), field.meaning)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _values(field: Option) -> str:
    if field.choices:
        return ", ".join(f"`{choice}`" for choice in field.choices)
    bounds = {"≥": field.least, ">": field.above, "≤": field.most}
    kind: Any = getattr(field.type, "__name__", "any") if field.type is not Any else "any"
    limits = " ".join(f"{sign} {spell(bound)}" for sign, bound in bounds.items() if bound is not None)
    return " ".join(filter(None, [kind, limits, "or null" if field.nullable and kind != "any" else ""]))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

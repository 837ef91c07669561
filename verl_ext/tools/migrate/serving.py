"""Configurations that train nothing: models to serve, adapters to merge.

llamafactory-cli chat|api|webchat|export FILE · swift infer|deploy|app|export … · axolotl inference|merge-lora FILE

    a model, perhaps with adapters    vllm serve MODEL --enable-lora --lora-modules mine=ADAPTER     or SGLang
    adapters and a folder to write    verl-ext export checkpoint=ADAPTER base=MODEL output_dir=DIR
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.options import UsageError, must, spell
from verl_ext.tools.migrate.line import Moved, is_on, listed, mapping, shell_word
from verl_ext.tools.migrate.tables import reason, values_of

_QUANTIZES = ("export_quantization_bit", "quant_method")
_COMPRESSES = "docs/guides/serving.md has the lines of llm-compressor, which quantizes a merged folder"
_RANKS = (32, 64, 128, 256, 320, 512)  # that vLLM's --max-lora-rank takes, above its default of 16


def read_llamafactory_model(moved: Moved) -> None:
    """Translate a YAML that `chat` or `api` serve, or `export` writes."""
    moved.take("llamafactory_served")
    peft = mapping("peft_config", moved.get("peft_config"))
    own = {"adapter_name_or_path": "adapters", "export_dir": "folder", "export_size": "shard_gb"}
    moved.words |= {ours: peft[theirs] for theirs, ours in own.items() if is_on(peft.get(theirs))}
    (_merge if "folder" in moved.words else _serve)(moved)


def read_swift_model(moved: Moved, writes: bool = False) -> None:
    """Translate the flags of `swift infer`, `deploy` and `app`, or of `export`."""
    if (task := str(moved.values.get("task_type", "causal_lm"))) != "causal_lm":
        raise UsageError(must("task_type", f"be causal_lm: {reason('classifies')}", task))
    if moved.is_on("to_cached_dataset"):
        raise UsageError("to_cached_dataset must stand before the training of its tokens: `verl-ext train` makes them")
    moved.take("swift_served")
    if writes and moved.is_on("push_to_hub"):
        place = moved.words.get("folder") or next(iter(listed(moved.words.get("adapters"))), moved.words.get("model"))
        moved.become(
            f"hf upload {shell_word(str(moved.get('hub_model_id')))} {shell_word(str(place))}", "it is uploaded"
        )
    elif writes:
        _merge(moved)
    else:
        _serve(moved)


def read_axolotl_model(moved: Moved, writes: bool = False) -> None:
    """Translate a YAML that `axolotl inference` or `axolotl merge-lora` read."""
    moved.take("axolotl_served")
    place = str(moved.get("output_dir"))
    moved.words.setdefault("adapters", place)
    if writes:
        moved.words["folder"] = f"{place.rstrip('/')}/merged"
    (_merge if writes else _serve)(moved)


def _base_of(moved: Moved, adapters: list[str]) -> tuple[str, int | None]:
    """Return the model, given or the adapters' own, and their rank if known."""
    found = [moved.file(str(Path(each) / "adapter_config.json")) for each in adapters]
    configs: list[Mapping[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in found if path]
    named = next((each["base_model_name_or_path"] for each in configs if each.get("base_model_name_or_path")), "BASE")
    ranks = [int(each.get("r") or 0) for each in configs]
    return str(moved.words.get("model") or named), max(ranks) if ranks and len(ranks) == len(adapters) else None


def _serve(moved: Moved) -> None:
    """Print the line of a server, with its adapters by name."""
    words, given = moved.words, [str(each) for each in listed(moved.words.get("adapters"))]
    backend = int(str(words.get("backend", "vllm")).lower() == "sglang")
    modules = [
        each if "=" in each else f"{'mine' if number == 1 else f'mine{number}'}={each}"
        for number, each in enumerate(given, 1)
    ]
    model, rank = _base_of(moved, [each.partition("=")[2] for each in modules])
    if model == "BASE" and not given:
        raise UsageError("model must be given to be served; the command names none")
    start = ("vllm serve", "python -m sglang.launch_server --model-path")[backend]
    line = [start, shell_word(model)]
    if modules:
        line += ["--enable-lora", ("--lora-modules", "--lora-paths")[backend], *map(shell_word, modules)]
    if rank and rank > 16 and not backend:
        line += ["--max-lora-rank", str(next((size for size in _RANKS if size >= rank), rank))]
    elif modules and rank is None and not backend:
        moved.differ("vLLM refuses adapters of a rank above 16 without --max-lora-rank")
    for name, flags in values_of("flags").items():
        if name in words:
            line += [flags[backend], *[shell_word(str(words[name]))] * (name != "trusts")]
    if (template := moved.get("template", "chat_template")) is not None:
        moved.differ(f"template={template}: the chat template of the tokenizer renders chats here")
    if model == "BASE":
        moved.differ("BASE is the base_model_name_or_path of the adapters' adapter_config.json, which is not here")
    if str(words.get("backend", "vllm")).lower() not in ("vllm", "sglang"):
        moved.differ(f"infer_backend={words['backend']}: vLLM serves it; docs/guides/serving.md has SGLang's line")
    moved.become(" ".join(line), "a server; `vllm chat` asks it, as any client of OpenAI's API does")


def _merge(moved: Moved) -> None:
    """Print the line that merges adapters into their model."""
    words, adapters = moved.words, [str(each) for each in listed(moved.words.get("adapters"))]
    for key in _QUANTIZES:
        if moved.is_on(key):
            raise UsageError(must(key, f"be left out: {_COMPRESSES}", moved.get(key)))
    if len(adapters) > 1:
        moved.lack("adapters", "one folder is merged at a time")
    folder = words.get("folder") or (f"{adapters[0].rstrip('/')}-merged" if adapters else None)
    if not adapters:
        if folder is None:
            raise UsageError("adapters must be given to be merged; the command names none")
        name = str(words.get("model"))
        is_hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not Path(name).is_dir()
        copies = f"hf download {name} --local-dir" if is_hub else f"cp -r {shell_word(name)}"
        moved.become(f"{copies} {shell_word(str(folder))}", "the model is whole already")
        return
    options = {"checkpoint": adapters[0], "base": words.get("model"), "output_dir": folder}
    options |= {"shard_gb": words.get("shard_gb"), "trust_remote_code": words.get("trusts")}
    line = [shell_word(f"{name}={spell(value)}") for name, value in options.items() if value is not None]
    moved.become(" ".join(["verl-ext export", *line]), "adapters are merged")

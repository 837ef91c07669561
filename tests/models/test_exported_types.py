"""After no step, an export of every model type is what plain transformers saves of its source."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, logging

from tests.lib.model_types import named
from tests.lib.packed_engine import build_worker
from tests.lib.ranks import only_rank
from tests.lib.small_models import packed_and_plain
from verl_ext.checkpoint.identity import model_shape
from verl_ext.checkpoint.layout import EXPORT, Manifest, files_of_rank
from verl_ext.checkpoint.save import Snapshot
from verl_ext.commands.export import main
from verl_ext.engines.router import has_router_loss
from verl_ext.layers.towers import auto_class, model_class

pytestmark = pytest.mark.slow

KINDS = named("Trained")
RANK = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
# Values of `model.override_config` that only training reads, where a config has the key.
ONLY_IN_TRAINING = {"output_router_logits": True, "router_aux_loss_coef": 0.7, "attention_dropout": 0.3}
# Files that transformers does not write, but a source may have.
FILES = {"merges.txt": "a b", "preprocessor_config.json": '{"size": 3}', "additional_chat_templates/rag.jinja": "rag"}
# Names of tensors that classes ignore: layers that predict several tokens, and constants of old files.
IGNORED = ("mtp.fc.weight", "model.mtp.fc.weight", "model.layers.{}.eh_proj.weight", "gpt_neox.attention.masked_bias")
IGNORED += ("model.language_model.layers.16.eh_proj.weight", "packing_position_embedding.weight", "encoder.version")


def write_source(kind: str, folder: Path, tokenizer: Any) -> None:
    """Save a small model in bf16 with files, tensors and end tokens of its own; every other one has no settings."""
    torch.manual_seed(0)
    model: Any = packed_and_plain(kind)[1].to(torch.bfloat16)
    for tensor in model.buffers():
        if tensor.is_floating_point() and not tensor.any():  # such as the corrections of a router
            tensor.copy_(torch.rand_like(tensor))
    for part in (model.config, model.config.get_text_config()):
        if isinstance(getattr(part, "eos_token_id", None), int):
            part.eos_token_id = [part.eos_token_id, 7]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if KINDS.index(kind) % 2:
        (folder / "generation_config.json").unlink(missing_ok=True)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    if ignored := [*ignored_names(model)]:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {name: torch.rand(3) for name in ignored}, folder / "model.safetensors", {"format": "pt"})


def ignored_names(model: Any) -> Iterator[str]:
    """Yield names that match the patterns which a class ignores."""
    names = [name.format(layer) for name in IGNORED for layer in ((46, 61, 80, 92) if "{}" in name else (0,))]
    for pattern in model._keys_to_ignore_on_load_unexpected or ():
        yield from (name for name in names if re.search(pattern, name))


def saved(folder: Path) -> dict[str, Any]:
    """Return the content of a folder: tensors by name, JSON by file and key, other files as bytes."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.suffix == ".safetensors":
            found |= load_file(path)
        elif path.name == "config.json":
            found |= {f"config.json {key}": value for key, value in json.loads(path.read_text()).items()}
        elif path.is_file() and path.name not in ("model.safetensors.index.json", "README.md", "export.json"):
            found[path.name] = json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = []
    for name in sorted(one.keys() | other.keys()):
        x, y = one.get(name), other.get(name)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            if x.dtype != y.dtype or not torch.equal(x, y):
                found.append(f"{name}: {x.dtype}{[*x.shape]} is {y.dtype}{[*y.shape]}")
        elif type(x) is not type(y) or x != y:
            found.append(f"{name}: {str(x)[:200]} is {str(y)[:200]}")
    return found


def answer(folder: Path) -> Any:
    """Return the tokens that plain transformers generates, or its error."""
    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    try:
        return model.generate(torch.arange(5, 12)[None], max_new_tokens=4, do_sample=False).tolist()
    except Exception as error:  # a class may lack what generate() needs
        return type(error)


def unlike_its_source(kind: str, folder: Path, tokenizer: Any) -> list[str]:
    """Return how the two exports of a model differ from what plain transformers saves."""
    source, checkpoint, plain = folder / "source", folder / "run" / "global_step_0", folder / "plain"
    write_source(kind, source, tokenizer)
    config = AutoConfig.from_pretrained(source)
    text, routers = config.get_text_config(), ("output_router_logits", "router_aux_loss_coef")
    known = {"attention_dropout", *(routers if has_router_loss(model_class(config), text) else ())}
    given = {key: value for key, value in ONLY_IN_TRAINING.items() if key in known and hasattr(text, key)}
    overrides = [f"++model.override_config.{key}={value}" for key, value in given.items()]
    overrides += ["checkpoint.save_contents=[model,hf_model]", "model.enable_gradient_checkpointing=false"]
    engine = build_worker(source, overrides=overrides).engine
    checkpoint.mkdir(parents=True)
    Snapshot(engine, checkpoint).write()
    facts = {f"model.config.{key}": value for key, value in model_shape(config).items()}
    Manifest(0, 1, ("model", "hf_model"), facts, {}, files_of_rank(checkpoint, 0)).write(checkpoint)
    assert main([f"checkpoint={checkpoint}", f"output_dir={folder / 'out'}"]) == 0
    auto_class(config).from_pretrained(source).save_pretrained(plain)
    # transformers saves neither a tokenizer nor what its class ignores; it makes settings where a source has none.
    expected = {**saved(source), **saved(plain)}
    if "generation_config.json" not in saved(source):
        expected.pop("generation_config.json", None)
    folders = (checkpoint / EXPORT, folder / "out")
    found = [f"{path.name}: {line}" for path in folders for line in differences(expected, saved(path))]
    return found if answer(folder / "out") == answer(source) else [*found, "other tokens"]


@pytest.mark.parametrize("part", range(4))
def test_it_is_the_sources_own_save(part, tiny_model, tmp_path, monkeypatch):
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, bos_token="<|unk|>")
    with only_rank():
        found = {kind: unlike_its_source(kind, tmp_path / kind, tokenizer) for kind in KINDS[part::4]}
    assert {kind: lines for kind, lines in found.items() if lines} == {}

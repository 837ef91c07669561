"""The requirements of a base in NF4, `model.quantization=nf4`, checked before weights are read."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from packaging.version import Version

from verl_ext.config.architecture import Architecture
from verl_ext.config.quantized import quantization_of
from verl_ext.engines.lora import counted_parts, modules_to_save
from verl_ext.engines.nf4 import BLOCK, quantize
from verl_ext.engines.nf4_reading import targets
from verl_ext.options import first_line, must, spell

if TYPE_CHECKING:
    from verl_ext.config.run import RunConfig


def nf4_problems(config: "RunConfig", model: Architecture) -> Iterator[str]:
    """Yield a line for each requirement that a run, its machine or its model does not meet."""
    options, key = config.model_options, "model.quantization"
    if options.quantization is None:
        if options.quantization_nested:
            yield must("model.quantization_nested", "be false without model.quantization=nf4", True)
        return
    if not options.lora_rank:
        beside = f" and with model.freeze={spell(options.freeze)}" if options.freeze else ""
        yield must(key, f"be null without adapters (model=lora){beside}, because four bits are not trained", "nf4")
    if Version(torch.__version__).release < (2, 12):
        got = f"nf4 with torch {torch.__version__}"
        yield must(key, "be null before torch 2.12, whose FSDP2 takes no integers", got)
    if find_spec("bitsandbytes") is None:
        yield must(key, "be null without bitsandbytes (pip install '.[four_bits]')", "nf4")
    elif config.trainer.device != "cuda" and (problem := _kernel_problem()):
        yield must(key, "be null with a bitsandbytes whose kernels do not run on this CPU", f"nf4 ({problem})")
    if options.experts == "eager":
        yield must("model.experts", "be auto or grouped_mm with model.quantization=nf4", "eager")
    if method := quantization_of(model.hf_config).get("quant_method"):
        why = "whose numbers would be rounded twice: name the model that they were made from, in bf16"
        needed = f"be null for weights that are stored quantized, {why}"
        yield must(key, needed, f"nf4 with quant_method={method}")
    elif model.module is not None and os.path.exists(str(options.lora_adapter_path or ".")):
        yield from _weight_problems(model, modules_to_save(options))


def _kernel_problem() -> str | None:
    try:
        quantize(torch.zeros(1, BLOCK))
    except Exception as error:  # a library that is missing, or of another processor
        return first_line(error)
    return None


def _weight_problems(model: Architecture, whole: list[str]) -> Iterator[str]:
    """Yield a line for weights that have no whole blocks, or that would stay as they are."""
    found = targets(model.module, whole)
    if torn := [target.full_name for target in found if target.weight.shape[-1] % BLOCK]:
        sizes = sorted({target.weight.shape[-1] for target in found if target.weight.shape[-1] % BLOCK})
        needed = f"be null for a {model.name}, whose rows do not divide into blocks of {BLOCK} numbers"
        got = f"nf4 with {counted_parts(torn)} of {', '.join(map(str, sizes))} numbers a row"
        yield must("model.quantization", needed, got)
    known = {id(target.weight) for target in found}
    stacked = [name for name, p in model.module.named_parameters() if p.ndim == 3 and id(p) not in known]
    experts = [name for name in stacked if "expert" in name]
    if experts or not found:
        lacking = counted_parts(experts) if experts else "no linear layer or experts of transformers' interface"
        needed = f"be null for a {model.name}, which it would leave whole"
        yield must("model.quantization", needed, f"nf4 with {lacking}")


def nf4_notice(config: "RunConfig", model: Architecture) -> Iterator[str]:
    """Say which weights lie in NF4, and how many of all."""
    if config.model_options.quantization is None or model.module is None:
        return
    found = targets(model.module, modules_to_save(config.model_options))
    numbers, all_numbers = (sum(p.numel() for p in of) for of in ([t.weight for t in found], model.module.parameters()))
    share = f"{numbers:,} of {all_numbers:,} numbers"
    yield f"{share} lie in NF4: {counted_parts(target.full_name for target in found)}"

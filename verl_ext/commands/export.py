"""The command `verl-ext export`: a checkpoint as a Hugging Face folder."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from verl_ext.checkpoint.layout import EXPORT_MARKER
from verl_ext.commands.command_line import OutputOptions, command
from verl_ext.options import REQUIRED, must, option

_ADAPTER = "adapter_config.json"  # of a folder of PEFT
_FORMS = ("merged", "adapter")
_DTYPES = ("source", "saved", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ExportOptions(OutputOptions):
    """Export a checkpoint as a folder for plain transformers.

    The folder holds sharded safetensors, config and tokenizer; adapters are merged. form=adapter writes the adapters of
    a LoRA run as they are instead, as a folder that PEFT and vLLM load beside the base model. The export runs offline
    and without GPUs, one tensor at a time; to merge a checkpoint of adapters alone, it needs the memory of the base
    model. Meanwhile the disk holds the weights twice. An adapter folder of PEFT, whichever trainer wrote it, is merged
    into its base in memory.
    """

    marker: ClassVar[str] = EXPORT_MARKER

    checkpoint: str = option(
        REQUIRED,
        "a global_step_N folder, a run's folder for its last one, or an adapter folder of PEFT",
        required=True,
    )
    base: str | None = option(
        None,
        "folder of the base model, to merge adapters alone; of an adapter folder also a Hub name; null: that of its "
        "adapter_config.json, if it is there",
    )
    form: str = option(
        "merged", "adapters of a LoRA run: merged into the weights | adapter: a folder of their own", choices=_FORMS
    )
    base_form: str = option(
        "dequantized",
        "weights into which adapters of a base in NF4 are merged; dequantized: the numbers that were trained on; "
        "original: the weights in the base's files, on which the adapters were not trained",
        choices=("dequantized", "original"),
    )
    dtype: str = option(
        "source",
        "data type of merged weights, except those that the model keeps in fp32; source: as in the model that was "
        "trained; saved: as in the checkpoint",
        choices=_DTYPES,
    )
    shard_gb: float = option(5.0, "maximum size of a weight file in gigabytes", above=0)
    trust_remote_code: bool = option(False, "true: run Python code that comes with the model")
    license: str | None = option(None, "license for the header of the model card, such as apache-2.0; null: none")
    push_to: str | None = option(None, "owner/name on the Hugging Face Hub, which also gets the folder")
    private: bool = option(True, "false: push_to makes a public repository, or adds to one")

    def problems(self) -> Iterator[str]:
        """Yield a line for every mistake visible before reading the checkpoint."""
        yield from self.output_problems("the checkpoint, its base", self.checkpoint, self.base)
        is_adapter = self.adapter is not None
        for name in ("checkpoint", *["base"] * (not is_adapter)):
            path = getattr(self, name)
            if path is not None and not Path(path).is_dir():
                yield must(name, "be an existing folder", path)
        if is_adapter:
            if not (self.base or self.adapter):
                yield f"base is required for {self.checkpoint}, whose {_ADAPTER} names no base_model_name_or_path"
            if self.form != "merged":
                yield must("form", f"be merged for {self.checkpoint}, which holds adapters alone", self.form)
            for name in ("license", "push_to"):
                if (value := getattr(self, name)) is not None:
                    yield must(name, "be null for adapters of a run that is not here", value)
        if self.push_to is not None:
            from verl_ext.checkpoint.hub import push_problems  # imports torch

            yield from push_problems(self.push_to)

    @property
    def adapter(self) -> str | None:
        """The base that an adapter folder names; None for other folders."""
        path = Path(self.checkpoint) / _ADAPTER
        if not any(path.parent.glob("adapter_model.*")):  # a checkpoint of adapters has such a config too
            return None
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"] or "")
        except (OSError, ValueError, TypeError, KeyError):
            return "" if path.is_file() else None


def export(options: ExportOptions) -> str:
    """Write the folder; return a line about it, or raise DataError."""
    # These import torch, so only after the checks.
    from verl_ext.checkpoint.export import ExportForm, export_checkpoint

    asked = ExportForm(**{field.name: getattr(options, field.name) for field in fields(ExportForm)})
    if options.adapter is not None:
        from verl_ext.checkpoint.adapter_folder import merge_adapter_folder

        return merge_adapter_folder(asked, options.base or options.adapter)
    told = export_checkpoint(asked)
    if options.push_to is None:
        return told
    from verl_ext.checkpoint.hub import push  # imports huggingface_hub

    print(told, flush=True)
    return f"pushed to {push(Path(options.output_dir), options.push_to, options.private)}"


main = command("export", ExportOptions, export, example="RUN output_dir=DIR [key=value …]", first="checkpoint")

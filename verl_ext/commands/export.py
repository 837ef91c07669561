"""The command `verl-ext export`: a checkpoint as a Hugging Face folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from verl_ext.checkpoint.layout import EXPORT_MARKER
from verl_ext.commands.command_line import OutputOptions, command
from verl_ext.options import REQUIRED, option

_FORMS = ("merged", "adapter")
_DTYPES = ("saved", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ExportOptions(OutputOptions):
    """Export a checkpoint as a folder for plain transformers.

    The folder holds sharded safetensors, config and tokenizer; adapters are merged. form=adapter writes the adapters of
    a LoRA run as they are instead, as a folder that PEFT and vLLM load beside the base model. The export runs offline
    and without GPUs, one tensor at a time; to merge a checkpoint of adapters alone (checkpoint.save_lora_only), it
    needs the memory of the base model. Meanwhile the disk holds the weights twice.
    """

    marker: ClassVar[str] = EXPORT_MARKER

    checkpoint: str = option(REQUIRED, "a global_step_N folder, or a run's folder for its last one", required=True)
    base: str | None = option(None, "folder of the base model, to merge a checkpoint of adapters alone")
    form: str = option(
        "merged", "adapters of a LoRA run: merged into the weights | adapter: a folder of their own", choices=_FORMS
    )
    dtype: str = option(
        "saved",
        "data type of the weights, but for those that the model keeps in fp32; saved: as in the checkpoint",
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
        for name in ("checkpoint", "base"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_dir():
                yield f"{name} must be an existing folder; got {path}"
        if self.push_to is not None:
            from verl_ext.checkpoint.hub import push_problems  # imports torch

            yield from push_problems(self.push_to)


def export(options: ExportOptions) -> str:
    """Write the folder; return a line about it, or raise DataError."""
    from verl_ext.checkpoint.export import export_checkpoint  # imports torch, so only after the checks

    told = export_checkpoint(
        options.checkpoint,
        options.output_dir,
        options.overwrite,
        options.base,
        options.dtype,
        options.shard_gb,
        options.form,
        options.trust_remote_code,
        options.license,
    )
    if options.push_to is None:
        return told
    from verl_ext.checkpoint.hub import push  # imports huggingface_hub

    print(told, flush=True)
    return f"pushed to {push(Path(options.output_dir), options.push_to, options.private)}"


main = command("export", ExportOptions, export, example="checkpoint=RUN/global_step_100 output_dir=DIR")

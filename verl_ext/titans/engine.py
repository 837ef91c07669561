"""The engine of single-document rows that a memory reads by chunks.

```
rows            q q q q | q q a P | P P P P      input_ids [B, L], every row equally long
attention_mask  1 1 1 1 | 1 1 1 0 |              chunks that are padding on every rank are left out
is_target       0 0 0 0 | 0 1 0 0 |              positions that predict a target: the head sees these alone
```

Every rank runs equally many chunks, and so equally many collectives. The engine has the vendor ``verl_ext_chunked``.

Legend: B rows of a micro-batch, L tokens of a row, T ≤ L of them that are read, N positions of targets, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry

from verl_ext.engines.step import StepEngine, wants_token_stats
from verl_ext.losses import nll_and_stats
from verl_ext.titans.checkpoint import load_memory_checkpoint
from verl_ext.trainer.batch import rows, target_slots


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp2"], device=["cpu", "cuda"], vendor="verl_ext_chunked"
)
class ChunkedEngine(StepEngine):
    """The engine that runs micro-batches of rows through a ``QwenTitansForCausalLM`` (`model=qwen_titans`)."""

    tells_greedy: ClassVar[bool] = True

    model_config: Any
    module: Any

    @classmethod
    def idle_tokens(cls, max_tokens: int) -> int:
        """Return the tokens of a whole row: every chunk has collectives."""
        return max_tokens

    def _build_module(self) -> torch.nn.Module:
        """Build verl's module with the memory of `model.memory_checkpoint`; `model.train=memory` freezes the rest."""
        module: Any = super()._build_module()
        module.agree_passes = _most_of_all_ranks
        if self.model_config.memory_checkpoint:
            load_memory_checkpoint(module, self.model_config.memory_checkpoint)
        if self.model_config.train == "memory":
            module.freeze_base()
        return module

    def _build_fsdp_module(self, module: Any) -> Any:
        """Wrap as verl's FSDP2 does, but cast no input of memories."""
        precision = self.engine_config.mixed_precision
        assert precision is not None, "the config is resolved before the engine is built"
        self._autocast_dtype = PrecisionType.to_dtype(precision["param_dtype"])
        reduce_dtype = PrecisionType.to_dtype(precision["reduce_dtype"])
        dtypes = {"param_dtype": self._autocast_dtype, "reduce_dtype": reduce_dtype}
        options = {
            "mesh": self.device_mesh,
            "offload_policy": self._offload_policy(),
            "reshard_after_forward": self.engine_config.reshard_after_forward,
        }
        self._cast_frozen(module)
        full_state = module.state_dict()
        for memory in module.memory.values():
            fully_shard(memory, mp_policy=MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False), **options)
        mp_policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=True)
        apply_fsdp2(module, {**options, "mp_policy": mp_policy}, self.engine_config)
        fsdp2_load_full_state_dict(module, full_state, self.device_mesh, options["offload_policy"])
        return module

    def _offload_policy(self) -> CPUOffloadPolicy | None:
        """Return FSDP2's own offload, in place of verl's, if asked for."""
        if not self.engine_config.offload_policy:
            return None
        self._is_offload_param = self._is_offload_optimizer = False
        self._uses_fsdp2_cpu_offload_policy = True
        return CPUOffloadPolicy(pin_memory=True)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        """Return the rows ``[B, T]``, target positions, and their labels ``[N]``."""
        ids = rows(micro_batch["input_ids"])
        is_target = target_slots(micro_batch) >= 0
        if not is_target.any():
            is_target[0, 0] = True  # every rank must run the head, which has collectives
        labels = ids.roll(-1, dims=1)[is_target]
        mask = first_documents(rows(micro_batch["position_ids"]))
        read = self._read_tokens(mask)
        inputs = {"input_ids": ids[:, :read], "attention_mask": mask[:, :read], "logits_to_keep": is_target[:, :read]}
        return inputs, {"is_target": is_target.flatten(), "labels": labels}

    def _read_tokens(self, mask: torch.Tensor) -> int:
        """Return T, all ranks' longest row rounded up to chunks.

        The host waits for the device once a micro-batch, which is many chunks of work.
        """
        longest = mask.sum(1).max().to(get_device_id())
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        chunk = self.model_config.hf_config.chunk_size
        return min(-(-int(longest) // chunk) * chunk, mask.shape[1])

    def prepare_model_outputs(
        self, output: Any, output_args: dict, micro_batch: TensorDict, logits_processor_func: Callable | None
    ) -> dict[str, torch.Tensor]:
        """Return next tokens' ``log_probs``, and ``is_greedy``, whether those are the most likely ones.

        They are jagged as ``input_ids``, and so is ``entropy`` if the batch asks for token statistics; log_probs are 0
        if the next token is not a target.
        """
        is_target, labels = output_args["is_target"], output_args["labels"]
        is_greedy = output.logits.argmax(-1) == labels  # before the loss, whose backward reuses the logits' memory
        with_stats = wants_token_stats(micro_batch)
        nll, *stats = nll_and_stats(output.logits, labels, inplace_backward=True, with_stats=with_stats)
        log_probs = nll.new_zeros(len(is_target)).masked_scatter(is_target, -nll)
        offsets = micro_batch["input_ids"].offsets()
        outputs = {"log_probs": log_probs, "is_greedy": is_target.masked_scatter(is_target, is_greedy)}
        if with_stats:
            outputs["entropy"] = nll.new_zeros(len(is_target)).masked_scatter(is_target, stats[1])
        return {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in outputs.items()}

    def memory_state_dict(self) -> dict[str, torch.Tensor]:
        """Gather the memory's parameters in rank 0's host memory; collective."""
        return {name: self.gather_to_rank0(tensor) for name, tensor in self.module.memory_state_dict().items()}


def _most_of_all_ranks(passes: int) -> int:
    """Return the largest number of passes of any rank."""
    most = torch.tensor(passes, device=get_device_id())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def first_documents(position_ids: torch.Tensor) -> torch.Tensor:
    """Return int64``[B, L]``, 1 on a row's first document, 0 on padding."""
    return ((position_ids == 0).cumsum(1) == 1).long()

"""Whether an architecture's experts can be shared among ranks (`parallel.expert_parallel`)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ext.config.architecture import Architecture
from verl_ext.engines.muon import MuonAdamW
from verl_ext.engines.optimizer import own_optimizer
from verl_ext.engines.sharding import cut_dim
from verl_ext.layers.experts import has_experts
from verl_ext.options import must
from verl_ext.parallel.experts import KEY as EP
from verl_ext.parallel.experts import expert_layers, own_code_layers

if TYPE_CHECKING:
    from verl_ext.config.run import RunConfig


def shared_experts_problems(config: "RunConfig", model: Architecture) -> Iterator[str]:
    """Yield a line for each reason against sharing this architecture's experts among ranks."""
    ranks = config.parallel.expert_parallel
    size, world_size = config.engine.fsdp_size, config.machine.world_size
    of_shards = size if 0 < size < world_size else world_size
    layers = [] if model.module is None else [*expert_layers(model.module)]
    of_own_code = ", ".join(own_code_layers(model.module)) if model.module is not None else "remote code"
    if not layers or of_own_code:
        why = "whose experts transformers cannot let others compute"
        why = f"{why} ({of_own_code})" if of_own_code else why if has_experts(model.module) else "which has no experts"
        yield must(EP, f"be 1 for a {model.name}, {why}", ranks)
        return
    if of_shards % ranks:
        return  # batch_problem says so
    if undivided := [layer.num_experts for layer in layers if layer.num_experts % ranks]:
        yield must(EP, f"divide the {undivided[0]} experts of a layer of a {model.name}", ranks)
        return
    if config.model_options.use_liger:
        yield must("model.use_liger", f"be false with {EP}={ranks}, because liger replaces experts", True)
    # Ranks with the same experts, fewer than they are, cut each of them.
    shards = of_shards // ranks
    cut = [weight for layer in layers if cut_dim(layer.num_experts // ranks, shards) for weight in layer.parameters()]
    if uneven := [weight.shape[1] for weight in cut if weight.shape[1] % shards]:
        needed = f"leave a number of ranks with the same experts that divides these or their {uneven[0]} rows"
        yield must(EP, needed, f"{ranks} of {of_shards} ranks")
    elif cut and own_optimizer(config.optim) is MuonAdamW:
        shared = f"{layers[0].num_experts // ranks} experts ({EP}={ranks} of {of_shards} ranks)"
        needed = f"not be Muon, which needs whole experts, where {shards} ranks share {shared}"
        yield must("optim.optimizer", needed, "Muon")

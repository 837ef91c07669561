"""New adapters by their options: steps equal PEFT's own model, resumes are exact, what cannot be is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import distribute_tensor
from transformers import MixtralConfig

from tests.ranks import run_ranks
from tests.reference import Reference, documents_of_answers, load_eager, pack_row
from tests.tiny_model import write_tiny_model
from tests.training import differences, into, refusals, small_run, stopped_at, train_each
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.trainer.batch import StepCollator

pytestmark = pytest.mark.slow

DOCUMENTS = documents_of_answers(19, 5, 12, 7, 8, 3)
PACKS = [DOCUMENTS[at : at + 2] for at in (0, 2, 4)]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "tied": {"tie_word_embeddings": True},
    "mixtral": {"config_class": MixtralConfig, "num_local_experts": 4},
}
NAMED = ["q_proj", "down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # the model and the options, which are PEFT's too
    "rslora": ("qwen3", {"use_rslora": True}),
    "dora": ("qwen3", {"use_dora": True, "use_rslora": True, "target_modules": [*NAMED, "lm_head"]}),
    "layer": ("qwen3", {"layers_to_transform": [1], "layers_pattern": ["layers"]}),
    "whole": ("qwen3", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "whole of tied": ("tied", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "gate_up_proj"]}),
}
LAYOUTS = {"one rank": (1, 1), "two ranks": (2, 1), "two ranks of a pack": (2, 2)}


def as_override(name: str, value: Any) -> str:
    given = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value).lower()
    return f"model.{name}={given}"


def options(**given: Any) -> dict[str, Any]:
    return {"target_modules": NAMED, "lora_alpha": 8, **given}


def value(parameter: torch.Tensor) -> torch.Tensor:
    """Return a whole value for an adapter's factor; at B's initial 0, A would have no gradient."""
    return 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))


def is_factor(name: str) -> bool:
    return "lora_A" in name or "lora_B" in name


def steps(kinds: dict[str, str], sequence_parallel: int):
    """Return a step of each kind of adapters around a folder's model."""
    from tests.packed_engine import build_worker, train_step

    found = {}
    for kind, folder in kinds.items():
        overrides = ["model.lora_rank=4", *(as_override(*each) for each in options(**KINDS[kind][1]).items())]
        engine = build_worker(folder, sequence_parallel, overrides).engine
        for name, parameter in engine.module.named_parameters():
            if is_factor(name):
                parameter.data.copy_(distribute_tensor(value(parameter), parameter.device_mesh, parameter.placements))
        collate = StepCollator(LossSpec("token", np.ones(1)), CategoryTable((), ()))
        packs = [pack_row(pack) for pack in PACKS]
        ranks = engine.get_data_parallel_size()
        found[kind] = engine.cheapest_head, train_step(engine, packs, collate, -(-len(packs) // ranks), "fused")
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write_tiny_model(tmp_path_factory.mktemp(name), **config) for name, config in MODELS.items()}


@pytest.fixture(scope="module")
def found(folders):
    """Return rank 0's steps by layout and kind; the ranks of a layout start once."""
    kinds = {kind: str(folders[model]) for kind, (model, _) in KINDS.items()}
    return {name: run_ranks(steps, ranks, kinds, of_pack)[0] for name, (ranks, of_pack) in LAYOUTS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_that_of_pefts_own_model(kind, layout, folders, found):
    model, given = KINDS[kind]
    peft = get_peft_model(load_eager(str(folders[model])), LoraConfig(r=4, **options(**given))).eval()
    for name, parameter in peft.named_parameters():
        if is_factor(name):
            parameter.data.copy_(value(parameter))
    expected = Reference(peft, DOCUMENTS).step(PACKS, "token", {})
    head, step = found[layout][kind]
    assert head == ("targets" if kind == "dora" else "fused")
    assert step.report["train/loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert step.gradients.keys() == expected.gradients.keys()
    assert max(expected.gradient_errors(step.gradients).values()) < 1e-5


def test_a_run_and_its_resume_on_two_ranks_are_equal_in_every_bit_and_other_adapters_are_refused(folders, tmp_path):
    more = ("model.use_dora=true", "model.lora_dropout=0.3", "model.modules_to_save=[embed_tokens,lm_head]")
    more = ("model.lora_rank=4", *more, "trainer.total_training_steps=3", "trainer.save_freq=1")
    run = small_run(tmp_path, folders["qwen3"], [30] * 8, *more)
    alone = "checkpoint.save_lora_only=true"
    wholes = {name: tmp_path / f"whole {name}" for name in ("all", "alone")}
    run_ranks(train_each, 2, [[*run, into_quoted(wholes["all"])], [*run, alone, into_quoted(wholes["alone"])]])
    resumes = {name: stopped_at(whole, tmp_path / f"resumed {name}", 1) for name, whole in wholes.items()}
    run_ranks(train_each, 2, [[*run, into_quoted(resumes["all"])], [*run, alone, into_quoted(resumes["alone"])]])
    for name, whole in wholes.items():
        assert differences(resumes[name], whole, 3) == []
    changes = [["model.use_dora=false"], ["model.lora_dropout=0"], ["model.modules_to_save=[]"]]
    resumed = stopped_at(wholes["all"], tmp_path / "again", 1)
    for told, (change,) in zip(run_ranks(refusals, 1, [*run, into(resumed)], changes)[0], changes, strict=True):
        key, _, given = change.partition("=")
        assert told.startswith(f"{key} is {given.replace('false', 'False')}, but the run in ")


def into_quoted(folder) -> str:
    return into(f'"{folder}"')


REFUSED = {
    "model.lora_dropout=1": "model.lora_dropout must be below 1; got 1.0",
    "model.layers_pattern=[layers]": "model.layers_pattern needs model.layers_to_transform; got ['layers']",
    "model.layers_to_transform=[1]": "model.target_modules must be a list of names with model.layers_to_transform=[1]; "
    "got all-linear",
    "model.target_modules=[q_proj] model.layers_to_transform=[1,9]": "model.layers_to_transform must name layers of a "
    "Qwen3ForCausalLM with adapters; got 9",
    "model.modules_to_save=[head]": "model.modules_to_save must name embeddings and linear layers of a "
    "Qwen3ForCausalLM; got head (nearest: lm_head)",
    "model.modules_to_save=[norm]": "model.modules_to_save must name embeddings and linear layers of a "
    "Qwen3ForCausalLM; got norm",
    "model.target_parameters=[experts.down_proj]": "model.target_parameters must name parameters of a "
    "Qwen3ForCausalLM; got experts.down_proj (nearest: down_proj)",
    "model.target_parameters=[q_proj.weight] model.use_dora=true": "model.use_dora must be false with "
    "model.target_parameters, whose adapters change weights and not inputs; got true",
    "model.target_parameters=[q_proj.weight] model.lora_dropout=0.1": "model.lora_dropout must be 0.0 with "
    "model.target_parameters, whose adapters change weights and not inputs; got 0.1",
    "model.target_modules=[q_proj] model.target_parameters=[q_proj.weight] model.layers_to_transform=[1]": "model."
    "layers_to_transform must be null with model.target_parameters, whose names can have a layer "
    "(layers.1.mlp.experts.down_proj); got [1]",
    "model.path=MIXTRAL model.use_dora=true": "model.use_dora must be adapters that a MixtralConfig can have; got true "
    "(lora.ParamWrapper does not work with use_dora=True.)",
    "model.lora_adapter_path=ADAPTER model.use_rslora=true": "model.use_rslora must be false with "
    "model.lora_adapter_path=ADAPTER, whose adapter_config.json decides it; got true",
}


def test_what_cannot_be_trained_is_refused_in_one_line_before_weights(folders, tmp_path):
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
    places = {"MIXTRAL": str(folders["mixtral"]), "ADAPTER": str(tmp_path / "adapter")}

    def placed(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    run = [*small_run(tmp_path, folders["qwen3"], [30] * 4), into(tmp_path / "run"), "model.lora_rank=4"]
    (told,) = run_ranks(refusals, 1, run, [placed(change).split() for change in REFUSED])
    assert told == [placed(line) for line in REFUSED.values()]

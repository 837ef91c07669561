"""New adapters by their options: steps equal PEFT's own model, resumes are exact, what cannot be is refused."""

from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import Glm4MoeConfig, MixtralConfig

from tests.lib.errors import names
from tests.lib.packed_engine import build_worker, token_step
from tests.lib.ranks import run_cases
from tests.lib.reference import Reference, documents_of_answers, fill_adapters, load_eager
from tests.lib.tiny_model import write_tiny_model
from tests.lib.training import differences, into, refusals, small_run, stopped_at, train_twice

pytestmark = pytest.mark.slow

DOCUMENTS = documents_of_answers(19, 5, 12, 7, 8, 3)
PACKS = [DOCUMENTS[at : at + 2] for at in (0, 2, 4)]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "tied": {"tie_word_embeddings": True},
    "mixtral": {"config_class": MixtralConfig, "num_local_experts": 4},
    "glm4 moe": {
        **{"config_class": Glm4MoeConfig, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "intermediate_size": 48},
    },
}
NAMED = ["q_proj", "down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # the model and the options, which are PEFT's too
    "rslora": ("qwen3", {"use_rslora": True}),
    "dora": ("qwen3", {"use_dora": True, "use_rslora": True, "target_modules": [*NAMED, "lm_head"]}),
    "layer": ("qwen3", {"layers_to_transform": [1], "layers_pattern": ["layers"]}),
    "whole": ("qwen3", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "whole of tied": ("tied", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "shared experts and dense layers": ("glm4 moe", {"target_modules": ["q_proj", "gate_proj", "down_proj"]}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "gate_up_proj"]}),
}
LAYOUTS = {"one rank": (1, 1), "two ranks": (2, 1), "two ranks of a pack": (2, 2)}


def as_override(name: str, value: Any) -> str:
    given = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value).lower()
    return f"model.{name}={given}"


def options(**given: Any) -> dict[str, Any]:
    return {"target_modules": NAMED, "lora_alpha": 8, **given}


def steps(kinds: dict[str, str], sequence_parallel: int):
    """Return a step of each kind of adapters around a folder's model."""
    found = {}
    for kind, folder in kinds.items():
        overrides = ["model.lora_rank=4", *(as_override(*each) for each in options(**KINDS[kind][1]).items())]
        engine = build_worker(folder, sequence_parallel, overrides).engine
        fill_adapters(engine.module)
        found[kind] = engine.cheapest_head, token_step(engine, PACKS)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write_tiny_model(tmp_path_factory.mktemp(name), **config) for name, config in MODELS.items()}


RESUMED = {"all": (), "alone": ("checkpoint.save_lora_only=true",)}  # what checkpoints hold


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):
    """Return the overrides of a run, and its folder."""
    more = ("model.use_dora=true", "model.lora_dropout=0.3", "model.modules_to_save=[embed_tokens,lm_head]")
    more = ("model.lora_rank=4", *more, "trainer.total_training_steps=3", "trainer.save_freq=1")
    folder = tmp_path_factory.mktemp("run")
    return small_run(folder, folders["qwen3"], [30] * 8, *more), folder


@pytest.fixture(scope="module")
def found(folders, run):
    """Return each rank's steps, by kind, of a layout; execute a run with each content, and resume it."""
    kinds = {kind: str(folders[model]) for kind, (model, _) in KINDS.items()}
    cases = {name: (ranks, steps, kinds, of_pack) for name, (ranks, of_pack) in LAYOUTS.items()}
    for name, more in RESUMED.items():
        cases[name] = (2, train_twice, [*run[0], *more], run[1] / name, run[1] / f"resumed {name}")
    return run_cases(cases)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_that_of_pefts_own_model(kind, layout, folders, found):
    model, given = KINDS[kind]
    plain = load_eager(str(folders[model]))
    plain.config.model_type = "plain"  # of which PEFT reads names as they are written
    peft = get_peft_model(plain, LoraConfig(r=4, **options(**given))).eval()
    fill_adapters(peft)
    expected = Reference(peft, DOCUMENTS).step(PACKS, "token", {})
    head, step = found[layout][0][kind]
    assert head == ("targets" if kind == "dora" else "fused")
    expected.assert_taken(step)


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_and_its_resume_on_two_ranks_are_equal_in_every_bit(name, run, found):
    assert differences(run[1] / f"resumed {name}", run[1] / name, 3) == []


def test_a_resume_with_other_adapters_is_refused(run, found):
    changes = [["model.use_dora=false"], ["model.lora_dropout=0"], ["model.modules_to_save=[]"]]
    begun = [*run[0], into(stopped_at(run[1] / "all", run[1] / "begun", 1))]
    for told, (change,) in zip(refusals(begun, changes), changes, strict=True):
        key, _, given = change.partition("=")
        assert names(told, f"{key} is {given.replace('false', 'False')}")


REFUSED = {
    "model.lora_dropout=1": ("model.lora_dropout", 1, "1.0"),
    "model.layers_pattern=[layers]": ("model.layers_pattern", "model.layers_to_transform", "['layers']"),
    "model.layers_to_transform=[1]": ("model.target_modules", "model.layers_to_transform=[1]", "all-linear"),
    "model.target_modules=[q_proj] model.layers_to_transform=[1,9]": ("model.layers_to_transform", 9),
    "model.modules_to_save=[head]": ("model.modules_to_save", "head", "nearest: lm_head"),
    "model.modules_to_save=[norm]": ("model.modules_to_save", "norm"),
    "model.target_parameters=[experts.down_proj]": ("model.target_parameters", "nearest: down_proj"),
    "model.target_parameters=[q_proj.weight] model.use_dora=true": ("model.use_dora", "model.target_parameters", True),
    "model.target_parameters=[q_proj.weight] model.lora_dropout=0.1": ("model.lora_dropout", "0.0", 0.1),
    "model.target_modules=[q_proj] model.target_parameters=[q_proj.weight] model.layers_to_transform=[1]": (
        *("model.layers_to_transform", "model.target_parameters", "layers.1.mlp.experts.down_proj", "[1]"),
    ),
    "model.path=MIXTRAL model.use_dora=true": ("model.use_dora", "MixtralConfig", True, "use_dora=True"),
    "model.lora_adapter_path=ADAPTER model.use_rslora=true": ("model.use_rslora", "model.lora_adapter_path", True),
}


def test_what_cannot_be_trained_is_refused_in_one_line_before_weights(folders, tmp_path):
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
    places = {"MIXTRAL": str(folders["mixtral"]), "ADAPTER": str(tmp_path / "adapter")}

    def placed(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    run = [*small_run(tmp_path, folders["qwen3"], [30] * 4), into(tmp_path / "run"), "model.lora_rank=4"]
    told = refusals(run, [placed(change).split() for change in REFUSED])
    for line, (change, things) in zip(told, REFUSED.items(), strict=True):
        assert "\n" not in line
        assert names(line, *things), (change, line)

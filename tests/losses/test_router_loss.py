"""The router loss of a mixture of experts covers all real tokens of a step, for any packs, ranks and accumulation.

The reference is plain Hugging Face: one forward of all documents, padded, whose ``aux_loss`` transformers computes.
"""

import functools
import itertools
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, MixtralConfig, Qwen2MoeConfig

from tests.lib.checked import checked, support_problems
from tests.lib.errors import names, refused
from tests.lib.packed_engine import build_worker
from tests.lib.parity_cases import CATEGORIES, DOCUMENTS, MAX_TOKENS, packs_of
from tests.lib.ranks import run_cases
from tests.lib.reference import Reference, load_eager, pack_row, tree_row
from tests.lib.small_models import model_class, model_config
from tests.lib.tiny_model import VOCABULARY, write_tiny_model
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import build, into, metrics, refusals, train_alone
from verl_ext.config.compose import compose
from verl_ext.config.model_override import override
from verl_ext.data import CategoryTable
from verl_ext.engines.router import RouterLoss, RoutingSums, router_loss
from verl_ext.layers.trial import shrunk
from verl_ext.losses import LossSpec, category_weight_table
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.loss import StepLoss
from verl_ext.trainer.step_plan import StepPlan

pytestmark = pytest.mark.slow

COEFFICIENT = 0.7
MOE = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
MODELS = {
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        # The second layer has no router.
        {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]},
    ),
}
OF_IMAGES = "qwen3_vl_moe"  # trained on text
CASES = list(itertools.product(("packed", "padded", "labelled", "shared"), (1, 4)))
FEW_CASES = [("packed", 4), ("padded", 4), ("labelled", 1)]  # each packing, each accumulation
_LEAN = ("engine.use_no_sync_for_gradient_accumulation=true", "model.enable_gradient_checkpointing=false")
LAYOUTS = {  # ranks, of which so many are a Ulysses group: cases, overrides
    (1, 1): (CASES, ()),
    (2, 1): (CASES, ("model.activation_offload=true",)),
    (4, 2): (FEW_CASES, ("parallel.context_parallel_size=2", *_LEAN)),
}


@pytest.fixture(scope="module")
def moe_models(tmp_path_factory):
    """Write all models, and return their folders by name."""
    folders = {
        name: write_tiny_model(tmp_path_factory.mktemp("moe"), 0, config_class, **MOE, **fields)
        for name, (config_class, fields) in MODELS.items()
    }
    folders[OF_IMAGES] = write_tiny_model(tmp_path_factory.mktemp("moe"), 0)  # its tokenizer
    config = model_config(OF_IMAGES)
    override(config, {key: MOE[key] for key in ("output_router_logits", "router_aux_loss_coef")})
    torch.manual_seed(0)
    model_class(OF_IMAGES)._from_config(shrunk(config)).save_pretrained(folders[OF_IMAGES])
    return {name: str(folder) for name, folder in folders.items()}


def _train(models: dict[str, str], layout: tuple[int, int]) -> dict:
    """Call :func:`_train_one` for every model."""
    return {name: _train_one(model, layout[1], *LAYOUTS[layout]) for name, model in models.items()}


def _train_one(model: str, sequence_parallel: int, cases: list[tuple[str, int]], overrides: tuple[str, ...]) -> dict:
    """Return by case the step's router loss on this rank, and on rank 0 the gradients of loss and router loss."""
    engine = build_worker(model, sequence_parallel, overrides).engine
    rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    categories = CategoryTable(tuple(CATEGORIES), tuple(CATEGORIES.values()))
    spec = LossSpec("token", category_weight_table({}, categories.names))
    answers = {}
    for packing, accumulation in cases:
        shares, size = packing == "shared", MAX_TOKENS if packing == "padded" else None
        packs = [tree_row(pack) if shares else pack_row(pack, size) for pack in packs_of(packing)]
        mine = StepPlan(len(packs), len(packs), seed=0, shuffle=False).rank_packs(0, rank, ranks)
        collate = StepCollator(spec, categories, last_is_label=packing == "labelled", shares_prefixes=shares)
        batch = collate([None if index is None else packs[index] for index in mine])
        normaliser = batch.normalisers.clone()
        dist.all_reduce(normaliser, group=engine.get_data_parallel_group())
        with engine.train_mode():
            engine.optimizer_zero_grad()
            micro_batches = list(batch.micro_batches(ceil(len(mine) / accumulation)))
            engine.accumulate(micro_batches, StepLoss(float(normaliser), ranks, None))
            gradients = {
                name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters() if p.requires_grad
            }
        value = engine.router_loss.value.item()
        answers[packing, accumulation] = value, gradients if dist.get_rank() == 0 else {}
    return answers


def _reference(model: str, packing: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the router loss of the input tokens, and the gradients of loss and router loss together."""
    plain = load_eager(model)
    for parameter in (p for name, p in plain.named_parameters() if ".visual." in name):
        parameter.requires_grad_(False)
    packs = packs_of(packing)
    step = Reference(plain, [document for pack in packs for document in pack]).step(packs, "token", {})
    texts = []
    for pack in packs:
        ids = [torch.tensor(document.input_ids) for document in pack]
        texts += [*ids[:-1], ids[-1][:-1] if packing == "labelled" else ids[-1]]
    texts = [text for text in texts if len(text)]
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    ids = pad_sequence(texts, batch_first=True)
    value = plain(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True).aux_loss
    value.mul(COEFFICIENT).backward()
    return value.item(), {
        name: gradient if plain.get_parameter(name).grad is None else gradient + plain.get_parameter(name).grad
        for name, gradient in step.gradients.items()
    }


@pytest.fixture(scope="module")
def references(moe_models):
    """Compute :func:`_reference` once for each model and packing."""
    return functools.cache(lambda name, packing: _reference(moe_models[name], packing))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_and_gradients_are_those_of_all_real_tokens_in_plain_transformers(found, references, layout):
    answers = found[layout]
    for name, (packing, accumulation) in itertools.product((*MODELS, OF_IMAGES), LAYOUTS[layout][0]):
        value, gradients = references(name, packing)
        for rank in answers:
            assert rank[name][packing, accumulation][0] == pytest.approx(value, rel=1e-5)
        found = answers[0][name][packing, accumulation][1]
        assert found.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            off = (found[parameter].double() - gradient).norm() / gradient.norm()
            assert off < 1e-5, f"{name}: {parameter} is off by {off:.1e} with {packing} packs in {accumulation} parts"


def _drawn(model: str) -> list[torch.Tensor]:
    """Return the random state after the micro-batches of a step, with and without the router loss."""
    engine = build_worker(model).engine
    packs = [pack_row([DOCUMENTS[i]]) for i in (2, 3)]
    packs = [{**pack, "category_ids": pack["category_ids"] * 0} for pack in packs]
    micro_batches = list(StepCollator(LossSpec(), CategoryTable((), ()))(packs).micro_batches(1))
    states = []
    for losses in (engine.router_loss, None):
        engine.router_loss = losses
        torch.manual_seed(0)
        with engine.train_mode():
            engine.accumulate(micro_batches, StepLoss(1.0, 1, None))
        states.append(torch.get_rng_state())
    return states


def test_counting_the_choices_of_experts_draws_no_random_numbers_of_the_step(found):
    ((counted, plain),) = found["drawn"]
    assert torch.equal(counted, plain)
    torch.manual_seed(0)
    assert not torch.equal(plain, torch.get_rng_state())


def _notices(options):
    return build(options).run.notices


ASKED = [f"model.override_config.{key}" for key in ("output_router_logits=true", "router_aux_loss_coef=10")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return overrides of three steps on a mixture of experts whose config turns the router loss off."""
    folder, (config_class, fields) = tmp_path_factory.mktemp("run"), MODELS["mixtral"]
    model = write_tiny_model(folder / "model", 0, config_class, **{**MOE, "output_router_logits": False}, **fields)
    documents = random_documents(np.random.default_rng(0), [20] * 12, VOCABULARY, 1)
    return [
        *(f"data.train_dir={write_tokenized(folder / 'data', documents)}", f"model.path={model}", "optim.lr=1e-6"),
        *(f"trainer.default_local_dir={folder / 'run'}", "data.strategy=none", "trainer.log_freq=1"),
    ]


@pytest.fixture(scope="module")
def found(moe_models, run, tmp_path_factory):
    """Return by layout the answers of each rank, and the draws and notices of one."""
    config_class, fields = MODELS["mixtral"]
    noisy = {"router_jitter_noise": 0.1, "attention_dropout": 0.1}
    noisy_model = write_tiny_model(tmp_path_factory.mktemp("noisy"), 0, config_class, **MOE, **noisy, **fields)
    cases = {layout: (layout[0], _train, moe_models, layout) for layout in LAYOUTS}
    cases |= {
        "drawn": (1, _drawn, str(noisy_model)),
        "notices": (1, _notices, [*run, into(tmp_path_factory.mktemp("notices"))]),
    }
    cases["run"] = (2, train_alone, [*run, *ASKED, "checkpoint.save_contents=[model,optimizer,extra,hf_model]"])
    return run_cases(cases)


def test_a_run_reports_the_router_loss_that_is_asked_for_and_says_where_there_is_none(run, found):
    assert any("is trained without a router loss" in notice for notice in found["notices"][0])
    seen = metrics(Path(run[3].partition("=")[2]))
    assert all(2 <= seen[step, "train/router_loss"] < 3 for step in (1, 2, 3))  # two choices; 2 where balanced
    with refused("model.override_config.router_aux_loss_coef", "model.override_config.output_router_logits=true"):
        checked(compose([*run, ASKED[1]]), 1)
    (told,) = refusals(run, [["trainer.allow_resume_mismatch=[model.config.router_aux_loss_coef]"]])
    assert names(told, "model.override_config.output_router_logits", "False")


FAMILIES = (
    *("ernie4_5_moe", "flex_olmo", "laguna", "mellum", "minimax_m2"),
    *("mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
    *(
        "gpt_oss",
        "qwen3_next",
        "qwen3_5_moe_text",
        "qwen3_5_moe",
        OF_IMAGES,
        "ernie4_5_vl_moe",
        "qwen3_omni_moe_thinker",
    ),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_router_loss_that_transformers_computes(family):
    config = model_config(family)
    override(config, {"output_router_logits": True, "router_aux_loss_coef": 0.5})
    assert support_problems(config) == []
    torch.manual_seed(0)
    model = model_class(family)._from_config(shrunk(config)).eval()
    ids = torch.randint(3, 64, (1, 17))
    losses = RouterLoss(model, model.config.get_text_config())
    with torch.no_grad(), losses.recording() as logits:
        model(input_ids=ids, output_router_logits=False)
        expected = model(input_ids=ids, output_router_logits=True).aux_loss
    sums = losses.sums(logits[: len(logits) // 2], torch.ones(17, dtype=torch.bool))  # of the first forward
    assert float(router_loss(sums, sums.probabilities)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("family", ["granitemoe", "deepseek_v3", "afmoe", "qwen3"])
def test_a_model_without_a_router_loss_that_is_asked_for_one_is_refused(family):
    config = AutoConfig.for_model(family)
    assert support_problems(config) == []
    config.output_router_logits = True
    (problem,) = support_problems(config)
    assert names(problem, "model.override_config.output_router_logits", False)
    config.router_aux_loss_coef = 0.0
    assert support_problems(config) == []


def test_balanced_routing_has_the_least_loss_which_is_the_number_of_choices():
    even = RoutingSums(torch.full((4,), 5.0), torch.full((4,), 2.5), torch.tensor([10.0]))
    one = RoutingSums(torch.tensor([10.0, 10.0, 0, 0]), torch.tensor([5.0, 5.0, 0, 0]), torch.tensor([10.0]))
    assert float(router_loss(even, even.probabilities)) == 2
    assert float(router_loss(one, one.probabilities)) == 4

"""Weight decay without norms and biases, and rates by pattern, equal torch's AdamW over such groups."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from verl.workers.config import FSDPOptimizerConfig

from tests.lib.errors import names, refused
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.tiny_model import SHAPE
from tests.lib.training import (
    differences,
    exact_metrics,
    into,
    refusals,
    small_run,
    tensors_of,
    train_alone,
    train_twice,
)
from verl_ext.engines.optimizer import parameter_groups, rate_problems

DECAY = ("optim.weight_decay=0.5", "optim.decay=matrices")
RATES = "optim.lr_of={embed_tokens: 0.5, layers.0: 2}"


def optim(**options):
    return SimpleNamespace(**{"lr": 1.0, "weight_decay": 0.5, "decay": "all", "lr_of": {}, **options})


def test_matrices_alone_decay_without_norms_and_biases_whatever_their_shape():
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "linear": nn.Linear(4, 4), "embed": nn.Embedding(4, 4)})
    model.experts_bias = nn.Parameter(torch.zeros(2, 4))  # a bias for each expert
    model.norm_of_heads = CohereLayerNorm((2, 4))  # of queries, a row for each head
    first, *others = parameter_groups(model, optim(decay="matrices"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_decay = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in (first, *others)}
    plain = {"norm.weight", "norm.bias", "linear.bias", "experts_bias", "norm_of_heads.weight"}
    assert by_decay == {0.0: plain, 0.5: {"linear.weight", "embed.weight"}}
    assert {group["lr"] for group in (first, *others)} == {1.0}


def test_a_tied_weight_has_both_names_and_one_rate():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    head = model.lm_head.weight
    for name in ("lm_head", "embed_tokens", "lm_head.weight"):
        groups = parameter_groups(model, optim(lr_of={name: 0.5}))
        assert [group["lr"] for group in groups if any(weight is head for weight in group["params"])] == [0.5]
    assert list(rate_problems(model, {"lm_head": 2.0, "embed_tokens": 2.0})) == []
    (line,) = rate_problems(model, {"lm_head": 2.0, "embed_tokens": 0.5})
    assert names(line, "optim.lr_of", "model.embed_tokens.weight and lm_head.weight", "tied")


def test_verls_one_group_is_the_default():
    for config in (optim(), FSDPOptimizerConfig(lr=1.0)):  # verl's own trainer has no such keys
        assert all(isinstance(parameter, nn.Parameter) for parameter in parameter_groups(nn.Linear(2, 2), config))


def test_the_longest_glob_that_names_a_parameter_or_a_module_above_it_counts_and_the_plain_rate_comes_first():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    globs = {"1": 2.0, "*.0.weight": 9.0, "2.bias": 0.5}
    groups = parameter_groups(model, optim(lr_of=globs))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_rate = {group["lr"]: [names[id(p)] for p in group["params"]] for group in groups}
    assert by_rate == {1.0: ["0.weight", "0.bias", "2.weight"], 9.0: ["1.0.weight"], 2.0: ["1.0.bias"], 0.5: ["2.bias"]}
    assert next(iter(by_rate)) == 1.0
    other_order = dict(reversed(globs.items()))  # which a resume does not compare
    assert [group["lr"] for group in parameter_groups(model, optim(lr_of=other_order))] == list(by_rate)
    with refused("optim.lr_of", 3):
        parameter_groups(model, optim(lr_of={"3": 2.0}))


class AdamWOfTensorRates(torch.optim.AdamW):
    """An optimizer whose rates are tensors, as torchao's are."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({**param_group, "lr": torch.tensor(param_group.get("lr", self.defaults["lr"]))})


OWN = (f"optim.optimizer_impl={__name__}", f"optim.optimizer={AdamWOfTensorRates.__name__}")
NO_STATE = "checkpoint.save_contents=[model,extra]"  # as an optimizer of another module needs it
RUNS = {"groups": (*DECAY, RATES), "tensors": (*OWN, "optim.lr_scheduler_type=linear", NO_STATE)}


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """Return the folder of a whole run of each kind, and of one that resumes the first after its first step."""
    folder, calls = tmp_path_factory.mktemp("runs"), []
    length = ("trainer.total_training_steps=3", "trainer.save_freq=1")
    run = small_run(folder, tiny_model, [30] * 8, *length)
    for name, more in RUNS.items():
        whole = folder / name / "whole"
        if name == "groups":
            calls.append((train_twice, [*run, *more], whole, folder / name / "resumed"))
        else:
            calls.append((train_alone, [*run, *more, into(f'"{whole}"')]))
    run_ranks(in_turn, 1, calls)
    return folder


@pytest.mark.slow
def test_a_run_and_its_resume_equal_torchs_adamw_over_two_groups(runs, tiny_model):
    """The first update of a parameter follows from its gradient; with the same gradients the second run has torch's."""
    whole = runs / "groups" / "whole"
    assert differences(runs / "groups" / "resumed", whole, 3) == []
    # The moments of a checkpoint give the gradients of its steps, which torch's own optimizer takes.
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rates = {name: 2.0 if ".layers.0." in name else 0.5 if "embed_tokens" in name else 1.0 for name, _ in named(model)}
    groups = [
        {"params": [p], "lr": 1e-2 * rates[name], "weight_decay": 0.5 if p.ndim >= 2 else 0.0}
        for name, p in named(model)
    ]
    optimizer, before = torch.optim.AdamW(groups), {}
    for step in (1, 2, 3):
        state = tensors_of(whole / f"global_step_{step}")
        for name, parameter in named(model):
            average = state[f"optimizer.{name}.exp_avg"]
            parameter.grad = (average - 0.9 * before.get(name, torch.zeros_like(average))) / 0.1
            before[name] = average
        optimizer.step()
        for name, parameter in named(model):
            torch.testing.assert_close(parameter.detach(), state[f"model.{name}"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rates_that_are_tensors_are_logged_as_numbers(runs):
    whole = exact_metrics(runs / "tensors" / "whole")
    rates = [whole[step, "train/lr"] for step in (1, 2, 3)]
    assert rates == pytest.approx([1e-2, 1e-2 * 2 / 3, 1e-2 / 3])


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def test_a_glob_that_names_nothing_and_a_rate_that_is_none_are_refused(tiny_model, tmp_path: Path):
    run = [*small_run(tmp_path, tiny_model, [30] * 4), into(tmp_path / "run")]
    changes = [["optim.lr_of={embed_token: 0.1}"], ["optim.lr_of={norm: 0}"], ["optim.lr_of={norm: 0.1}"]]
    lora = ["model.lora_rank=2", "optim.lr_of={lora_B: 16}"]
    of_base = [[lora[0], changes[0][0]], [lora[0], "optim.lr_of={embed_tokens: 16}"]]
    frozen = ["model.freeze=[embed_tokens]", "optim.lr_of={embed_tokens: 0.1}"]
    told = refusals(run, [*changes, lora, *of_base, frozen, ["optim.lr_of={0: 2}"]])
    assert names(told[0], "optim.lr_of", "embed_token", "nearest: embed_tokens")
    assert names(told[1], "optim.lr_of.norm", "got 0")
    assert told[2:4] == ["", ""]
    for line, got in zip(told[4:], ("embed_token", "embed_tokens", "embed_tokens", 0), strict=True):
        assert names(line, "optim.lr_of", f"got {got}")

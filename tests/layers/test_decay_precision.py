"""Under bf16 mixed precision, decay rates reach a recurrence, and their gradients the optimizer, in fp32."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.lib.checked import checked
from tests.lib.packed_engine import build_worker, token_step
from tests.lib.ranks import run_cases
from tests.lib.reference import documents_of_answers
from tests.lib.small_models import write_small_models
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, write_tokenized
from verl_ext.config.compose import compose

FAMILIES = ("qwen3_5_text", "nemotron_h", "olmo_hybrid")
DOCUMENTS = documents_of_answers(21, 2, 13, 30, 9, 17)
PACKS = [DOCUMENTS[:3], DOCUMENTS[3:]]
_BF16 = "engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"


def _seen(folder):
    """Return by parameter its master, the forward's value, the ranks' mean gradient and the optimizer's gradient."""
    engine = build_worker(folder, overrides=[_BF16]).engine
    layers = {name: layer for name, layer in engine.module.named_modules() if hasattr(layer, "A_log")}
    seen, masters = {}, {name: p.full_tensor().clone() for name, p in engine.module.named_parameters()}

    def record(layer, *_):
        for own in ("A_log", "dt_bias"):
            parameter, name = getattr(layer, own), next(n for n, x in layers.items() if x is layer) + f".{own}"
            if name not in seen and torch.is_grad_enabled():  # the first forward; recomputation sees the same value
                seen[name] = {"forward": parameter.detach().clone(), "master": masters[name], "local": []}
                parameter.register_hook(seen[name]["local"].append)

    for layer in layers.values():
        layer.register_forward_pre_hook(record)
    step = token_step(engine, PACKS)
    for name, of in seen.items():
        summed = sum(of["local"]).float()
        dist.all_reduce(summed)
        of |= {"local": summed / dist.get_world_size(), "gradient": step.gradients.get(name)}
    return seen


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model):
    """Write a small model of each family, and return the folders by name."""
    return write_small_models(FAMILIES, tmp_path_factory.mktemp("models"), tiny_model)


@pytest.mark.slow
def test_decays_and_their_gradients_are_not_rounded_to_bf16(folders):
    for family, (seen, _) in run_cases({name: (2, _seen, folder) for name, folder in folders.items()}).items():
        assert seen, family
        for name, of in seen.items():
            assert of["forward"].dtype == torch.float32, f"{family}: {name}"
            assert torch.equal(of["forward"], of["master"]), f"{family}: {name}"
            assert not torch.equal(of["master"], of["master"].bfloat16().float()), f"{family}: {name} can tell nothing"
            assert not torch.equal(of["local"], of["local"].bfloat16().float()), f"{family}: {name} is rounded"
            torch.testing.assert_close(of["gradient"], of["local"], rtol=1e-6, atol=0)


def test_a_notice_says_which_kernels_are_missing(folders, tmp_path):
    data = write_tokenized(tmp_path, random_documents(np.random.default_rng(0), [40, 30], VOCABULARY, 1))
    given = [f"data.train_dir={data}", f"model.path={folders['nemotron_h']}", "trainer.device=cuda", "optim.lr=1e-3"]
    notices = checked(compose([*given, _BF16]), 1, "cuda", (9, 0)).notices
    assert any("flash-linear-attention are not installed" in notice for notice in notices)

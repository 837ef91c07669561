"""verl's own offloads with packs: `engine.param_offload`, `engine.optimizer_offload`.

On a CPU both places are host memory, so the tests compare bits and record the order of verl's transfers: code that
reads weights or optimizer state must find them loaded.
"""

from unittest import mock

import pytest
from verl.workers.engine import base
from verl.workers.engine.fsdp import transformer_impl as verl

from tests.lib.ranks import run_cases
from tests.lib.training import build, exact_metrics, into, small_run, train_alone
from verl_ext.checkpoint import export, state

pytestmark = pytest.mark.slow

OFFLOAD = ("engine.param_offload=true", "engine.optimizer_offload=true")


def watched(overrides: list[str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return each use of weights or optimizer state with places, and the final ones; verl takes the CPU for a GPU."""
    at: dict[str, str] = {}
    uses: list[tuple[str, str]] = []

    def moves(name: str, what: str, place: str) -> None:
        for module in (verl, export, state):
            setattr(module, name, lambda *_: at.update({what: place}))

    moves("load_fsdp_model_to_gpu", "weights", "device")
    moves("offload_fsdp_model_to_cpu", "weights", "host")
    moves("load_fsdp_optimizer", "optimizer", "device")
    moves("offload_fsdp_optimizer", "optimizer", "host")
    trainer = build(overrides)
    gpu = {"new": lambda: "cuda"}
    with mock.patch.object(base, "get_device_name", **gpu), mock.patch.object(verl, "get_device_name", **gpu):
        trainer.engine.to("cpu")  # as initialize() does
        module, optimizer = trainer.engine.module, trainer.engine.optimizer
        module.register_forward_pre_hook(lambda *_: uses.append(("forward", at["weights"])))
        module.register_state_dict_pre_hook(lambda *_: uses.append(("save", at["weights"])))
        optimizer.register_step_pre_hook(lambda *_: uses.append(("step", at["weights"])))
        optimizer.register_step_pre_hook(lambda *_: uses.append(("step", at["optimizer"])))
        trainer.fit()
    return uses, at


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """Return the folder of a plain run, and of an offloaded one and its resume, on two ranks; and what others use."""
    folder = tmp_path_factory.mktemp("runs")
    small = small_run(folder, tiny_model, [20] * 24, f"data.val_dir={folder / 'data'}", "trainer.test_freq=1")
    lengths = {"plain": (3,), "offloaded": (2, *OFFLOAD), "resumed": (3, *OFFLOAD)}
    cases = {}
    for name, (steps, *more) in lengths.items():
        output = into(folder / name.replace("resumed", "offloaded"))
        cases[name] = (2, train_alone, [*small, output, f"trainer.total_training_steps={steps}", *more])
    exported = ("checkpoint.save_contents=[model,optimizer,extra,hf_model]", "trainer.total_training_steps=2", *OFFLOAD)
    for model in ("packed", "lora"):
        cases[model] = (1, watched, [*exported, f"model={model}", *small, into(folder / model)])
    return folder, run_cases(cases)


def test_an_offloaded_run_and_its_resume_equal_a_plain_one_to_the_last_bit(runs):
    expected, found = (exact_metrics(runs[0] / name) for name in ("plain", "offloaded"))
    assert {step for step, _ in expected} == {0, 1, 2, 3}  # 0: the validation before training
    assert found == expected


@pytest.mark.parametrize("model", ["packed", "lora"])
def test_weights_are_loaded_whenever_they_are_used_and_offloaded_at_the_end(model, runs):
    ((uses, at),) = runs[1][model]
    assert {use for use, _ in uses} == {"forward", "step", "save"}
    assert {place for use, place in uses if use != "save"} == {"device"}
    # A checkpoint reads shards in place; an export gathers them on the device.
    assert ("save", "device") in uses
    assert at == {"weights": "host", "optimizer": "host"}

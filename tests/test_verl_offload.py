"""verl's own offloads with packs: `engine.param_offload`, `engine.optimizer_offload`.

On a CPU both places are host memory, so the tests compare bits and record the order of verl's transfers: code that
reads weights or optimizer state must find them loaded.
"""

import pytest

from tests.ranks import run_ranks
from tests.training import build, exact_metrics, into, small_run, train_each

pytestmark = pytest.mark.slow

OFFLOAD = ("engine.param_offload=true", "engine.optimizer_offload=true")


@pytest.fixture
def options(tmp_path, tiny_model):
    return small_run(tmp_path, tiny_model, [20] * 24, f"data.val_dir={tmp_path / 'data'}", "trainer.test_freq=1")


def test_an_offloaded_run_and_its_resume_equal_a_plain_one_to_the_last_bit(options, tmp_path):
    def run(folder: str, steps: int, *overrides: str) -> list[str]:
        return [*options, into(tmp_path / folder), f"trainer.total_training_steps={steps}", *overrides]

    runs = [run("plain", 3), run("offloaded", 2, *OFFLOAD), run("offloaded", 3, *OFFLOAD)]
    run_ranks(train_each, 2, runs)
    expected, found = (exact_metrics(tmp_path / name) for name in ("plain", "offloaded"))
    assert {step for step, _ in expected} == {0, 1, 2, 3}  # 0: the validation before training
    assert found == expected


def watched(overrides: list[str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return each use of weights or optimizer state with their place at that time, and the final places.

    verl is told that the device is no CPU, so that it distinguishes loading from offloading.
    """
    from verl.workers.engine import base
    from verl.workers.engine.fsdp import transformer_impl as verl

    from verl_ext.checkpoint import export, state

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
    base.get_device_name = verl.get_device_name = lambda: "cuda"
    trainer.engine.to("cpu")  # as initialize() does
    module, optimizer = trainer.engine.module, trainer.engine.optimizer
    module.register_forward_pre_hook(lambda *_: uses.append(("forward", at["weights"])))
    module.register_state_dict_pre_hook(lambda *_: uses.append(("save", at["weights"])))
    optimizer.register_step_pre_hook(lambda *_: uses.append(("step", at["weights"])))
    optimizer.register_step_pre_hook(lambda *_: uses.append(("step", at["optimizer"])))
    trainer.fit()
    return uses, at


@pytest.mark.parametrize("model", ["packed", "lora"])
def test_weights_are_loaded_whenever_they_are_used_and_offloaded_at_the_end(model, options, tmp_path):
    exported = ("checkpoint.save_contents=[model,optimizer,extra,hf_model]", f"model={model}", *OFFLOAD)
    output = (into(tmp_path / "run"), "trainer.total_training_steps=2")
    ((uses, at),) = run_ranks(watched, 1, [*exported, *options, *output])
    assert {use for use, _ in uses} == {"forward", "step", "save"}
    assert {place for use, place in uses if use != "save"} == {"device"}
    # A checkpoint reads shards in place; an export gathers them on the device.
    assert ("save", "device") in uses
    assert at == {"weights": "host", "optimizer": "host"}

"""Installing the package changes nothing for other verl programs; asking for it by name is what selects it.

Each program is a process of its own, because the tests observe `import verl` in a fresh process.
"""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# As on a GPU host: torch sees a device and nvidia-smi answers before verl is imported; then the GPU is gone.
_OTHER_PROGRAM = """
import json, os, sys
import torch
torch.cuda.is_available = lambda: True
import verl
from verl.plugin.platform import get_platform
from verl.plugin.platform.platform_manager import PlatformRegistry, _detect_platform_name
seen = {
    "modules": sorted(sys.modules),
    "platform": type(get_platform()).__name__,
    "platforms": {name: str(PlatformRegistry.get(name)) for name in PlatformRegistry.registered_names()},
}
torch.cuda.is_available = lambda: False
os.environ["PATH"] = ""
seen["platform without a GPU"] = _detect_platform_name()
from verl.workers.engine import EngineRegistry
seen["engines"] = {
    f"{model}/{backend}/{key}": f"{cls.__module__}.{cls.__qualname__}"
    for model, backends in EngineRegistry._engines.items()
    for backend, keys in backends.items()
    for key, cls in keys.items()
}
from transformers import AttentionInterface
seen["attentions"] = sorted(AttentionInterface().valid_keys())
import verl.trainer.main_ppo
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY
named = lambda registry: {str(name): f"{found.__module__}.{found.__qualname__}" for name, found in registry.items()}
seen["RL"] = [named(registry) for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, REWARD_MANAGER_REGISTRY)]
with initialize_config_module("verl.trainer.config", version_base=None):
    seen["RL configurations"] = {
        f"{trainer} {estimator}": OmegaConf.to_container(
            compose(trainer, overrides=[f"algorithm.adv_estimator={estimator}"]), resolve=False
        )
        for trainer in ("ppo_trainer", "ppo_megatron_trainer")
        for estimator in ("gae", "grpo")
    }
seen["RL modules"] = sorted(name for name in sys.modules if name.startswith("verl_ext"))
print("SEEN" + json.dumps(seen))
"""

_SELECTING_PROGRAM = """
import json, sys
import verl
registered = "verl_ext.engines.packed" in sys.modules
from verl.plugin.platform import get_platform
from verl.workers.engine import EngineRegistry
from transformers import AttentionInterface
import verl_ext.plugin
verl_ext.plugin.register_engine()  # again: idempotent
seen = {
    "registered by importing verl": registered,
    "platform": type(get_platform()).__name__,
    "engine": EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__,
    "attention": "verl_ext_packed" in AttentionInterface().valid_keys(),
}
print("SEEN" + json.dumps(seen))
"""


def _start(program: str, path: str, **environment: str) -> subprocess.Popen:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
    kept |= {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}", **environment}
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.Popen(command, env=kept, cwd=path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Return the view of three programs: without plugins, with this package installed, and one that asks for it."""
    folder = tmp_path_factory.mktemp("gpu_host")
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 0\n")
    smi.chmod(0o755)
    started = {
        "stock": _start(_OTHER_PROGRAM, str(folder), VERL_USE_EXTERNAL_PLUGINS="none"),
        "installed": _start(_OTHER_PROGRAM, str(folder)),
        "selecting": _start(_SELECTING_PROGRAM, str(folder), VERL_PLATFORM="cpu", VERL_ENGINE_VENDOR="verl_ext"),
    }
    seen = {}
    for name, process in started.items():
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        (line,) = [line for line in out.splitlines() if line.startswith("SEEN")]
        seen[name] = json.loads(line.removeprefix("SEEN"))
    return seen


def test_verl_loads_the_plugin_and_nothing_more_of_the_package(programs):
    more = set(programs["installed"]["modules"]) - set(programs["stock"]["modules"])
    assert more == {"verl_ext", "verl_ext.plugin", "verl_ext.cpu_platform"}
    assert set(programs["stock"]["modules"]) <= set(programs["installed"]["modules"])


def test_verls_own_engines_and_platforms_and_transformers_attentions_are_as_before(programs):
    stock, installed = programs["stock"], programs["installed"]
    assert stock["engines"], "verl registers engines of its own"
    assert installed["engines"] == stock["engines"]
    assert installed["attentions"] == stock["attentions"]
    added = dict(installed["platforms"])
    assert "CPUPlatform" in added.pop("cpu")
    assert added == stock["platforms"]
    assert stock["platform"] == installed["platform"] == "PlatformCUDA"  # a GPU host keeps it
    # A CPU-only driver of a GPU cluster must not turn into a CPU run.
    assert installed["platform without a GPU"] == stock["platform without a GPU"] == "nvidia"


def test_ppo_and_grpo_find_the_same_algorithms_and_compose_the_same_configurations(programs):
    stock, installed = programs["stock"], programs["installed"]
    assert "grpo" in stock["RL"][0]
    assert installed["RL"] == stock["RL"]
    assert stock["RL configurations"]["ppo_trainer grpo"]["algorithm"]["adv_estimator"] == "grpo"
    assert installed["RL configurations"] == stock["RL configurations"]
    ours = ("", ".cpu_platform", ".launch", ".launch.protocol", ".launch.torchrun", ".options", ".plugin")
    assert installed["RL modules"] == [f"verl_ext{name}" for name in ours]


def test_two_environment_variables_select_the_platform_and_the_engine(programs):
    assert programs["selecting"] == {
        "registered by importing verl": True,
        "platform": "CPUPlatform",
        "engine": "PackedEngine",
        "attention": True,
    }

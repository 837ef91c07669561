"""A run on a Ray cluster of two nodes: it has the losses of torchrun's ranks, and survives killed ranks."""

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

import verl_ext.fsdp_sft_trainer_ray as driver
from tests.lib.errors import names
from tests.lib.ranks import only_rank, run_ranks
from tests.lib.ray_cluster import ranks_of, ray_nodes
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import SMALL, differences, exact_metrics, into, tracked_step, train_alone, wait_for
from verl_ext.checkpoint.layout import refuse_locked
from verl_ext.config.compose import compose
from verl_ext.fsdp_sft_trainer_ray import main
from verl_ext.launch.protocol import TRAINING_FAILED, Ending
from verl_ext.trainer.setup import prepare

pytestmark = pytest.mark.slow

STEPS = 30
_PATIENCE = 240


@pytest.fixture(scope="module")
def cluster():
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def overrides(tiny_model, tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("ray")
    names = {1: "maths", 2: "code"}
    for part, seed, count in (("train", 0, 60), ("val", 1, 12)):
        lengths = np.random.default_rng(seed).integers(2, 64, count)
        write_tokenized(folder / part, random_documents(np.random.default_rng(seed), lengths, VOCABULARY, 2), names)
    return [
        *(*SMALL, f"data.train_dir={folder / 'train'}", f"data.val_dir={folder / 'val'}", f"model.path={tiny_model}"),
        *("trainer.logger=[file]", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2"),
        "trainer.max_ckpt_to_keep=2",
    ]


def run(monkeypatch, arguments: list[str]) -> int:
    """Run `python -m verl_ext.fsdp_sft_trainer_ray …` in this process, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["fsdp_sft_trainer_ray", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def line_of(capfd) -> str:
    """Return the only line on stderr."""
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    return said


def once_saved(folder: Path, do) -> threading.Thread:
    """Call `do` with the rank processes of the run that writes into this folder, once it has saved again."""
    before = tracked_step(folder) or 0

    def watch() -> None:
        wait_for(lambda: (tracked_step(folder) or 0) > before, _PATIENCE)
        do(ranks_of(folder))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_two_nodes_have_the_metrics_of_torchruns_ranks_to_the_bit(cluster, overrides, tmp_path, monkeypatch, capfd):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    overrides = [*overrides, "trainer.total_training_steps=4", "trainer.test_freq=2"]
    run_ranks(train_alone, 2, [*overrides, into(whole)])
    capfd.readouterr()
    assert run(monkeypatch, [*overrides, into(folder), "trainer.nnodes=2"]) == 0
    printed, errors = capfd.readouterr()
    assert printed.count("trained on ") == 1
    assert "Traceback" not in errors
    assert differences(folder, whole, 4) == []


@pytest.mark.cluster
def test_a_killed_rank_restarts_all_and_the_run_ends_as_uninterrupted(cluster, overrides, tmp_path, monkeypatch, capfd):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    run_ranks(train_alone, 2, [*overrides, into(whole)])
    killed = once_saved(folder, lambda ranks: ranks[1].kill())
    capfd.readouterr()
    arguments = [*overrides, into(folder), "trainer.nnodes=2", "ray.max_restarts=1"]
    assert run(monkeypatch, arguments) == 0
    killed.join()
    printed, errors = capfd.readouterr()
    assert "without effect" not in errors
    assert "error: rank 1 was ended by SIGKILL\n" in errors
    assert "restart 1 of 1: the node " in errors
    assert ") ended with code 137; going on from the last checkpoint with 2 ranks on 2 nodes\n" in errors
    assert "resumed after step " in printed
    assert printed.count("trained on ") == 1
    assert "Traceback" not in errors
    assert differences(folder, whole, STEPS) == []


@pytest.mark.cluster
def test_a_lost_node_leaves_its_ranks_to_the_other_one(cluster, overrides, tmp_path, monkeypatch, capfd):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    shared = [*overrides, "engine.ulysses_sequence_parallel_size=2"]
    run_ranks(train_alone, 4, [*shared, into(whole)])
    lost = once_saved(folder, lambda ranks: cluster.kill_second())
    capfd.readouterr()
    layout = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2", "ray.max_restarts=1", "ray.timeout=3"]
    try:
        assert run(monkeypatch, [*shared, into(folder), *layout]) == 0
        lost.join()
    finally:
        cluster.add_second()
    printed, errors = capfd.readouterr()
    assert "restart 1 of 1: the node " in errors
    assert ") was lost (the actor's node was terminated unexpectedly" in errors
    assert "); going on from the last checkpoint with 2 ranks on 1 node\n" in errors
    assert "resumed after step " in printed
    found, expected = exact_metrics(folder), exact_metrics(whole)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if "loss" in key[1]:
            assert found[key] == pytest.approx(value, rel=1e-5), key


@pytest.mark.cluster
def test_a_rank_ends_with_its_actor(cluster, overrides, tmp_path, monkeypatch, capfd):
    folder, ranks = tmp_path / "run", {}

    def kill_actor(found: dict[int, psutil.Process]) -> None:
        ranks.update(found)
        found[1].suspend()  # it cannot react by itself
        found[1].parents()[2].kill()  # beyond torchrun and the launch

    killed = once_saved(folder, kill_actor)
    endless = ["trainer.nnodes=2", "trainer.total_training_steps=1000000"]
    assert run(monkeypatch, [*overrides, into(folder), *endless]) == TRAINING_FAILED
    killed.join()
    assert psutil.wait_procs(ranks.values(), _PATIENCE)[1] == []
    said = capfd.readouterr().err
    assert "error: the node " in said
    assert ") was lost (The actor is dead because its worker process has died" in said


@pytest.mark.cluster
def test_a_mistake_of_the_ranks_is_one_line_and_no_reason_to_restart(cluster, overrides, tmp_path, monkeypatch, capfd):
    folder = into(tmp_path / "run")
    wrong = ["trainer.nnodes=2", "data.train_batch_size=3", "ray.max_restarts=3"]
    assert run(monkeypatch, [*overrides, folder, *wrong]) == 2
    assert names(line_of(capfd), "data.train_batch_size", "got 3")


@pytest.mark.cluster
def test_nodes_that_do_not_come_are_named(cluster, overrides, monkeypatch, capfd):
    assert run(monkeypatch, [*overrides, "trainer.nnodes=3", "trainer.n_gpus_per_node=2", "ray.timeout=1"]) == 2
    assert names(line_of(capfd), "3 nodes with 2 free CPUs", "ray.timeout=1", "got 2 such nodes", "2 nodes")


@pytest.mark.cluster
def test_a_cluster_of_the_runs_own_is_not_waited_for_to_grow(overrides, tmp_path):
    command = [sys.executable, "-m", "verl_ext.fsdp_sft_trainer_ray", *overrides, "trainer.nnodes=1000"]
    done = subprocess.run(command, env={**os.environ, "RAY_ADDRESS": "local"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert names(done.stderr, "1000 nodes with 1 free CPU", "ray.timeout=15")


@pytest.mark.cluster
def test_ranks_end_with_their_driver_and_the_same_command_goes_on(cluster, overrides, tmp_path):
    folder, ranks = tmp_path / "run", {}
    command = [sys.executable, "-m", "verl_ext.fsdp_sft_trainer_ray", *overrides, "trainer.nnodes=2"]
    command += [into(folder), "trainer.total_training_steps=1000000"]

    def ended(number: int) -> tuple[int, str]:
        """Return the command's exit code and errors after its driver gets a signal after a checkpoint."""
        with (tmp_path / "errors").open("w+") as errors:
            driver = subprocess.Popen(command, stdout=errors, stderr=errors)

            def end(found: dict[int, psutil.Process]) -> None:
                ranks.update(found)
                for process in found.values() if number == signal.SIGKILL else ():
                    process.suspend()  # it cannot react by itself, like a rank deep in a kernel
                driver.send_signal(number)

            once_saved(folder, end).join()
            code = driver.wait(_PATIENCE)
            assert psutil.wait_procs(ranks.values(), _PATIENCE)[1] == []
            errors.seek(0)
            return code, errors.read()

    code, errors = ended(signal.SIGINT)
    assert code == os.EX_TEMPFAIL
    assert "the same command " in errors
    assert "Traceback" not in errors
    assert len(ranks) == 2
    ranks.clear()
    code, errors = ended(signal.SIGKILL)
    assert len(ranks) == 2
    assert code == -signal.SIGKILL
    refuse_locked(folder)


ADDRESS = ("RAY_ADDRESS", "host:port")


def test_an_address_where_no_cluster_or_another_service_listens_is_told(overrides, monkeypatch, capfd, free_port):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port}")
    assert run(monkeypatch, overrides) == 2
    assert names(line_of(capfd), *ADDRESS, f"127.0.0.1:{free_port}")
    monkeypatch.setattr("verl_ext.launch.ray_cluster.ANSWERS_WITHIN", 1)
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as dashboard:
        address = f"127.0.0.1:{dashboard.server_port}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert run(monkeypatch, overrides) == 2
    assert names(line_of(capfd), *ADDRESS, address, "something else")


class Refuses(grpc.ServerInterceptor):
    """A service that refuses every call with this code."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(lambda _, call: call.abort(code, "refused"))

    def intercept_service(self, *_):
        return self._handler


@pytest.mark.parametrize(
    ("code", "things"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH")),
        (grpc.StatusCode.UNIMPLEMENTED, ADDRESS),
    ],
)
def test_a_cluster_with_a_token_and_another_service_of_grpcs_are_told_at_once(
    code, things, overrides, monkeypatch, capfd
):
    server = grpc.server(ThreadPoolExecutor(1), interceptors=[Refuses(code)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    monkeypatch.setenv("RAY_ADDRESS", address)
    try:
        assert run(monkeypatch, [*overrides]) == 2
    finally:
        server.stop(0)
    assert names(line_of(capfd), *things, address)


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (["trainer.resume_mode=auto"], "the first step, since no checkpoint is saved,"),
        (["trainer.resume_mode=auto", "saved"], "the last checkpoint"),
        (["trainer.resume_mode=disable", "saved"], "the first step, since no checkpoint is saved,"),
    ],
)
def test_a_restart_says_that_there_is_no_checkpoint_to_go_on_from(options, start, tmp_path, monkeypatch, capfd):
    """The stand-in for placement loses the nodes of the first attempt; those of the second end well."""
    ends = iter([Ending("a node was lost"), Ending(code=0)])
    nodes = types.SimpleNamespace(run=lambda *_: next(ends))
    monkeypatch.setattr(driver, "placed_nodes", lambda *_: contextlib.nullcontext(nodes))
    monkeypatch.setattr(driver.ray, "nodes", lambda: [])
    monkeypatch.setattr(driver, "ray_cluster", lambda _: contextlib.nullcontext(False))
    if "saved" in options:
        (tmp_path / "run" / "global_step_3").mkdir(parents=True)
    given = ["data.train_dir=data", "model.path=model", "ray.max_restarts=1", options[0]]
    assert run(monkeypatch, [*given, into(tmp_path / "run")]) == 0
    assert f"restart 1 of 1: a node was lost; going on from {start} " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "things"),
    [
        (["optim.lrr=1"], ("optim.lrr", "nearest: optim.lr")),
        (["ray.max_restarts=-1"], ("ray.max_restarts", 0, -1)),
        (["trainer.overwrite=true", "ray.max_restarts=2"], ("trainer.overwrite", "ray.max_restarts=2", True)),
        ([], (*ADDRESS, "auto", "ray://nowhere:10001")),
    ],
)
def test_a_mistake_is_one_line_before_a_cluster_is_joined(words, things, monkeypatch, capfd):
    monkeypatch.setenv("RAY_ADDRESS", "ray://nowhere:10001")
    assert run(monkeypatch, ["data.train_dir=data", "model.path=model", *words]) == 2
    assert names(line_of(capfd), "error", *things)


def test_torchrun_says_that_it_does_not_read_the_options_of_ray(overrides, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun's")
    given = ["ray.max_restarts=2", "ray.timeout=600", into(tmp_path / "run")]
    with only_rank():
        notices = prepare(compose([*overrides, *given])).notices
    assert "ray.max_restarts: without effect here: torchrun has MAX_RESTARTS of its own" in notices

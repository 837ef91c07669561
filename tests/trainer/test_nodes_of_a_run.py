"""Causes that end a run of several nodes: options, data or models that differ between nodes, and lost ranks."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.lib.errors import names, refused
from tests.lib.ranks import run_ranks, started_ranks
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import heard, into, settle
from verl_ext.checkpoint.resume import check_output
from verl_ext.config.compose import compose
from verl_ext.config.run import RunConfig
from verl_ext.launch.protocol import TRAINING_FAILED
from verl_ext.trainer import distributed
from verl_ext.trainer.distributed import failures_reported, process_group


def prepared(folders: list[str], cases: list[list[list[str]]]) -> list[str]:
    """Return the messages when this rank, a node with its own folder, prepares its overrides of each case."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.chdir(folders[dist.get_rank()])
    return [heard(settle, of_nodes[dist.get_rank()]) for of_nodes in cases]


def test_nodes_that_differ_are_told_before_they_share_a_scan(tiny_model, tmp_path):
    for node, seed in (("a", 0), ("b", 0), ("a", 1), ("b", 2)):
        documents = random_documents(np.random.default_rng(seed), [30, 9, 17, 40, 12, 50], VOCABULARY, 1)
        write_tokenized(tmp_path / node / ("same" if seed == 0 else "other"), documents)
    common = [f"model.path={tiny_model}", into(tmp_path / "run")]
    same, other = [*common, "data.train_dir=same"], [*common, "data.train_dir=other"]
    cases = [[same, same], [same, [*same, "optim.lr=0.5"]], [other, other]]
    agree, options, data = run_ranks(prepared, 2, [str(tmp_path / "a"), str(tmp_path / "b")], cases)[0]
    assert agree == ""
    assert names(options, "error", "optim.lr", "0.01 on node 0", "0.5 on node 1")
    assert options.count("\n") == 1
    assert names(data, "error", "content", "data.train_dir, folder 1")
    assert data.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/build/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"),
        RuntimeError("Gloo connectFullMesh failed with [/build/gloo/transport/tcp/pair.cc:152] refused. GLHF!"),
        dist.DistNetworkError("The client socket has timed out"),
    ],
)
def test_a_lost_rank_is_one_line_and_an_exit_code(error, monkeypatch):
    told = []
    monkeypatch.setattr(distributed, "end", told.append)
    with failures_reported():
        raise error
    (ending,) = told
    message = str(ending)
    assert (ending.code, ending.scope) == (TRAINING_FAILED, "rank")
    assert names(message, "collective", "trainer.nccl_timeout", "last checkpoint")
    assert "/build/" not in message
    assert "GLHF" not in message


def fail(folder: Path, ranks: list[int]) -> None:
    """Raise an error on these ranks, for which the others wait."""
    os.dup2(os.open(folder / f"stderr-{dist.get_rank()}", os.O_CREAT | os.O_WRONLY), 2)
    with failures_reported():
        if dist.get_rank() in ranks:
            raise RuntimeError("shapes differ\nhere and there")
        dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("ranks", [[1], [0, 1, 2]])
def test_an_exception_shows_one_traceback_and_the_others_say_which_rank_it_was(ranks, tmp_path):
    with started_ranks(fail, 3, tmp_path, ranks) as (processes, _):
        for process in processes:
            process.join(60)
        codes = [process.exitcode for process in processes]
    said = [(tmp_path / f"stderr-{rank}").read_text() for rank in range(3)]
    (first,) = [rank for rank in range(3) if "Traceback" in said[rank]]
    assert first in ranks
    assert codes == [1 if rank == first else TRAINING_FAILED for rank in range(3)]
    error = "RuntimeError: shapes differ"
    assert said[first].endswith(f"\nerror: rank {first}: {error} (its traceback is above)\n")
    for rank in {0, 1, 2} - {first}:
        told = f"error: rank {first} on {socket.gethostname()} failed ({error}); the same command resumes from the last"
        assert said[rank].strip() == f"{told} checkpoint"


def test_the_full_error_is_raised_for_who_asks(monkeypatch):
    monkeypatch.setenv("VERL_EXT_FULL_ERROR", "1")
    with pytest.raises(RuntimeError, match="shapes"), failures_reported():
        raise RuntimeError("shapes differ")


@pytest.mark.parametrize(
    ("variable", "why"),
    [("TORCHELASTIC_MAX_RESTARTS", "MAX_RESTARTS=2"), ("SLURM_RESTART_COUNT", "slurm requeued it 2 times")],
)
def test_a_run_that_may_be_restarted_does_not_overwrite(variable, why, monkeypatch, tmp_path: Path):
    config = RunConfig.from_composed(compose([into(tmp_path), "trainer.overwrite=true"]))
    monkeypatch.setenv(variable, "0")
    check_output(config)
    monkeypatch.setenv(variable, "2")
    with refused("trainer.overwrite", why, True):
        check_output(config)


def test_ranks_that_a_scheduler_describes_in_part_are_refused_in_one_line(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as ended, process_group():
        pass
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, "error", "torchrun", "WORLD_SIZE=2", "LOCAL_RANK")

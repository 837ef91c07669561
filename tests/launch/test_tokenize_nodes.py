"""`verl-ext tokenize backend=ray` on two nodes, one of which is killed while both work."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from datasets import load_from_disk

from tests.lib.chat_templates import CHATML, tiny_tokenizer

pytestmark = pytest.mark.cluster

SECONDS = 300


def tasks_at_work() -> int:
    """Return the number of Ray's processes that tokenize; Ray names a process by its task."""
    return sum((process.info["name"] or "").startswith("ray::_do_on_ray") for process in psutil.process_iter(["name"]))


def test_a_killed_node_costs_no_row(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster  # imports Ray, which other collected tests do not need

    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    with open(tmp_path / "a.jsonl", "w") as file:
        for number in range(60_000):
            record = {"question": f"the cat {number}", "answer": "sat on the mat " * (number % 50 + 1)}
            file.write(json.dumps(record) + "\n")
    command = [sys.executable, "-m", "verl_ext", "tokenize", f"sources.a={tmp_path}/a.jsonl", "preview=0"]
    command += [f"model.path={tmp_path}/model"]
    size: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        second = cluster.add_node(**size)
        cluster.wait_for_nodes()
        on_ray = [*command, f"output_dir={tmp_path}/ray", "backend=ray"]
        address = {"RAY_ADDRESS": cluster.address}
        run = subprocess.Popen(on_ray, env={**os.environ, **address}, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + SECONDS
        while tasks_at_work() < 2:  # one on each node
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        cluster.remove_node(second, allow_graceful=False)
        told = run.communicate(timeout=SECONDS)[1]
        assert run.returncode == 0, told
    finally:
        cluster.shutdown()
    subprocess.run([*command, f"output_dir={tmp_path}/local"], check=True)
    ours, local = load_from_disk(str(tmp_path / "ray")), load_from_disk(str(tmp_path / "local"))
    assert ours.data.table.combine_chunks().equals(local.data.table.combine_chunks())

"""Runs of `verl-ext synthesize` in tests: their documents, and what they wrote."""

import json
import random

import yaml

from verl_ext.tools.synthesis.command import main


def words(count, seed=0):
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(120)}" for _ in range(count))


def synthesized(folder, model, server, source, *given, task="longalign", out="out"):
    """Run the command on a file or folder, with a server or None; return its exit code."""
    options = {"task": task, "output_dir": folder / out, "sources": f"{{docs:{source}}}"}
    if server is not None:
        options |= {"endpoint.base_url": server.url, "endpoint.model": "tiny", "endpoint.retries": 0}
    if "long" in task:
        options |= {"intervals": "[100,200,300,400]", "model.path": model}
    return main([f"{key}={value}" for key, value in (options | dict(each.split("=", 1) for each in given)).items()])


def records_of(tmp_path, task="longalign", out="out"):
    return [json.loads(line) for line in (tmp_path / out / f"{task}.jsonl").read_text().splitlines()]


def report_of(tmp_path):
    return yaml.safe_load((tmp_path / "out" / "report.yaml").read_text())

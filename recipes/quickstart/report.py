"""The closing report of a run: a table of category losses, a loss curve per category, one generated answer.

    python recipes/quickstart/report.py --metrics metrics.jsonl --checkpoints checkpoints --output . --ask val.jsonl

Reads what verl's `file` logger wrote, one `{"step": n, "data": {...}}` a line, and the exported Hugging Face folder of
the last checkpoint, which plain transformers loads: nothing here imports verl or this package.
"""

import argparse
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

LAST_STEPS = 10  # steps in the table's "last" column
COLOURS = ("#2a6f97", "#c8553d", "#588157", "#7b5ea7", "#b08900")


@dataclass
class Curve:
    """One category's losses, in the order of the steps; a step without a target of the category has no point."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    val_steps: list[int] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)

    def mean(self, window: slice) -> float:
        """Mean loss per target token over a slice of the logged steps."""
        return float(np.average(self.losses[window], weights=self.tokens[window]))

    def smooth(self) -> np.ndarray:
        """Mean per target token around each step, over at most a twentieth of the run to each side."""
        reach = [min(i, max(1, len(self.steps) // 20)) for i in range(len(self.steps))]
        return np.array([self.mean(slice(i - r, i + r + 1)) for i, r in enumerate(reach)])


def read_curves(metrics: Path) -> dict[str, Curve]:
    """Category name → curve. Raises ValueError where the file holds no category loss."""
    curves: dict[str, Curve] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for key, value in record["data"].items():
            match = re.fullmatch(r"(train|val)/(.+)_loss", key)
            if match is None or value is None or not np.isfinite(value):
                continue
            split, name = match.groups()
            curve = curves.setdefault(name, Curve())
            if split == "val":
                curve.val_steps.append(record["step"])
                curve.val_losses.append(value)
            elif (tokens := record["data"].get(f"train/{name}_tokens", 1)) > 0:
                curve.steps.append(record["step"])
                curve.losses.append(value)
                curve.tokens.append(tokens)
    if not curves:
        raise ValueError(f"--metrics must hold train/<category>_loss of at least one step; got {metrics}")
    return dict(sorted(curves.items()))


def table(curves: dict[str, Curve]) -> str:
    """First, last and validation loss per target token of every category."""
    columns = ("category", "target tokens", "first step", f"last {LAST_STEPS} steps", "validation first", "last")
    rows = [columns]
    for name, curve in curves.items():
        first, last = curve.mean(slice(0, 1)), curve.mean(slice(-LAST_STEPS, None))
        val = (f"{curve.val_losses[0]:.3f}", f"{curve.val_losses[-1]:.3f}") if curve.val_losses else ("-", "-")
        rows.append((name, f"{sum(curve.tokens):,.0f}", f"{first:.3f}", f"{last:.3f}", *val))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(f"  {line}" for line in lines)


def draw(name: str, curve: Curve, colour: str, path: Path) -> None:
    """One category's curve: every step faint, the running mean strong, validation marked."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(curve.steps, curve.losses, ".", color=colour, alpha=0.25, markersize=4, label="each step")
    axes.plot(curve.steps, curve.smooth(), color=colour, linewidth=2.2, label="running mean")
    if curve.val_losses:
        marks = {"marker": "o", "markersize": 6.5, "markerfacecolor": "white", "markeredgewidth": 1.8}
        axes.plot(curve.val_steps, curve.val_losses, color="#333333", linewidth=0, label="validation", **marks)
    axes.set(title=f"{name}: loss per target token", xlabel="optimizer step", ylabel="negative log-likelihood (nats)")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def last_export(checkpoints: Path) -> Path:
    """The Hugging Face folder of the highest step. Raises ValueError where there is none."""
    found = {
        int(match[1]): path
        for path in checkpoints.glob("global_step_*/huggingface")
        if (match := re.fullmatch(r"global_step_(\d+)", path.parent.name))
    }
    if not found:
        raise ValueError(f"--checkpoints must hold global_step_N/huggingface; got {checkpoints}")
    return found[max(found)]


def first_question(path: Path) -> tuple[str, str]:
    """The first question of a jsonl file and its expected answer, from `messages` or `question` and `answer`."""
    with path.open(encoding="utf-8") as file:
        record = json.loads(file.readline())
    if "messages" in record:
        return record["messages"][0]["content"], record["messages"][1]["content"]
    return record["question"], record["answer"]


def ask(model_folder: Path, question: str, max_new_tokens: int) -> str:
    """The model's greedy answer, by plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--metrics", type=Path, required=True, help="what verl's file logger wrote")
    parser.add_argument("--checkpoints", type=Path, required=True, help="trainer.default_local_dir of the run")
    parser.add_argument("--output", type=Path, required=True, help="folder for the loss curves")
    parser.add_argument("--ask", type=Path, required=True, help="jsonl; its first question is asked")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    curves = read_curves(arguments.metrics)
    print(table(curves))
    for i, (name, curve) in enumerate(curves.items()):
        path = arguments.output / f"loss_{name}.png"
        draw(name, curve, COLOURS[i % len(COLOURS)], path)
        print(f"  curve   {path}")
    model_folder = last_export(arguments.checkpoints)
    print(f"  model   {model_folder}")
    question, expected = first_question(arguments.ask)
    shown = question if len(question) < 300 else "… " + question[-200:]
    print(f"\n  Asked     {shown!r}\n  Expected  {expected!r}")
    print(f"  Answered  {ask(model_folder, question, arguments.max_new_tokens)!r}", flush=True)


if __name__ == "__main__":
    main()

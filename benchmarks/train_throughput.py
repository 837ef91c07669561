"""Compare our training speed with stock verl and LongAlign's methods on the same documents.

    python benchmarks/train_throughput.py --output throughput.json      # step by step, one rank
    python benchmarks/train_throughput.py --table longalign             # epoch by epoch, one rank and two

On a CPU each rank has one thread. In `contest`, contestants take turns on the same documents, step by step, and must
report the same loss. `longalign` times naive, sorted and packed batches on the same documents. README.md beside this
file explains the comparison; contestants.py and methods.py have the contestants, lengths.py the lengths.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # lets the script run by its path

import torch
from tqdm import tqdm

from benchmarks import longalign
from benchmarks.quiet import no_progress_bars
from verl_ext.trainer.distributed import process_group

DEFAULTS = {  # defaults of options that depend on the table
    "contest": {"documents": 40, "budget": 4096, "repeats": 5},
    "longalign": {"documents": 64, "budget": 2048, "repeats": 3},
}
ROW = "{:<13} {:>6} {:>9} {:>8} {:>6} {:>8} {:>9}"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", choices=DEFAULTS, default="contest", help="what is measured")
    parser.add_argument("--documents", type=int, help=f"documents per optimizer step {_default('documents')}")
    parser.add_argument("--budget", type=int, help=f"tokens of a pack, limit of a dynamic batch {_default('budget')}")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="documents of a padded micro-batch")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--repeats", type=int, help=f"measured steps, each on new documents, or epochs {_default('repeats')}"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU, in each rank")
    parser.add_argument("--output", type=Path, help="JSON file")
    contest = parser.add_argument_group("contest")
    contest.add_argument("--contestants", default="padded,dynamic,next_fit,ours", help="also: dynamic_ours, single")
    contest.add_argument("--cost-pairs", type=int, default=5, help="steps with and without category loss; 0: leave out")
    epochs = parser.add_argument_group("longalign")
    on_one = ", ".join(longalign.ON_ONE_RANK)
    epochs.add_argument("--methods", help=f"default: {on_one}; on several ranks {', '.join(longalign.METHODS)}")
    epochs.add_argument("--ranks", default="1,2", help="data-parallel ranks, a table each")
    epochs.add_argument("--steps", type=int, default=4, help="optimizer steps of an epoch")
    options = parser.parse_args(argv)
    options.contestants = options.contestants.split(",")
    options.methods = options.methods.split(",") if options.methods else []
    options.ranks = [int(ranks) if ranks.isdecimal() else 0 for ranks in options.ranks.split(",")]
    for name, value in DEFAULTS[options.table].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    _check(options, parser)
    return options


def _default(name: str) -> str:
    return "(" + ", ".join(f"{table}: {defaults[name]}" for table, defaults in DEFAULTS.items()) + ")"


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for name in ("documents", "micro_batch_size", "layers", "repeats", "threads", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {getattr(options, name)}")
    if options.budget < 256:
        parser.error(f"--budget must be at least 256; got {options.budget}")
    if min(options.ranks) < 1:
        parser.error("--ranks must be whole numbers of at least 1, with commas between them")
    if options.table == "contest" and options.documents % options.micro_batch_size:
        parser.error(f"--documents must be a multiple of --micro-batch-size; got {options.documents}")
    if options.table == "longalign":
        known = (*longalign.METHODS, *longalign.ON_REQUEST)
        if unknown := set(options.methods).difference(known):
            parser.error(f"--methods must be of {', '.join(known)}; got {', '.join(sorted(unknown))}")
        for ranks in options.ranks:
            if options.documents % (options.micro_batch_size * ranks):
                parser.error(
                    f"--documents must be a multiple of --micro-batch-size × {ranks} ranks; got {options.documents}"
                )


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the contest and measure the cost of category losses in a process group, with files below ``folder``."""
    from benchmarks import contest
    from benchmarks.contestants import NAMES, Setting, build_contestants
    from benchmarks.model import VOCABULARY, write_model

    if unknown := set(options.contestants) - set(NAMES):
        raise ValueError(f"--contestants must be of {', '.join(NAMES)}; got {', '.join(sorted(unknown))}")
    no_progress_bars()
    torch.set_num_threads(options.threads)
    write_model(folder / "model", options.hidden, options.layers, options.budget, options.seed)
    group = options.micro_batch_size
    warm_up = max(options.documents // 4 // group, 1) * group
    sizes = [warm_up] + [options.documents] * options.repeats
    steps = contest.make_steps(sizes, options.budget, VOCABULARY, folder, options.seed)
    total = len(steps) + 4 * options.cost_pairs
    setting = Setting(folder / "model", steps[0].folder, folder, options.budget, total)
    contestants = build_contestants(options.contestants, setting, options.micro_batch_size)
    with tqdm(total=len(steps) * len(contestants), unit="step") as bar:
        records = contest.compete(contestants, steps, 1, bar)
    baselines = {name: records[name] for name in ("padded", "dynamic") if name in records}
    return {
        "documents_per_step": options.documents,
        "tokens_per_step": [step.tokens for step in steps[1:]],
        "target_tokens_per_step": [step.target_tokens for step in steps[1:]],
        "contestants": {
            name: {**contest.summary(record, steps[1:], options.budget, baselines), "steps": vars(record)}
            for name, record in records.items()
        },
        "category_loss_cost": _category_loss_cost(options, contestants, steps[-1], records),
    }


def _category_loss_cost(options: argparse.Namespace, contestants: dict, step: Any, records: dict) -> dict | None:
    from benchmarks import collection_cost

    if not options.cost_pairs or "ours" not in contestants:
        return None
    ours = contestants["ours"]
    batch = ours.load(step)
    in_place = collection_cost.in_place(ours, batch, records["ours"].cpu[-1])
    measured = {name: getattr(collection_cost, name) for name in ("whole_steps", "head_measures")}
    return {"in_place": in_place, **{name: cost(ours, batch, options.cost_pairs) for name, cost in measured.items()}}


def _machine() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def report(result: dict[str, Any]) -> str:
    """Format the table for printing."""
    tokens, targets = (result[f"{kind}_per_step"] for kind in ("tokens", "target_tokens"))
    lines = [
        f"{result['documents_per_step']} documents, {sum(tokens) / len(tokens):,.0f} tokens, "
        f"{sum(targets) / len(targets):,.0f} targets a step; {len(tokens)} steps",
    ]
    for clock in ("wall", "cpu"):
        if clock not in next(iter(result["contestants"].values())):
            continue
        lines += ["", f"{clock} time", ROW.format("", "calls", "tokens", "padding", "fill", "s/step", "targets/s")]
        lines[-1] += "   × padded [range]      × dynamic [range]"
        lines += [_row(name, row, clock) for name, row in result["contestants"].items()]
    if cost := result["category_loss_cost"]:
        place, whole = cost["in_place"], cost["whole_steps"]
        low, high = whole["range"]
        lines += ["", f"category loss and report: {place['percent']:.2f} % of a step ({place['seconds'] * 1e3:.1f} ms)"]
        lines[-1] += f"; whole steps with against without: {whole['percent']:+.1f} % [{low:+.1f}, {high:+.1f}]"
        low, high = cost["head_measures"]["quartiles"]
        lines.append(f"token accuracy and entropy: {cost['head_measures']['percent']:+.1f} % of a step")
        lines[-1] += f", quartiles [{low:+.1f}, {high:+.1f}]"
    return "\n".join(lines)


def _row(name: str, row: dict[str, Any], clock: str) -> str:
    fill = "–" if name in ("padded", "single") else f"{row['fill']:.0%}"
    text = ROW.format(
        name,
        f"{row['micro_batches']:.0f}",
        f"{row['tokens_through_model']:,.0f}",
        f"{row['padding_share']:.0%}",
        fill,
        f"{row[clock]['seconds']:.2f}",
        f"{row[clock]['target_tokens_per_second']:,.0f}",
    )
    for other in ("padded", "dynamic"):
        if ratio := row[clock].get(f"ratio_to_{other}"):
            low, high = ratio["range"]
            text += f"   {ratio['median']:5.2f} [{low:5.2f}, {high:5.2f}]"
    return text


def _contest(options: argparse.Namespace) -> dict[str, Any]:
    with process_group(), tempfile.TemporaryDirectory() as folder:
        if torch.distributed.get_world_size() > 1:
            raise ValueError("the contest is between single ranks; start it without torchrun")
        return measure(options, Path(folder))


def main() -> None:
    """Measure, print and write the table."""
    options = arguments()
    torch.set_num_threads(options.threads)
    measured, printed = {"contest": (_contest, report), "longalign": (longalign.table, longalign.report)}[options.table]
    try:
        result = measured(options)
    except ValueError as mistake:
        raise SystemExit(f"error: {mistake}") from None
    print(f"{_machine()}\n{printed(result)}")
    if options.output is not None:
        settings = {**vars(options), "output": None}
        result = {"settings": settings, "machine": _machine(), **result}
        options.output.write_text(json.dumps(result, indent=2, default=float) + "\n")


if __name__ == "__main__":
    main()

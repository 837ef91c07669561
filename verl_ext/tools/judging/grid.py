"""The command `verl-ext grid`: models that were trained and judged once for each seed, in one table.

judged (seed 1)  results.json ──► means of each model by group ──┐
judged (seed 2)  results.json ──► means, differences to `base` ──┴──► mean and interval over the seeds
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from verl_ext.commands.command_line import OutputOptions, command
from verl_ext.files import OutputFolder, write_json
from verl_ext.options import REQUIRED, DataError, must, option
from verl_ext.tables import as_text, pivot
from verl_ext.tools.judging.figures import FiguresByGroup, as_facts, seed_figure
from verl_ext.tools.judging.run import RESULTS, shown

GRID = "grid.json"


@dataclass(frozen=True)
class GridOptions(OutputOptions):
    """Means of models over seeds, and their differences to one of them, with intervals.

    Each folder in `judged` is the output of `verl-ext judge` for the models of one seed, under the same names. A
    difference is taken within a seed, over the same cases, before the mean over the seeds.
    """

    marker: ClassVar[str] = GRID

    judged: list[str] = option(REQUIRED, "folders that verl-ext judge wrote, one for each seed", required=True)
    score: str = option(REQUIRED, "the score", required=True)
    base: str | None = option(None, "the model that the others are compared with; null: the first")

    def problems(self) -> Iterator[str]:
        """Yield a line for each folder that is not a judgement."""
        yield from self.output_problems("the judgements", *self.judged)
        if not self.judged:
            yield must("judged", "name a folder that verl-ext judge wrote", self.judged)
        for number, folder in enumerate(self.judged):
            if Path(folder).resolve() in [Path(other).resolve() for other in self.judged[:number]]:
                yield must("judged", "name each seed's folder once", f"{folder} twice")
            if not Path(folder, RESULTS).is_file():
                yield f"judged must name folders that verl-ext judge wrote; {folder} has no {RESULTS}"


Means = Mapping[str, Mapping[str, float]]  # {model: {group: mean}}


class Judgement(NamedTuple):
    """A seed's means.

    models: of each model. pairs: of the differences "OTHER - FIRST". lacking: the models without a score of some case.
    """

    models: Means
    pairs: Means
    lacking: Collection[str]


def grid(options: GridOptions) -> str:
    """Return and write the tables. Raises DataError for a model or a score that no seed has."""
    judged = [_judgement(folder, options.score) for folder in options.judged]
    seeds = [each.models for each in judged]
    models = list(dict.fromkeys(model for seed in seeds for model in seed))
    if not models:
        raise DataError(must("score", "be one of the judgements", options.score))
    base = options.base or models[0]
    if base not in models:
        raise DataError(must("base", f"be a model of the judgements: {', '.join(models)}", base))
    # Within a seed first: what is hard for a seed's data or start is hard for all of its models.
    less = [_less(each, base, folder) for each, folder in zip(judged, options.judged, strict=True)]
    figures, differences = _figures(seeds), _figures(less)
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        facts = {"models": as_facts(figures), f"differences to {base}": as_facts(differences)}
        write_json(folder.path / GRID, {"score": options.score, "judged": options.judged, **facts})
        folder.publish()
    about = f"{options.score}: means over {len(seeds)} seeds, 95 % t intervals over the seeds"
    fewer = {model: of["all"].cases for model, of in figures.items() if of["all"].cases < len(seeds)}
    about += f" (of {', '.join(f'{model} {count}' for model, count in fewer.items())} alone)" if fewer else ""
    texts = [about, _table("model", figures)]
    texts += [_table(f"difference to {base}", differences)] if any(differences.values()) else []
    return "\n\n".join([*texts, f"written to {options.output_dir}"])


def _judgement(folder: str, score: str) -> Judgement:
    """Return a seed's means of a score."""
    path = Path(folder, RESULTS)

    def means(figures: Mapping[str, Any]) -> Means:
        found = {
            name: {group: float(of[score]["mean"]) for group, of in groups.items() if score in of}
            for name, groups in figures.items()
        }
        return {name: of for name, of in found.items() if of}

    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        figures = {model: facts["figures"] for model, facts in results["models"].items()}
        models, pairs, cases = means(figures), means(results.get("differences", {})), results.get("cases")
        lacking = [model for model in models if figures[model]["all"].get(score, {}).get("cases") != cases]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(must("judged", "name folders that verl-ext judge wrote", f"{path}: {error!r}")) from error
    return Judgement(models, pairs, lacking)


def _less(judged: Judgement, base: str, folder: str) -> Means:
    """Return the differences to the base over the cases of both.

    A judgement has those to its first model; of others, the means tell them if no case is lacking.
    """
    found: dict[str, Mapping[str, float]] = {}
    of_base = judged.models.get(base, {})
    for model, of in judged.models.items() if of_base else ():
        if model == base:
            continue
        if pair := judged.pairs.get(f"{model} - {base}"):
            found[model] = pair
        elif pair := judged.pairs.get(f"{base} - {model}"):
            found[model] = {group: -mean for group, mean in pair.items()}
        elif lacking := [name for name in (base, model) if name in judged.lacking]:
            needed = f"be the first model of {folder}, where cases without a score are left out of both"
            raise DataError(must("base", needed, f"{base}, and {' and '.join(lacking)} has such cases"))
        else:
            found[model] = {group: mean - of_base[group] for group, mean in of.items() if group in of_base}
    return found


def _figures(seeds: Sequence[Means]) -> FiguresByGroup:
    """Return {model: {group: the figure of its means over the seeds that have it}}."""
    values: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        for model, of in seed.items():
            for group, mean in of.items():
                values.setdefault(model, {}).setdefault(group, []).append(mean)
    return {model: {group: seed_figure(means) for group, means in of.items()} for model, of in values.items()}


def _table(corner: str, figures: FiguresByGroup) -> str:
    """Return a row of cells for each model, without groups that hold all cases of every model."""
    cells: dict[tuple[str, str], Any] = {}
    for group in dict.fromkeys(group for of in figures.values() for group in of):
        if group == "all" or any(of[group] != of.get("all") for of in figures.values() if group in of):
            cells |= {(model, group): shown(of[group]) for model, of in figures.items() if group in of}
    return as_text(pivot(corner, cells, missing=shown(None)))


main = command("grid", GridOptions, grid, example="'judged=[seed_1/judged,seed_2/judged]' score=rating output_dir=DIR")

"""The command `verl-ext synthesize`: choose items, ask, write records."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import yaml  # type: ignore[import-untyped]

from verl_ext.commands.command_line import command
from verl_ext.files import OutputFolder
from verl_ext.options import DataError, choice_problem, options_of, refuse
from verl_ext.tools.synthesis.agentwrite import AgentWrite
from verl_ext.tools.synthesis.estimate import estimate_line
from verl_ext.tools.synthesis.glm_long import GLMLong
from verl_ext.tools.synthesis.joined import JoinedDocuments
from verl_ext.tools.synthesis.longalign import LongAlign
from verl_ext.tools.synthesis.options import REPORT, SynthesizeOptions
from verl_ext.tools.synthesis.preferences import Preferences
from verl_ext.tools.synthesis.report import preview_line, spelled_counts
from verl_ext.tools.synthesis.task import SynthesisTask

TASKS: dict[str, type[SynthesisTask]] = {
    cls.name: cls for cls in (LongAlign, GLMLong, JoinedDocuments, AgentWrite, Preferences)
}
SUBCOMMANDS = {name: task.options_class for name, task in TASKS.items()}


def synthesize(kind: type[SynthesisTask], options: SynthesizeOptions) -> str:
    """Make the records of a task; return closing tables; raise UsageError or DataError."""
    task = kind(options)
    total = task.choose()
    if not total:
        left_out = spelled_counts(task.corpus.left_out) or "nothing was there"
        raise DataError(f"sources must hold something to ask about, in its field {task.text_key}; left out: {left_out}")
    if getattr(options, "estimate", False):
        return "\n".join([f"items: {total:,}", estimate_line(task)])

    # The folder appears only if enough items have records; the answers in the store outlive a run that fails.
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        path, outcomes = folder.path / f"{task.name}.jsonl", task.outcomes
        asyncio.run(task.write(path))
        outcomes.check(options)
        report = outcomes.report(task.name, options, task.corpus)
        (folder.path / REPORT).write_text(yaml.safe_dump(report, allow_unicode=True, sort_keys=False), "utf-8")
        with open(path, encoding="utf-8") as file:
            shown = [preview_line(line) for line in islice(file, options.preview)]
        folder.publish()
    told = outcomes.closing_lines(options, report["lengths"], task.corpus.left_out)
    return "\n".join([*told, *shown, *outcomes.costs, f"written to {options.output_dir}"])


def main(arguments: Sequence[str]) -> int:
    """Run the task that the first word names, or task=NAME."""
    named = [word for word in arguments if word.startswith("task=")]
    name, words = named[-1].removeprefix("task=") if named else "", [word for word in arguments if word not in named]
    if words and not named and "=" not in words[0] and words[0] not in ("-h", "--help"):
        name, *words = words
    if not name:
        print("usage: verl-ext synthesize TASK [key=value …]\n")
        about = {task: (kind.__doc__ or "").partition("\n")[0] for task, kind in SUBCOMMANDS.items()}
        print("\n".join(f"  {task:<18}  {line}" for task, line in about.items()))
        print("\nverl-ext synthesize TASK --help lists the options of a task.")
        return 0 if {"-h", "--help"} & {*arguments} else 2
    try:
        refuse([choice_problem("task", name, TASKS), *_of_other_tasks(name, words)])
    except ValueError as error:
        print(f"error: {'; '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    example = "'sources={NAME:FILES}' output_dir=DIR endpoint.base_url=http://localhost:8000/v1 endpoint.model=NAME"
    make = partial(synthesize, TASKS[name])
    run = command(f"synthesize {name}", SUBCOMMANDS[name], make, example, loads_models=lambda each: each.loads_model)
    return run(words or ["--help"])


def _of_other_tasks(name: str, words: Sequence[str]) -> Iterator[str]:
    """Yield a line for each option that only other tasks have."""
    for word in words:
        key = word.partition("=")[0].partition(".")[0]
        having = [task for task, kind in SUBCOMMANDS.items() if key in options_of(kind)]
        if having and name not in having and name in TASKS:
            yield f"{key} is an option of {', '.join(having)}; got {word} with {name}"

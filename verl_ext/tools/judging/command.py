"""The command `verl-ext judge`: benchmarks over one model or several."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.commands.command_line import OutputOptions, command
from verl_ext.files import OutputFolder, write_json
from verl_ext.options import REQUIRED, DataError, must, option
from verl_ext.overrides import quoted
from verl_ext.text.tokens.tokenizer import ModelOptions, load_tokenizer
from verl_ext.tools.endpoint.client import Client, EndpointOptions
from verl_ext.tools.endpoint.spending import spent
from verl_ext.tools.endpoint.store import Store
from verl_ext.tools.judging.chat import ChatBenchOptions, LongBenchChat
from verl_ext.tools.judging.eval_prompts import EvalOptions, EvalPrompts
from verl_ext.tools.judging.figures import as_facts
from verl_ext.tools.judging.page import write_judged
from verl_ext.tools.judging.recall import BABILong, BABILongPrompts, Needle, NeedleOptions
from verl_ext.tools.judging.run import (
    RESULTS,
    JudgedModels,
    cell_tables,
    difference_table,
    differences_of,
    figures_of,
    judge_model,
    results,
    table,
    write_model,
)
from verl_ext.tools.judging.task import Case, Task
from verl_ext.tools.judging.under_test import LocalModel, Predictions, model_paths
from verl_ext.tools.judging.writing import LongBenchWrite, LongWriteRuler

PAGE = "page.html"
TASKS: dict[str, type[Task]] = {
    "longbench_write": LongBenchWrite,
    "longwrite_ruler": LongWriteRuler,
    "longbench_chat": LongBenchChat,
    "needle": Needle,
    "babilong": BABILong,
    "prompts": EvalPrompts,
}


@dataclass(frozen=True)
class JudgeEndpoint(EndpointOptions):
    """The server and the model that judge."""

    prefix: ClassVar[str] = "judge"


@dataclass(frozen=True)
class JudgeOptions(OutputOptions):
    """Scores of answers to a benchmark: results.json, page.html, and answers.jsonl.

    A model under test is behind `endpoint`, in a folder (`models`), or has answered before (`predictions`). `store`
    keeps finished answers and verdicts, so the same command continues a run that stopped and pays for none twice.
    """

    marker: ClassVar[str] = RESULTS
    gone: ClassVar[Mapping[str, str]] = {"lengths": "no cases are shipped: give a benchmark's file in cases"}

    task: str = option(REQUIRED, "the benchmark", choices=tuple(TASKS), required=True)
    cases: str = option(
        REQUIRED,
        "longbench_write.jsonl, longwrite_ruler.jsonl or test_cases.json; for needle a text or a folder of texts; for"
        " babilong its JSON files; for prompts a file or a folder of chats",
        required=True,
    )
    limit: int | None = option(None, "number of first cases to run; null: all", least=1)
    endpoint: EndpointOptions = option(EndpointOptions, "the server of the model under test")
    models: dict[str, Any] = option({}, "name: folder of a model with a chat template, or checkpoint of a run")
    predictions: dict[str, Any] = option({}, "name: pred.jsonl of LongWriter or EvalScope, or an answers.jsonl")
    judge: JudgeEndpoint = option(JudgeEndpoint, "the judge; without one longbench_write scores lengths alone")
    judge_prompt: str | None = option(
        None,
        "file with the judge's prompt, with $INST$ and $RESPONSE$, or $QUESTION$, $REFERENCE$, $SHOTS$ and $ANSWER$;"
        " null: the built-in prompt",
    )
    temperature: float | None = option(None, "temperature of the models under test; null: the benchmark's own", least=0)
    max_tokens: int | None = option(None, "maximum number of tokens of an answer; null: the benchmark's own", least=1)
    seed: int = option(42, "seed of the answers", least=0)
    store: str | None = option(None, "file of finished answers and verdicts; null: OUTPUT_DIR.store")
    max_failed: float = option(0.0, "share of a model's cases that may lack a score with exit code 0", least=0, most=1)
    chat: ChatBenchOptions = option(ChatBenchOptions, "options of longbench_chat")
    needle: NeedleOptions = option(NeedleOptions, "options of needle")
    babilong: BABILongPrompts = option(BABILongPrompts, "options of babilong")
    eval: EvalOptions = option(EvalOptions, "options of prompts")
    model: ModelOptions = option(ModelOptions, "the tokenizer of needle.lengths and chat.max_prompt_tokens")

    def problems(self) -> Iterator[str]:
        """Yield a line for each mistake visible without a server."""
        yield from self.output_problems("the cases", self.cases)
        if not (self.models or self.predictions or self.endpoint.base_url):
            yield must("models, predictions or endpoint.base_url", "name a model to judge", "none of them")
        if self.endpoint.base_url or self.endpoint.model:
            yield from self.endpoint.endpoint_problems()
        if self.judge.base_url or self.judge.model or TASKS[self.task].needs_judge:
            yield from self.judge.endpoint_problems()
        if self.judge_prompt is not None and not Path(self.judge_prompt).is_file():
            yield must("judge_prompt", "be an existing file", self.judge_prompt)
        for name, needed in TASKS[self.task].needed.items():
            if getattr(self.of_task, name) is None:
                yield must(f"{self.of_task.prefix}.{name}", needed, "nothing")
        if self.counts_tokens:
            yield from self.model.tokenizer_problems()
        if not os.path.exists(self.cases):
            yield must("cases", "be a file or a folder of yours, none is shipped", self.cases)
        names = [*self.models, *self.predictions, *([str(self.endpoint.model)] if self.endpoint.base_url else [])]
        for name in names:
            if names.count(name) > 1 or ("/" in name and name != self.endpoint.model):
                yield must("models and predictions", "have names of their own, without a slash", name)

    @property
    def of_task(self) -> Any:
        """The benchmark's own options; None if it has none."""
        return getattr(self, TASKS[self.task].node, None)

    @property
    def counts_tokens(self) -> bool:
        """Whether lengths or limits in tokens need a tokenizer."""
        return getattr(self.of_task, "counts_tokens", False)


def judge(options: JudgeOptions) -> str:
    """Ask, judge and write; return the table of all cases.

    Raises UsageError; DataError, also if more than `max_failed` of a model's cases lack scores. Messages have one line.
    """
    for endpoint in (options.endpoint, options.judge):  # a mistake in the prices ends the run before any request
        if endpoint.base_url:
            endpoint.read_price()
    tokenizer = load_tokenizer(options.model) if options.counts_tokens else None
    task = TASKS[options.task](options.cases, options.of_task, tokenizer, options.judge_prompt)
    cases = list(islice(task.cases(), options.limit))
    # The store lies beside the output, so the answers that were paid for survive a run that writes no output.
    with Store(options.store or f"{options.output_dir}.store", "store") as store:
        judged, costs = asyncio.run(_judged(options, task, cases, store))
    figures, differences = figures_of(judged, task), differences_of(judged, task)
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        for name, rows in judged.items():
            write_model(folder.path / name.replace("/", "_"), task, rows)
        facts = {"task": options.task, "cases": len(cases), "judge": options.judge.model}
        pairs = {pair: as_facts(of_pair) for pair, of_pair in differences.items()}
        write_json(folder.path / RESULTS, {**facts, "models": results(judged, figures), "differences": pairs})
        write_judged(folder.path / PAGE, f"verl-ext judge {options.task}", task, judged, figures, differences)
        folder.publish()
    told = filter(None, [table(judged, figures), difference_table(differences), cell_tables(judged, task)])
    text = "\n".join([*told, "", *costs, f"written to {options.output_dir}"])
    # The files are published before a failure is raised: the scores that exist can be looked at.
    for name, rows in judged.items():
        missing = [row for row in rows if not row.scores or None in row.scores.values()]
        if len(missing) > options.max_failed * len(rows):
            print(text)
            first = missing[0]
            reason = next((v.reason for v in first.verdicts if not v.is_done), first.answer.reason)
            raise DataError(
                f"{len(missing)} of {len(rows)} cases of {name} have no score, more than max_failed="
                f"{options.max_failed:g}; the first: case {first.case.name}, {first.outcome}: {reason}"
            )
    return text


async def _judged(
    options: JudgeOptions, task: Task, cases: Sequence[Case], store: Store
) -> tuple[JudgedModels, list[str]]:
    """Return each model's judged cases, and lines about requests and costs."""
    given: dict[str, Any] = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    sampling = replace(task.sampling, seed=options.seed, **{k: v for k, v in given.items() if v is not None})
    models: dict[str, Any] = {}
    for name, path in model_paths(options.predictions, "predictions").items():
        models[name] = Predictions(path, f"predictions.{name}")
    for name, path in model_paths(options.models, "models").items():
        models[name] = LocalModel(path, store, f"models.{name}")
    served = {str(options.endpoint.model): Client(options.endpoint, store)} if options.endpoint.base_url else {}
    judged = {}
    async with AsyncExitStack() as stack:
        asks_judge = options.judge.base_url and task.asks_judge
        judge = await stack.enter_async_context(Client(options.judge, store)) if asks_judge else None
        for name, model in {**models, **served}.items():
            clients = [client for client in (served.get(name), judge) if client is not None]
            async with model:
                judged[name] = await judge_model(name, task, cases, model, sampling, judge, clients)
    costs = [f"{name}: {spent(client)}" for name, client in served.items()]
    costs += [f"judge {options.judge.model}: {spent(judge)}"] if judge else []
    return judged, costs


main = command(
    "judge",
    JudgeOptions,
    judge,
    example="MODEL task=longbench_write cases=FILE output_dir=DIR [models.NAME=DIR …]",
    loads_models=lambda options: bool(options.models),
    first=lambda word: f"models={{{quoted(Path(word).resolve().name)}:{quoted(word)}}}",
)

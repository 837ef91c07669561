"""Runs of samples: how a file is cut into jobs, and what a process does with one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from verl_ext.commands.tokenizer import ModelConfig, load_tokenizer
from verl_ext.data.babilong.background import Background
from verl_ext.data.babilong.samples import SampleMaker, SampleOptions
from verl_ext.data.babilong.sizes import Size
from verl_ext.data.babilong.tokens import TokenCounter

JOB_TOKENS = 500_000  # of a job, about: a second or two of work
MOST_SAMPLES = 500


@dataclass(frozen=True)
class Job:
    """Samples first to end - 1 of one file."""

    task: str
    size: Size
    first: int
    end: int


class Workshop:
    """What samples are made with, the same in every process; backgrounds by size label."""

    def __init__(self, counter: TokenCounter, options: SampleOptions, backgrounds: Mapping[str, Background]) -> None:
        self.counter = counter
        self.options = options
        self.backgrounds = backgrounds
        self._makers: dict[tuple[str, Size], SampleMaker] = {}

    def records(self, job: Job) -> list[str]:
        """The job's samples, each as one line of JSON."""
        maker = self._makers.get((job.task, job.size))
        if maker is None:
            background = self.backgrounds.get(job.size.label)
            maker = SampleMaker(job.task, job.size, self.options, self.counter, background)
            self._makers[job.task, job.size] = maker
        return [json.dumps(maker.sample(number), ensure_ascii=False) for number in range(job.first, job.end)]


def load_workshop(model: ModelConfig, options: SampleOptions, backgrounds: Mapping[str, Background]) -> Workshop:
    """A workshop with a tokenizer of its own: not every tokenizer can be sent to another process."""
    return Workshop(TokenCounter(load_tokenizer(model)), options, backgrounds)


def jobs_of(task: str, size: Size, samples: int, target: int) -> list[Job]:
    """A file's samples cut into jobs of about JOB_TOKENS tokens."""
    step = max(1, min(MOST_SAMPLES, JOB_TOKENS // max(target, 1)))
    return [Job(task, size, first, min(first + step, samples)) for first in range(0, samples, step)]

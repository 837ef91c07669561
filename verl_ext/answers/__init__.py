"""Evaluation by answers: prompts, answers, and their scores.

    file or tokenized folder ──prompts──► Prompt ──generation──► text ──scores──► a number ≥ 0

The trainer shares prompts among ranks and logs the mean scores (verl_ext.trainer.answers).
"""

from verl_ext.answers.options import AnswerOptions
from verl_ext.answers.prompts import Prompt, Prompts

"""The data that a run reads: training, validation, and prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.answers.prompts import Prompts
from verl_ext.config.check import model_positions
from verl_ext.config.model import model_kind
from verl_ext.config.run import RunConfig
from verl_ext.data.chats import tokens_added
from verl_ext.data.dataset import PackDataset, open_datasets
from verl_ext.data.options import RunLength
from verl_ext.options import first_line, spell
from verl_ext.packing import CostModel
from verl_ext.text.tokens.new_tokens import KEYS, add_tokens
from verl_ext.trainer.step_plan import StepPlan


def open_sets(config: RunConfig) -> tuple[PackDataset, PackDataset | None]:
    """Open training and validation sets (None without), and plan their packs."""
    steps = config.trainer.total_training_steps
    length = RunLength(steps and steps * config.data.train_batch_size, config.trainer.total_epochs or 1)
    tokenizer = _tokenizer(config.model_options) if config.dataset_class.needs_tokenizer else None
    return open_datasets(config.dataset_class, config.values["data"], tokenizer, length, config.trainer.eval_only)


def open_prompts(config: RunConfig, hf_config: Any, folders: Sequence[str]) -> Prompts | None:
    """Read `eval.prompts` (None: none), given the training data's folders."""
    options = config.eval
    if options.prompts is None:
        return None
    prompts = Prompts.read(options, _tokenizer(config.model_options), folders)
    positions = model_positions(hf_config) if options.asks_model and model_kind(config.values).needs_positions else None
    if positions is not None and prompts.longest + options.max_new_tokens > positions:
        raise ValueError(
            f"eval.max_new_tokens must be at most {positions - prompts.longest}, what the longest prompt of "
            f"eval.prompts leaves of the model's {positions} positions; got {options.max_new_tokens}"
        )
    return prompts


def new_token_problem(config: RunConfig, dataset: PackDataset) -> str | None:
    """Return a line for a folder that was tokenized with other new tokens than the model gets."""
    model = config.model_options
    given = [*model.new_tokens, *model.new_special_tokens]
    made_with = [(folder, tokens_added(folder)) for folder in dataset.folders]
    compared = [(folder, made) for folder, made in made_with if made is not None and (made or given)]
    vocabulary = _tokenizer(model).get_vocab() if compared else {}
    for folder, made in compared:
        if any(vocabulary.get(token) != number for token, number in made.items()) or {*given} - {*made}:
            must = f"{' and '.join(KEYS)} must be those that {dataset.key} was tokenized with, {spell([*made])}"
            return f"{must}; got {spell(given)} for {folder}: verl-ext tokenize with these makes it again"
    return None


def reopened(facts: Mapping[str, Any]) -> tuple[PackDataset, StepPlan, CostModel]:
    """Open a run's training set, step plan and cost model from run.json.

    Raises:
        ValueError: the data cannot be opened any more, or differs from the data that the run was trained on.
    """
    config, plan, cost = RunConfig.from_composed(facts["config"]), dict(facts["plan"]), CostModel(*facts["cost"])
    train_set, _ = open_sets(config)
    if len(train_set) != plan["num_packs"] or train_set.digest != facts["digest"]:
        raise ValueError(f"{train_set.key} must hold the documents that the run was trained on; they differ")
    costs = train_set.facts(cost).costs if plan.pop("is_balanced") else None
    return train_set, StepPlan(**plan, costs=costs), cost


def _tokenizer(model: Any) -> Any:
    from verl.utils import hf_tokenizer

    from verl_ext.text.tokens.tokenizer import (  # here, because only some datasets read text
        check_round_trip,
        check_tokenizer,
    )

    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    path = model.tokenizer_path or model.path
    try:
        tokenizer = hf_tokenizer(path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # files of no tokenizer, or of one of a later version, fail in many ways
        raise ValueError(f"{key} must hold a tokenizer; got {path} ({first_line(error)})") from None
    check_tokenizer(tokenizer, path, key)
    check_round_trip(tokenizer, path, key)
    add_tokens(tokenizer, model.new_tokens, model.new_special_tokens, path)
    return tokenizer

"""The cost of requests, and a progress bar over questions."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from verl_ext.options import UsageError, choice_problem, first_line, must, reason_of, refuse
from verl_ext.progress import four_digits, progress_bar
from verl_ext.tools.endpoint.answer import Usage
from verl_ext.tools.endpoint.client import Client, EndpointOptions

_KINDS = ("input", "cached", "output")


@dataclass(frozen=True)
class Price:
    """The prices of a million prompt, cached, and generated tokens."""

    input: float
    cached: float
    output: float

    def of(self, usage: Usage) -> float:
        """Return the cost of requests, in the currency of the prices."""
        prompt, cached, output = usage.as_tuple()
        return ((prompt - cached) * self.input + cached * self.cached + output * self.output) / 1e6


def read_price(options: EndpointOptions) -> Price | None:
    """Return the model's price from the prices file; None without one.

    Cached tokens cost `input` by default. Raises `UsageError` if the file cannot be read, lacks the model, or has an
    unknown entry or a malformed number.
    """
    if options.prices is None:
        return None
    key = f"{options.prefix}.prices"
    try:
        table = yaml.safe_load(Path(options.prices).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = reason_of(error) if isinstance(error, OSError) else first_line(error)
        raise UsageError(must(key, "be a YAML file of prices", f"{options.prices}: {why}")) from error
    if not isinstance(table, Mapping) or not all(isinstance(entry, Mapping) for entry in table.values()):
        raise UsageError(must(key, "map models to their prices, {MODEL: {input: 2.5, output: 10}}", repr(table)))
    try:
        refuse([choice_problem(f"{key}: the model", options.model, map(str, table))])
        entry = {"cached": table[options.model].get("input"), **table[options.model]}
        refuse(choice_problem(f"{key}.{options.model}", name, _KINDS) for name in entry)
        for name in _KINDS:
            value = entry.get(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(must(f"{key}.{options.model}.{name}", "be a number of at least 0", value))
    except ValueError as error:
        raise UsageError(f"{first_line(error)}, in {options.prices}") from error
    return Price(*(float(entry[name]) for name in _KINDS))


class QuestionProgress:
    """A progress bar with requests/s, tokens, cost and the time left.

    clients: those that answer questions about the items, with their prices; none if a local model answers.
    """

    def __init__(self, clients: Sequence[tuple[Client, Price | None]], total: int, description: str) -> None:
        self._clients, self._started = clients, time.monotonic()
        self._before = sum(client.requests for client, _ in clients)
        self.bar = progress_bar(description, total, bar_format="{desc}: starting")

    def __enter__(self) -> "QuestionProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def item_done(self) -> None:
        """Count one item."""
        line = ""  # short, because a log has 80 columns
        if self._clients:
            requests = sum(client.requests for client, _ in self._clients) - self._before
            tokens = sum(client.usage.prompt_tokens + client.usage.completion_tokens for client, _ in self._clients)
            rate = four_digits(requests / max(time.monotonic() - self._started, 1e-9))
            line = f" {rate} requests/s, {four_digits(tokens)} tokens,"
        priced = [price.of(client.usage) for client, price in self._clients if price]
        cost = f" cost {_amount(sum(priced))}," if priced else ""
        self.bar.bar_format = f"{{desc}}: {{n_fmt}}/{{total_fmt}},{line}{cost} {{remaining}} left"
        self.bar.update(1)


def spent(client: Client, price: Price | None) -> str:
    """Return a line about a client's requests, their tokens and their cost."""
    prompt, cached, output = client.usage.as_tuple()
    line = f"{client.requests:,} requests, {client.retries:,} sent again, {client.from_store:,} from the store; "
    line += f"{prompt:,} prompt tokens ({cached:,} cached), {output:,} written"
    if price is not None:
        line += f", cost {_amount(price.of(client.usage))}"
    return line + (f", {client.without_usage:,} answers not counted" if client.without_usage else "")


def _amount(cost: float) -> str:
    """Return a cost with two decimals, or two digits if small."""
    return f"{cost:.2f}" if cost >= 0.1 or not cost else f"{cost:.2g}"

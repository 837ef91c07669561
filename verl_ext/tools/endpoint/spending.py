"""The cost of requests, and a progress bar over questions."""

import time
from collections.abc import Sequence

from verl_ext.progress import four_digits, progress_bar
from verl_ext.tools.endpoint.client import Client


class QuestionProgress:
    """A progress bar with requests/s, tokens, cost and the time left.

    clients: those that answer questions about the items; none if a local model answers.
    """

    def __init__(self, clients: Sequence[Client], total: int, description: str) -> None:
        self._clients, self._started = clients, time.monotonic()
        self._before = sum(client.requests for client in clients)
        self.bar = progress_bar(description, total, bar_format="{desc}: starting")

    def __enter__(self) -> "QuestionProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def item_done(self) -> None:
        """Count one item."""
        line = ""  # short, because a log has 80 columns
        if self._clients:
            requests = sum(client.requests for client in self._clients) - self._before
            tokens = sum(client.usage.prompt_tokens + client.usage.completion_tokens for client in self._clients)
            rate = four_digits(requests / max(time.monotonic() - self._started, 1e-9))
            line = f" {rate} requests/s, {four_digits(tokens)} tokens,"
        priced = [client.price.of(client.usage) for client in self._clients if client.price]
        cost = f" cost {_amount(sum(priced))}," if priced else ""
        self.bar.bar_format = f"{{desc}}: {{n_fmt}}/{{total_fmt}},{line}{cost} {{remaining}} left"
        self.bar.update(1)


def spent(client: Client) -> str:
    """Return a line about a client's requests, their tokens and their cost."""
    prompt, cached, output = client.usage.as_tuple()
    line = f"{client.requests:,} requests, {client.retries:,} sent again, {client.from_store:,} from the store; "
    line += f"{prompt:,} prompt tokens ({cached:,} cached), {output:,} written"
    if client.price is not None:
        line += f", cost {_amount(client.price.of(client.usage))}"
    return line + (f", {client.without_usage:,} answers not counted" if client.without_usage else "")


def _amount(cost: float) -> str:
    """Return a cost with two decimals, or two digits if small."""
    return f"{cost:.2f}" if cost >= 0.1 or not cost else f"{cost:.2g}"

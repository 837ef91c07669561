"""What a run will ask and cost, estimated from its items before anything is asked.

The tokens of documents are counted. Assumed are answers of ANSWER tokens, prompts of PROMPT tokens beside the text, and
TOKENS_A_WORD tokens of a written word, in paragraphs of PARAGRAPH words.
"""

from verl_ext.tools.endpoint.answer import Usage
from verl_ext.tools.synthesis.task import SynthesisTask

ANSWER, PROMPT, TOKENS_A_WORD, PARAGRAPH = 400, 150, 1.4, 500


def estimate_line(task: SynthesisTask) -> str:
    """Return a line about the requests for all items, their tokens and their cost."""
    requests, totals = 0.0, [0.0, 0.0, 0.0]
    for item in task.corpus.items():
        for number, usage in task.requests(item):
            requests += number
            totals = [total + number * tokens for total, tokens in zip(totals, usage.as_tuple(), strict=True)]
    usage, price = Usage(*map(round, totals)), task.options.endpoint.read_price()
    prompt, cached, output = usage.as_tuple()
    cost = f", cost {price.of(usage):,.2f}" if price is not None else ""
    tokens = f"{prompt:,} prompt tokens ({cached:,} of them a second time), {output:,} written"
    return f"estimate: about {requests:,.0f} requests, {tokens}{cost}; nothing was asked"

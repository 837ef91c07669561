"""The documents that packs omit, change or have without targets."""

from dataclasses import dataclass

NO_CATEGORY = "(none)"


@dataclass
class OmittedDocuments:
    """The documents of one category that one reason changes or leaves out.

    The reasons are `drop`, `truncate`, `split` (longer than a pack), `empty` (no token, left out), `beyond
    max_samples`, `not drawn` (by data.mixture; also a split document with a piece in no pack), and `no target` (in the
    packs, with nothing to learn from; cut documents are included).

    A cut BABILong prompt has the reason `context truncated` or `question truncated`, and a cut pretraining text has
    `truncated to max_length`; their tokens are those before the cut. The only document of a stream may be `cut into
    training and validation`; the tokens removed lie between the two. A record without a document has `bad record: …`,
    and one with names of special tokens has `special tokens encoded as text`. `file left out: .log` counts files of the
    data's folders. For reasons other than length, the
    category is that of the document's record, which is known if verl-ext tokenized it.
    """

    category: str
    reason: str
    documents: int = 0
    tokens: int = 0
    share: float = 0.0  # share of the tokens of all documents of the set
    tokens_kept: int = 0
    tokens_removed: int = 0  # over all rows, the tokens that no pack holds, each counted once

"""What Hydra's reading of `key=value` does not tell: the keys that a dict has twice, of which it keeps the last."""

from collections import Counter
from typing import Any

from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_parser import create_functions
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser


def repeated_keys(override: str) -> list[str]:
    """The keys that stand more than once in one dict, as in sources={a:one.txt,a:two.txt}, in their order.

    `override` is one that Hydra can parse.
    """
    visitor = _DictKeys()
    visitor.visit(OverrideParser(CommonTokenStream(OverrideLexer(InputStream(override)))).override())
    return visitor.repeated


class _DictKeys(HydraOverrideVisitor):
    """Hydra's own reading of an override, which notes the keys that its dicts lose."""

    def __init__(self) -> None:
        super().__init__(create_functions())
        self.repeated: list[str] = []

    def visitDictContainer(self, ctx: Any) -> dict[str, Any]:
        counts = Counter(str(self.visitDictKey(pair.dictKey())) for pair in ctx.dictKeyValuePair())
        self.repeated += [key for key, count in counts.items() if count > 1]
        return super().visitDictContainer(ctx)

"""Keys that a dict of an override has twice, of which Hydra keeps the last: sources={a:one.txt,a:two.txt}."""

from collections import Counter
from typing import Any

from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_parser import create_functions
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser


def repeated_keys(override: str) -> list[str]:
    """The keys that stand more than once in one dict, in the order of their places. `override` is one that parses."""
    parser = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(override))))
    visitor = _DictKeys()
    visitor.visit(parser.override())
    return visitor.repeated


class _DictKeys(HydraOverrideVisitor):
    """Hydra's own reading of an override, which notes the keys that its dicts lose."""

    def __init__(self) -> None:
        super().__init__(create_functions())
        self.repeated: list[str] = []

    def visitDictContainer(self, ctx: Any) -> dict[str, Any]:
        """Note a dict's repeated keys."""
        counts = Counter(str(self.visitDictKey(pair.dictKey())) for pair in ctx.dictKeyValuePair())
        self.repeated += [key for key, count in counts.items() if count > 1]
        return super().visitDictContainer(ctx)

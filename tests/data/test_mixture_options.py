"""Valid values of `data.mixture`, and the one-line error for each invalid value."""

import pytest
from omegaconf import OmegaConf

from tests.lib.errors import refused
from verl_ext.data.packs.mixture import MixtureOptions
from verl_ext.packing.mixture import MixtureSource


def read(text):
    return MixtureOptions.read(OmegaConf.create(text))


def test_a_mixture_is_read_from_yaml():
    options = read(
        "{scale: 0.5, sources: {a: {tokens: 4e9}, b: {weight: 2, train_dir: [/x, /y/../z]},"
        " c: {tokens: 10, intervals: [0, 8]}}}"
    )
    assert options.budgets == (
        MixtureSource("a", tokens=4e9),
        MixtureSource("b", weight=2),
        MixtureSource("c", tokens=10, edges=(0, 8)),
    )
    assert options.folders == (None, ("/x", "/z"), None)
    assert (options.scale, options.total_tokens) == (0.5, None)


@pytest.mark.parametrize(
    ("text", "things"),
    [
        ("{sources: {a: {token: 5}}}", ("data.mixture.sources.a.token", "nearest: data.mixture.sources.a.tokens")),
        ("{source: {a: {tokens: 5}}}", ("data.mixture.source", "nearest: data.mixture.sources")),
        ("{sources: {a: {tokens: 5, interval: [1, 2]}}}", ("nearest: data.mixture.sources.a.intervals",)),
        ("{sources: {a: {tokens: 5, weight: 1}}}", ("data.mixture.sources.a", "tokens=5, weight=1")),
        ("{sources: {a: {}}}", ("data.mixture.sources.a", "tokens or weight", "none")),
        ("{sources: {a: 5}}", ("data.mixture.sources.a", "mapping", 5)),
        ("{sources: {}}", ("data.mixture.sources", "{}")),
        ("{sources: {a: {tokens: .inf}}}", ("data.mixture.sources.a.tokens", 9007199254740992, "inf")),
        ("{total_tokens: 9, sources: {a: {tokens: 5}}}", ("data.mixture.total_tokens", "weight", 9)),
        ("{sources: {a: {tokens: 5, intervals: [8, 8]}}}", ("data.mixture.sources.a.intervals", "[8, 8]")),
        ("{sources: {a: {tokens: 5, train_dir: '???'}}}", ("data.mixture.sources.a.train_dir", "nothing")),
    ],
)
def test_a_mistake_in_the_mixture_is_told_with_its_key(text, things):
    with refused(*things):
        read(text)


def test_all_mistakes_are_told_together():
    with refused("data.mixture.scale", 0, alone=False) as told:
        read("{scale: 0, sources: {a: {token: 5}, b: {tokens: 5, weight: 5}}}")
    assert len(str(told.value).splitlines()) == 3

"""Valid values of `data.mixture`, and the one-line error for each invalid value."""

import pytest
from omegaconf import OmegaConf

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
    ("text", "line"),
    [
        (
            "{sources: {a: {token: 5}}}",
            "unknown key data.mixture.sources.a.token; nearest: data.mixture.sources.a.tokens",
        ),
        ("{source: {a: {tokens: 5}}}", "unknown key data.mixture.source; nearest: data.mixture.sources"),
        ("{sources: {a: {tokens: 5, interval: [1, 2]}}}", "nearest: data.mixture.sources.a.intervals"),
        ("{sources: {a: {tokens: 5, weight: 1}}}", "a must have either tokens or weight; got tokens=5, weight=1"),
        ("{sources: {a: {}}}", "data.mixture.sources.a must have either tokens or weight; got none of them"),
        ("{sources: {a: 5}}", "data.mixture.sources.a must be a mapping, e.g. {tokens: 4.0e9}; got 5"),
        ("{sources: {}}", "data.mixture.sources must name at least one source"),
        ("{sources: {a: {tokens: .inf}}}", "data.mixture.sources.a.tokens must be at most 9007199254740992; got inf"),
        ("{total_tokens: 9, sources: {a: {tokens: 5}}}", "data.mixture.total_tokens must be null where no source has"),
        ("{sources: {a: {tokens: 5, intervals: [8, 8]}}}", "of tokens, e.g. [8192, 16384]; got [8, 8]"),
        (
            "{sources: {a: {tokens: 5, train_dir: '???'}}}",
            "a.train_dir must name a tokenized dataset folder; got nothing",
        ),
    ],
)
def test_a_mistake_in_the_mixture_is_told_with_its_key(text, line):
    with pytest.raises(ValueError, match=r"data\.mixture") as told:
        read(text)
    assert line in str(told.value)
    assert "\n" not in str(told.value)


def test_all_mistakes_are_told_together():
    with pytest.raises(ValueError, match=r"data\.mixture") as told:
        read("{scale: 0, sources: {a: {token: 5}, b: {tokens: 5, weight: 5}}}")
    assert len(str(told.value).splitlines()) == 3

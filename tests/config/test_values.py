"""Options dataclasses: type, default, check and meaning of each option stated once, and mistakes in one line each."""

import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.lib.errors import names, refused
from verl_ext.options import Options, nearest_key, option, options_of, unknown, whole_number


@dataclass(frozen=True)
class Inner(Options):
    prefix: ClassVar[str] = "outer.inner"
    path: str = option(None, "a folder", required=True)


@dataclass(frozen=True)
class Outer(Options):
    prefix: ClassVar[str] = "outer"
    size: int = option(8, "tokens", least=2, most=64)
    rate: float = option(0.5, "a share", above=0, most=1)
    limit: int | None = option(None, "null: none", least=1)
    kind: str = option("plain", "which", choices=("plain", "packed"))
    on: bool = option(False, "whether")
    names: list[str] = option(["a"], "some")
    anything: Any = option(None, "of any type")
    inner: Inner | None = option(None, "a node")

    def problems(self):
        if self.limit is not None and self.limit > self.size:
            yield f"outer.limit must be at most outer.size={self.size}; got {self.limit}"


@pytest.mark.parametrize(
    ("given_values", "things"),
    [
        ({"size": 1}, ("outer.size", 2, 1)),
        ({"rate": float("nan")}, ("outer.rate", 0, "nan")),
        ({"limit": 9}, ("outer.limit", "outer.size=8", 9)),
        ({"kind": "packd"}, ("outer.kind", "plain, packed", "packd", "nearest: packed")),
        ({"names": ["a", 1]}, ("outer.names", "texts", "['a', 1]")),
        ({"inner": {"path": ""}}, ("outer.inner.path", "a folder", "")),
    ],
)
def test_a_value_that_is_not_allowed_is_one_line(given_values, things):
    with refused(*things):
        Outer.read(given_values)


def test_all_mistakes_come_together_and_those_of_several_options_after_them():
    with pytest.raises(ValueError, match=r"\S") as raised:
        Outer.read({"size": 0, "kind": "x", "limit": 9, "inner": {"path": None}})
    keys = [line.split()[0] for line in str(raised.value).splitlines()]
    assert keys == ["outer.size", "outer.kind", "outer.inner.path"]  # limit against size waits for a size


def test_options_are_read_from_a_config_node_and_other_keys_are_left_alone():
    node = OmegaConf.create({"size": 16, "rate": 1, "limit": "???", "theirs": 3, "kind": "${which}", "which": "packed"})
    assert Outer.read(node) == Outer(16, 1.0, kind="packed")
    assert Outer.read(node, size=32, kind=None).size == 32


def test_options_cannot_change_share_no_list_and_go_to_other_processes_as_they_are():
    assert Outer().names is not Outer().names
    assert options_of(Outer)["names"].default == ["a"]
    options = Outer(size=9, names=["b"], inner=Inner("x"))
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(FrozenInstanceError):
        options.size = 10


@pytest.mark.parametrize(("value", "things"), [("3", ("whole number", 3)), (True, (True,)), (0, (1, 0))])
def test_a_whole_number_is_one_of_any_kind(value, things):
    assert type(whole_number("n", np.int64(3), least=1)) is int
    with refused("n", *things):
        whole_number("n", value, least=1)


@given(st.integers(2, 64), st.floats(0.01, 1))
def test_every_value_within_its_bounds_is_kept_and_a_name_that_reads_as_a_number_is_a_text(size, rate):
    made = Outer.read({"size": size, "rate": rate, "inner": {"path": 7}})
    assert (made.size, made.rate, made.inner) == (size, rate, Inner("7"))


def test_the_nearest_key_prefers_the_same_name_then_the_same_node():
    keys = ["data.max_tokens", "data.max_length", "trainer.seed"]
    assert nearest_key("trainer.max_tokens", keys) == "data.max_tokens"
    assert nearest_key("data.max_tokenz", keys) == "data.max_tokens"
    assert nearest_key("nothing.like_it_at_all", keys) is None
    assert nearest_key("path", ["model.lora.path", "model.path", "data.path"]) == "data.path"  # of the shallowest


def test_an_unknown_key_is_one_sentence_wherever_it_is_found():
    many = [f"option_{number}" for number in range(30)]
    assert names(unknown("lrr", ["lr", "betas"], node="optim"), "optim.lrr", "nearest: optim.lr")
    assert names(unknown("mode", ["loss.mode", *many]), "mode", "nearest: loss.mode")
    assert names(unknown("zzz", ["lr", "betas"], node="optim"), "optim.zzz", "optim.lr, optim.betas")
    assert names(unknown("zzz", many, owner="Qwen3Config"), "zzz", "Qwen3Config")
    assert names(unknown("old_nam", ["old_name"], renamed={"old_name": "new"}), "old_nam", "nearest: new")

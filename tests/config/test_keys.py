"""The table of verl's keys has one row a key, and verl has the keys of its rows."""

from collections import Counter

from verl_ext.config import schema
from verl_ext.config.keys import KEYS


def test_a_key_has_one_row():
    assert [name for name, count in Counter(key.name for key in KEYS).items() if count > 1] == []


def test_a_key_that_is_checked_is_a_key_of_todays_configuration():
    facts = ("holds", "choices", "fixed", "is_free", "is_resumed", "default", "old_default")
    checked = [key.name for key in KEYS if any(getattr(key, fact) for fact in facts) and not key.is_raw]
    assert [name for name in checked if not schema.is_known(name)] == []
    assert [key.today for key in KEYS if key.today and not schema.is_known(key.today)] == []

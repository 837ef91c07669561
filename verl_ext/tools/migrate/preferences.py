"""Losses of preferences by the names that other trainers give them."""

from collections.abc import Mapping
from typing import Any

from verl_ext.tools.migrate.line import Moved, listed, number
from verl_ext.tools.migrate.tables import values_of

REWARDS = ("rm", "ppo", "grpo", "gdpo", "gkd", "ebft")  # what is not a loss of given answers
ELSEWHERE = "verl's own trainers have PPO and GRPO; reward models are not trained"


def put_loss(moved: Moved, key: str, name: str, options: Mapping[str, Any]) -> None:
    """Name a loss and its options, {ours: value or None}.

    Prompts with answers that are too long are left out as a whole.
    """
    if (loss := values_of("losses").get(name)) is None:
        moved.lack(key, f"loss has {_losses()}")
        return
    moved.put("loss", loss)
    for option, value in options.items():
        if value is not None:
            moved.put(f"loss.{option}", value)
    moved.put("data.over_length", "drop")
    if loss != "kto":
        moved.differ("data.max_tokens holds a prompt with both of its answers: twice the length, which is of one there")
        given = moved.words.get("data.max_tokens")
        if length := number(given):
            moved.put("data.max_tokens", int(2 * length))
        elif given is not None:
            moved.differ(f"data.max_tokens={given} is not doubled, as its number is not known here")
    moved.differ("a prompt or an answer that is too long is cut there; data.over_length=drop leaves the whole unit out")


def _losses() -> str:
    return ", ".join(sorted({*values_of("losses").values()}))


def loss_options(moved: Moved, loss: str, beta: Any = None) -> dict[str, Any]:
    """Return {option of a loss: its value or None} by the section `answers` of the trainer's table.

    beta: the loss's β if another key than the table's has it.
    """
    options: dict[str, Any] = {}
    for option, keys in moved.answers.get(loss, moved.answers["others"]).items():
        value = beta if option == "beta" and beta is not None else moved.get(*keys.split())
        if option == "tail_weight" and value is not None:  # the answers' common length counts as a whole
            options["length"] = "common"
        options[option] = value
    return options


def put_label(moved: Moved) -> None:
    """Name the field of an answer's label."""
    if not {"columns", "columns.kto_tag"} & moved.words.keys():
        moved.put("columns.kto_tag", "label")
        moved.differ("columns.kto_tag=label is the field of an answer's label there; leave it out for pairs")


def read_loss(moved: Moved, family: str) -> None:
    """Translate the keys that TRL and ms-swift share: the form of a family's loss, and its options."""
    forms = [str(form) for form in listed(moved.get("loss_type"))]
    if len(forms) > 1:
        moved.lack("loss_type", f"loss is one of {_losses()}, without sums of several")
    name = forms[0] if len(forms) == 1 and family in ("dpo", "cpo", "kto") else family
    if family == "cpo" and name != "simpo":
        name = "cpo" if name in ("sigmoid", "cpo") else f"cpo of {name}"
    if family == "simpo":
        moved.usual["beta"] = 2.0
    if name == "simpo":
        moved.usual["cpo_alpha"] = 1.0
    options = loss_options(moved, name)
    if name == "kto":
        put_label(moved)
    put_loss(moved, "rlhf_type" if name == family else "loss_type", name, options)
    if (reference := moved.get("ref_model", "ref_model_path")) is not None:
        moved.put("reference.path", reference)

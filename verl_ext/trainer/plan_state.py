"""What a resumed run must share with the run that it goes on with, and what it takes over."""

from pathlib import Path
from typing import Any

import torch


class PlanState:
    """What stands in for the data loader in verl's checkpoints.

    The packs of every step follow from the dataset, the budget, the strategy and the seed, so a checkpoint needs no
    loader position: only these, to refuse a resume that would silently train on other packs, or another model. How
    packs of like cost are grouped follows from the layout of the ranks, which a resume may change: it keeps the groups
    that it began with.

    Attributes:
        fingerprint: what must be the same in a resumed run, by dotted key.
        grouping: `Run.grouping` of this run, and of the checkpoint once one is loaded.
        skipped_steps: of the run so far, those before a resume included.
        skipped_in_a_row: of these, the last ones without a trained step between them.
        folder: of the run, for messages.
    """

    def __init__(self, fingerprint: dict[str, Any], grouping: dict[str, Any], folder: str) -> None:
        self.fingerprint = fingerprint
        self.grouping = grouping
        self.skipped_steps = self.skipped_in_a_row = 0
        self.folder = folder

    def state_dict(self) -> dict[str, Any]:
        """Saved beside the model as verl saves a loader's state."""
        skipped = {"skipped_steps": self.skipped_steps, "skipped_in_a_row": self.skipped_in_a_row}
        return {**self.fingerprint, "grouping": self.grouping, **skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what the checkpoint was trained on; ValueError as :meth:`check`."""
        self.check(state)
        self.grouping = state.get("grouping", self.grouping)
        self.skipped_steps = state.get("skipped_steps", 0)  # a checkpoint of an earlier version has none
        self.skipped_in_a_row = state.get("skipped_in_a_row", 0)

    def check_saved(self, checkpoint: str) -> None:
        """:meth:`check` of a `global_step_N` folder, before a model is loaded."""
        saved = Path(checkpoint) / "data_0.pt"
        if saved.is_file():
            self.check(torch.load(saved, map_location="cpu", weights_only=False))

    def check(self, state: dict[str, Any]) -> None:
        """Compare with what a checkpoint was trained on.

        Raises:
            ValueError: a key differs, so that the step number would mean other packs, or the weights another model.
        """
        for key, value in self.fingerprint.items():
            if key in state and state[key] != value:
                raise ValueError(
                    f"{key} is {value}, but the run in {self.folder} was trained with {state[key]}: resume with that, "
                    "or choose another trainer.default_local_dir, or trainer.overwrite=true"
                )

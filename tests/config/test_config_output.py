"""The output folder is new, resumed or replaced, and never overwritten in silence."""

import pytest

from tests.lib.checked import changed
from tests.lib.errors import refused
from verl_ext.checkpoint.layout import RESUMABLE, Checkpoint, FileFacts, Manifest
from verl_ext.checkpoint.resume import OutputAction, OutputDecision, check_output
from verl_ext.config.compose import compose
from verl_ext.config.run import RunConfig


@pytest.fixture(scope="module")
def composed():
    return compose([])


@pytest.fixture
def run(composed, tmp_path):
    """Return (folder of the run, a function that gives its config under overrides)."""
    folder = tmp_path / "out"

    def config(*more):
        return RunConfig.from_composed(changed(composed, [f"trainer.default_local_dir={folder}", *more]))

    return folder, config


def write_checkpoint(folder, step=3, ranks=2):
    """Write a whole checkpoint of one small file."""
    checkpoint = folder / f"global_step_{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "extra.json").write_text("{}")
    files = {"extra.json": FileFacts.from_file(checkpoint / "extra.json")}
    Manifest(step, ranks, RESUMABLE, {}, {}, files).write(checkpoint)
    return checkpoint


def write_stock_checkpoint(folder, step=3):
    """Write the files of a checkpoint of stock verl by one rank, all empty."""
    checkpoint = folder / f"global_step_{step}"
    checkpoint.mkdir(parents=True)
    for name in (*(f"{kind}_world_size_1_rank_0" for kind in ("model", "optim", "extra_state")), "data_0"):
        (checkpoint / f"{name}.pt").touch()
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return checkpoint


def test_a_new_or_empty_folder_is_fresh_one_with_files_needs_overwrite_and_a_file_is_none(run):
    folder, config = run
    assert check_output(config()) == OutputDecision(OutputAction.FRESH)
    folder.mkdir()
    assert check_output(config()) == OutputDecision(OutputAction.FRESH)
    (folder / "notes.txt").touch()
    with refused("trainer.default_local_dir", "trainer.overwrite=true"):
        check_output(config())
    assert check_output(config("trainer.overwrite=true")) == OutputDecision(OutputAction.REPLACE)
    assert (folder / "notes.txt").exists()
    for path in ("notes.txt", "notes.txt/x"):
        with refused("trainer.default_local_dir", folder / path, "file"):
            check_output(config(f"trainer.default_local_dir={folder / path}"))


def test_a_complete_checkpoint_is_resumed(run):
    folder, config = run
    checkpoint = write_checkpoint(folder)
    assert check_output(config()) == OutputDecision(OutputAction.RESUME, (Checkpoint.read(checkpoint),))
    assert check_output(config("trainer.overwrite=true")).action is OutputAction.REPLACE


@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoint_of_stock_verl_is_refused_with_what_to_do(run, named):
    folder, config = run
    write_checkpoint(folder, step=2)
    checkpoint = write_stock_checkpoint(folder)
    words = [f"trainer.resume_from_path={checkpoint}"] if named else []
    with refused("state/", checkpoint, f"merge --backend fsdp --local_dir {checkpoint} --target_dir DIR"):
        check_output(config(*words))
    assert check_output(config("trainer.overwrite=true")).action is OutputAction.REPLACE


def test_an_older_checkpoint_without_a_manifest_hinders_no_resume(run):
    folder, config = run
    write_stock_checkpoint(folder, 2)
    newer = write_checkpoint(folder)
    assert check_output(config()) == OutputDecision(OutputAction.RESUME, (Checkpoint.read(newer),))


def test_an_incomplete_checkpoint_is_not_resumed_and_says_why(run):
    folder, config = run
    (folder / "global_step_3").mkdir(parents=True)
    with refused(folder, "global_step_3", "manifest.json"):
        check_output(config())
    write_checkpoint(folder, 2)
    assert check_output(config()).damaged == (f"{folder}/global_step_3 is damaged: it has no manifest.json",)


def test_a_disabled_resume_is_refused_and_a_checkpoint_in_verls_own_form(run):
    folder, config = run
    write_checkpoint(folder)
    with refused("trainer.resume_mode", "disable", "trainer.overwrite=true"):
        check_output(config("trainer.resume_mode=disable"))
    (folder / "global_step_3" / "model_world_size_2_rank_0.pt").touch()
    with refused("state/", "verl.model_merger merge"):
        check_output(config())


def test_a_named_checkpoint_is_resumed_from_elsewhere_or_from_inside(run, tmp_path):
    folder, config = run
    elsewhere = Checkpoint.read(write_checkpoint(tmp_path / "other", step=7))
    named = (f"trainer.resume_from_path={elsewhere.folder}", "trainer.resume_mode=resume_path")
    assert check_output(config(*named)) == OutputDecision(OutputAction.RESUME, (elsewhere,))
    inside = write_checkpoint(folder)
    assert check_output(config(f"trainer.resume_from_path={inside}")).checkpoints == (Checkpoint.read(inside),)
    with refused("trainer.default_local_dir", folder, "trainer.resume_from_path"):
        check_output(config(*named))
    assert check_output(config(*named, "trainer.overwrite=true")) == OutputDecision(OutputAction.REPLACE, (elsewhere,))


@pytest.mark.parametrize(
    ("path", "thing"),
    [("null", "trainer.resume_mode=resume_path"), ("/no/global_step_3", "global_step_N"), ("/tmp", "global_step_N")],
)
def test_resume_path_must_name_a_checkpoint(run, path, thing):
    _, config = run
    with refused("trainer.resume_from_path", thing, path):
        check_output(config("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"))


def test_overwrite_never_deletes_what_the_run_reads(run, tmp_path, monkeypatch):
    folder, config = run
    for name in ("data", "adapter", "tokens"):
        (folder / name).mkdir(parents=True)
    inside = write_checkpoint(folder)
    for reads in (
        *("data.train_dir='{}/data'", "data.train_dir='file://{}/data'", "data.train_dir=[{}/data,elsewhere]"),
        *("model.lora_adapter_path={}/adapter", "model.tokenizer_path={}/tokens"),
        f"trainer.resume_from_path={inside}",
    ):
        with refused(reads.split("=")[0], "trainer.overwrite=true"):
            check_output(config("trainer.overwrite=true", reads.format(folder)))
    monkeypatch.chdir(folder)
    with refused("trainer.default_local_dir", "working directory", folder):
        check_output(config("trainer.overwrite=true"))

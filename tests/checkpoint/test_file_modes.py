"""Files and folders that a run or a command writes have the modes that follow from the umask."""

import os
import stat

import pytest

from tests.lib.ranks import in_turn, run_ranks
from tests.lib.tiny_model import SMALL_CONFIG
from tests.lib.training import into, small_run, train_alone
from verl_ext.commands import export, tokenize
from verl_ext.tools.init_model import command as init_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("umask", [0o022, 0o002])
def test_the_files_of_a_run_an_export_a_model_and_tokenized_data_follow_the_umask(umask, tiny_model, tmp_path):
    before = os.umask(umask)
    try:
        (tmp_path / "all").mkdir()
        steps = ("trainer.total_training_steps=2", "trainer.spike_factor=2", "trainer.save_freq=1")
        contents = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
        run = [*steps, contents, f"data.val_dir={tmp_path / 'data'}", into(tmp_path / "all" / "run")]
        run_ranks(in_turn, 1, [(os.umask, umask), (train_alone, small_run(tmp_path, tiny_model, [30] * 16, *run))])
        exported = [f"checkpoint={tmp_path / 'all' / 'run'}", f"output_dir={tmp_path / 'all' / 'export'}"]
        assert export.main(exported) == 0
        (tmp_path / "records.jsonl").write_text('{"text": "a b c"}\n' * 20)
        source = f"sources={{all:{tmp_path / 'records.jsonl'}}}"
        assert tokenize.main([source, f"model.path={tiny_model}", f"output_dir={tmp_path / 'all' / 'data'}"]) == 0
        model = [f"tokenizer.path={tiny_model}", f"output_dir={tmp_path / 'all' / 'model'}", "model=tiny", SMALL_CONFIG]
        assert init_model.main(model) == 0
    finally:
        os.umask(before)
    written = sorted((tmp_path / "all").rglob("*"))
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in written}
    wrong = {name: oct(mode) for name, mode in modes.items() if mode not in (0o666 & ~umask, 0o777 & ~umask)}
    assert not wrong
    assert sum(name.endswith(".safetensors") for name in modes) >= 4

"""Files from others run no code, and lead to no file outside their folder."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from tests.lib.checked import support_problems
from tests.lib.errors import names, refused
from tests.lib.tokenized_data import random_documents, write_tokenized
from verl_ext.commands.command_line import command
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.config.architecture import Architecture
from verl_ext.config.check import read_hf_config
from verl_ext.config.weights import weight_problems
from verl_ext.data import SFTDataSet
from verl_ext.data.tokenized.categories import FolderCategories
from verl_ext.text.chat.sandbox import compiled


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(write_tokenized(tmp_path / "data", random_documents(np.random.default_rng(0), [5, 9], 100, 1)))


@pytest.mark.parametrize("name", ["../data-00000-of-00001.arrow", "/etc/passwd", "..", "", 3, None])
def test_state_json_names_no_file_of_another_folder(folder, name):
    shutil.copy(folder / "data-00000-of-00001.arrow", folder.parent)
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"] = [{"filename": name}]
    (folder / "state.json").write_text(json.dumps(state))
    with refused("data.train_dir", folder, "state.json"):
        SFTDataSet(str(folder), 16)


def test_a_link_out_of_the_folder_is_refused_but_in_the_hubs_cache(folder, tmp_path):
    shard = folder / "data-00000-of-00001.arrow"
    shutil.move(shard, tmp_path / "elsewhere.arrow")
    shard.symlink_to(tmp_path / "elsewhere.arrow")
    with refused("data.train_dir", folder, shard.name, "link"):
        SFTDataSet(str(folder), 16)
    hub = tmp_path / "datasets--a--b"
    (hub / "blobs").mkdir(parents=True)
    shutil.move(tmp_path / "elsewhere.arrow", hub / "blobs" / "1f")
    shutil.move(folder, hub / "snapshots" / "main")
    os.remove(hub / "snapshots" / "main" / shard.name)
    (hub / "snapshots" / "main" / shard.name).symlink_to("../../blobs/1f")
    assert len(SFTDataSet(str(hub / "snapshots" / "main"), 16)) == 1


def test_an_index_of_weights_names_files_beside_it(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    index = tmp_path / "model.safetensors.index.json"
    assert names(weight_problems(str(tmp_path))[0], "model.path", index, "folders")
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    assert names(weight_problems(str(tmp_path))[0], "model.path", index, "read")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"' + "9" * 5000 + '": "a"}', '{"1": NaN}', "null"])
def test_categories_json_of_any_content_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "categories.json").write_text(text)
    with refused(tmp_path / "categories.json") as error:
        FolderCategories.read([str(tmp_path)])
    assert len(str(error.value)) < 400


def test_code_of_a_model_is_said_before_it_runs(capsys, tmp_path):
    arguments = ["sources.a=a.jsonl", f"output_dir={tmp_path}/out", f"model.path={tmp_path}"]
    for more, told in (([], False), (["model.trust_remote_code=true"], True)):
        command("tokenize", TokenizeOptions, lambda options: "done", "")([*arguments, *more])
        assert ("note: model.trust_remote_code=true runs Python code" in capsys.readouterr().err) is told


def test_code_of_a_type_that_transformers_knows_does_not_run_without_consent(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    names = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    (tmp_path / "model" / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    model = Architecture(read_hf_config(str(tmp_path / "model")))
    assert support_problems(model.hf_config) == []
    assert model.module is not None  # whose names are compared with those of the options
    assert not (tmp_path / "ran").exists()


REACHES = [  # from a template to objects of Python
    *("{{ ''.__class__.__mro__ }}", "{{ m.__class__ }}", "{{ m.content.__class__.__init__.__globals__ }}"),
    *(
        "{{ '{0.__class__}'.format(m) }}",
        "{{ '{0.__class__.__mro__}'.format(m.content) }}",
        "{{ m.content.format(m) }}",
    ),
    *("{{ m.content.format_map(m) }}", "{{ m.content | attr('__class__') }}", "{{ m.keys.__self__ }}"),
    *("{{ m.update({'role': 'x'}) }}", "{{ m.pop('role') }}", "{{ m.clear() }}", "{{ messages.append(m) }}"),
    *("{{ loop.__init__.__globals__ }}", "{{ loop._iterator }}", "{% set ns = namespace() %}{{ ns.__class__ }}"),
    *("{{ self.__init__.__globals__ }}", "{{ cycler.__init__.__globals__ }}", "{{ range(1000000000) | list }}"),
]


@pytest.mark.parametrize("reach", REACHES)
def test_a_chat_template_reaches_no_more_than_transformers_lets_it(reach):
    source = f"{{% for m in messages %}}{reach}{{% endfor %}}"

    def outcome(render):
        messages = [{"role": "user", "content": "a {b}"}]
        try:
            text = render({"messages": messages})
        except Exception as error:
            return type(error), str(error), messages
        return text, messages

    found = outcome(compiled(source))
    assert found == outcome(lambda variables: _compile_jinja_template(source).render(**variables))
    assert isinstance(found[0], type) or "<class" not in found[0]
    assert found[-1] == [{"role": "user", "content": "a {b}"}]

"""Models whose code lies in their folder."""

import json

CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class HouseConfig(Qwen3Config):
    model_type = "house"


class HouseForCausalLM(Qwen3ForCausalLM):
    config_class = HouseConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(lambda module, args, output: {output})
"""


def add_code(folder, output):
    """Give a Qwen3's folder code of its own, which changes the embeddings by an expression."""
    described = json.loads((folder / "config.json").read_text())
    named = {"AutoConfig": "modeling_house.HouseConfig", "AutoModelForCausalLM": "modeling_house.HouseForCausalLM"}
    described |= {"model_type": "house", "architectures": ["HouseForCausalLM"], "auto_map": named}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "modeling_house.py").write_text(CODE.replace("{output}", output))

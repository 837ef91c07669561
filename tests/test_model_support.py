"""Which architectures keep the documents of a pack apart, told from their config alone."""

import pytest
import transformers

from verl_ext.config.model_support import model_support_problems


@pytest.mark.parametrize("name", ["Qwen2Config", "Qwen3Config", "Qwen3MoeConfig", "LlamaConfig", "MistralConfig"])
def test_attention_models_are_supported(name):
    assert model_support_problems(getattr(transformers, name)()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Gemma2Config", "must not cap attention logits; got attn_logit_softcapping=50.0"),
        ("Qwen3NextConfig", "must have attention layers alone, which keep documents apart; got linear_attention"),
        ("MambaConfig", "must dispatch its attention through transformers' AttentionInterface"),
        ("DogeConfig", "must have plain causal attention; doge uses an attention mask that it computes"),
        ("Qwen3VLConfig", "must be a text model; it has vision_config"),
        ("T5Config", "must be a causal language model that transformers has"),
        ("GptOssConfig", "must have plain causal attention; gpt_oss uses attention sinks"),
    ],
)
def test_models_that_would_leak_or_be_wrong_are_refused(name, reason):
    problems = model_support_problems(getattr(transformers, name)())
    assert any(reason in problem for problem in problems), problems
    assert all(problem.startswith(f"model.path: {name}") for problem in problems)

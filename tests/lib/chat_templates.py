"""Chat templates in the manner of public ones, with what is special about each, and a small tokenizer for them."""

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|end|>", "<|assistant|>"]
CORPUS = ["user assistant system tool the cat sat on the mat and said hello to the world\n\n<think>\n</think>"] * 4
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION_WITHOUT_END = GENERATION.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n", 1)
# Like Qwen3's: only turns after the last user's turn keep their thinking; the last turn always shows some.
STRIPS_THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ said }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Like minimind's: the generation prompt itself holds an empty thinking block.
PREFILLED_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "<think>\n{{ parts[0].split('<think>')[-1].strip('\n') if parts|length > 1 }}\n</think>\n\n"
    "{{ parts[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
NO_GENERATION_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% if not loop.last %}\n{% endif %}{% endfor %}"
)
# Like Phi-3's: the document's end follows the last turn's end.
ENDS_DOCUMENT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
# Like Llama 2's: no header token, surrounding spaces, one end token.
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
# Like gpt-oss's: the last turn ends differently from earlier ones.
OTHER_LAST_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Calls are joined as strings, and nothing stands between the user's turn and the assistant's text.
INSTRUCT_CALLS = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.tool_calls %}{{ '[CALLS][' }}{% for c in m.tool_calls %}"
    """{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}' }}"""
    "{{ ', ' if not loop.last }}{% endfor %}{{ ']</s>' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
HEADERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PRINTS_ARGUMENTS = HEADERS.replace(" | tojson", "")
REASONING = HEADERS.replace(
    "\n{{ m.content", "\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content"
)
# Tool results stand in the calling turn, before its content.
RESULTS_INSIDE = (
    "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</call>{% endfor %}{% for r in messages if r.role == 'tool' %}<result>{{ r.content }}</result>{% endfor %}"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST_CALL = HEADERS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
PRINTS_TOOLS = "{{ (tools or []) | tojson }}" + REASONING
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Like Qwen3's: reasoning, from its field or the content, in turns after the last user's turn, and calls as JSON.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + HEAD
    + "{% if m.role == 'assistant' %}{% set content = m.content or '' %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ content.lstrip('\n') }}{% else %}{{ content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if content or not loop.first %}{{ '\n' }}{% endif %}"
    "{% set f = c.function if c.function is defined else c %}"
    '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% else %}{{ m.content }}{% endif %}" + TAIL
)
# Like GLM-4.5's: the next turn's head ends a turn, calls are tags, and a turn without reasoning has an empty block.
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}<think>{{ (m.reasoning_content or '').strip() }}</think>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Like DeepSeek-R1's: the generation prompt opens the reasoning.
OPENED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{{ m.content if '<think>' in m.content else '<think>\n' + m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# Like Llama 3.1's: a turn with a call prints only the call, as JSON.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}<s>\n\n"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<s>\n\n{% endif %}"
)
# Like gpt-oss's: reasoning and answer are separate messages.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking %}<|assistant|>analysis<s>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|assistant|>to={{ m.tool_calls[0].function.name }} json<s>"
    "{{ m.tool_calls[0].function.arguments | tojson }}</s>"
    "{% else %}<|assistant|>final<s>{{ m.content }}<|im_end|>{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}<s>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LEFT_OPEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if add_generation_prompt or not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Only the header of the next turn ends a turn.
HEADERS_ONLY = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# The content ends with a token of its own, and the turn with another.
TWO_ENDS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|say|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|said|>{% endif %}<|stop|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|say|>{% endif %}"
)
NAMED_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONLY_TEXT = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
# Like GLM-4.5's: the head of the next turn, a user's or a tool's, is what ends a turn.
NEXT_HEAD = HEADERS_ONLY.replace("m.role }}", "'observation' if m.role == 'tool' else m.role }}").replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}",
)
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
)
# Like Gemma 4's: results of tools stand in a field of the assistant's message, before its content, or in its calls.
TOOL_RESPONSES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    + _CALLS
    + "{% for c in m.tool_calls or [] if c.result %}<result>{{ c.result }}</result>{% endfor %}"
    "{% for r in m.tool_responses or m.tool_results or [] %}"
    "<result>{{ r.name }} {{ r.response | tojson }}</result>{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
    + _PROMPT
)
# Like OLMo 3's: calls and functions are texts in fields of their own, and results have the role `environment`.
FUNCTION_FIELDS = (
    "{% for m in messages %}{% if m['role'] == 'system' %}<|im_start|>system\n{{ m['content'] }}"
    "{% if m.get('functions') is not none %} <functions>{{ m['functions'] }}</functions>{% else %} No functions."
    "{% endif %}<|im_end|>\n{% elif m['role'] in ['user', 'environment'] %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% elif m['role'] == 'assistant' %}<|im_start|>assistant\n{{ m['content'] or '' }}"
    "{% if m.get('function_calls') %}<function_calls>{{ m['function_calls'] }}</function_calls>{% endif %}<|im_end|>\n"
    "{% endif %}{% endfor %}" + _PROMPT
)
# Like Cohere's R7B: every chat ends with a generation prompt, which an answer does not go on with.
STANDING_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<s>"
    "{{ '<|assistant|>' if m.role == 'assistant' and not m.tool_calls }}{{ m.content }}" + _CALLS + "<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant<s><think></think>"
)
# Like Command R+'s: a call leaves the turn open, and a system's turn ends every chat.
OPEN_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<s>{{ m.content }}"
    + _CALLS
    + "{{ '<|im_end|>' if not m.tool_calls }}"
    "{% endfor %}<|im_start|>system<s>Act.<|im_end|>{% if add_generation_prompt %}<|im_start|>assistant<s>{% endif %}"
)
# Like SmolLM3's: instructions and tools are arguments of the template, and some words choose its mode.
INSTRUCTIONS = (
    "{% set mode = '/think' if enable_thinking is not defined or enable_thinking else '/no_think' %}"
    "{% if messages[0].role == 'system' %}{% set custom_instructions = messages[0].content %}"
    "{% if '/no_think' in custom_instructions %}{% set mode = '/no_think' %}{% endif %}{% endif %}"
    "<|im_start|>system\n{{ mode }} {{ custom_instructions or 'Be kind.' }}"
    "{% for tool in xml_tools or [] %}\n{{ tool if tool is string else tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{{ '<think>\n\n</think>\n' if m.role == 'assistant' and mode == '/no_think' }}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n' if mode == '/no_think' }}{% endif %}"
)
TEMPLATES = {
    name: template
    for name, template in list(globals().items())
    if name.isupper() and isinstance(template, str) and "for m in" in template and "endfor" in template
}


@functools.cache
def tiny_tokenizer(
    template: str | None = CHATML,
    bos_token: str = "<s>",
    eos_token: str | None = "<|im_end|>",
    special_tokens: tuple[str, ...] = tuple(SPECIAL_TOKENS),
    corpus: tuple[str, ...] = tuple(CORPUS),
) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer of a few hundred tokens with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos_token, bos_token=bos_token, pad_token="<|endoftext|>"
    )
    wrapped.chat_template = template
    return wrapped


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    """Make a record of alternating user and assistant turns."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}

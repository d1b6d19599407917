"""Chat templates that write conversations as widely used models do; each with its end token and its own tokens."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """A template, and what its tokenizer has to know."""

    template: str
    eos: str
    special: tuple[str, ...]
    bos: str = "<bos>"


LLAMA3 = Family(
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "<|eot_id|>",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|begin_of_text|>",
)

CHATML = Family(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "<|im_end|>",
    ("<|im_start|>", "<|im_end|>"),
)

# Without a system message it writes its own.
QWEN25 = CHATML._replace(
    template="{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}" + CHATML.template
)

# Thoughts are kept in answers after the last question only, where an empty one is written if there is none.
QWEN3 = CHATML._replace(
    template="{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set parts = m.content.split('</think>') %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + (parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '') }}"
    "{{ '\\n</think>\\n\\n' }}"
    "{% endif %}"
    "{{ (parts[-1].lstrip('\\n') if m.role == 'assistant' else m.content) + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The system message goes into the question that it comes before.
MISTRAL = Family(
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + '[/INST]' }}{% set ns.system = '' %}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    "</s>",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    "<s>",
)

GEMMA = Family(
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}"
    "{{ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    "<eos>",
    ("<start_of_turn>", "<end_of_turn>"),
)

# Nothing ends a turn but the tag of the next one.
GLM = Family(
    "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    "<eos>",
    ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
)

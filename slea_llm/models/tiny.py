"""A tiny chat model made from nothing: a random Llama and a byte-level tokenizer, for demos and tests, offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slea_llm.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS: tuple[str, ...] = (END_OF_TEXT, TURN_START, TURN_END)
# One id each, but ordinary text: a reply decoded without special tokens keeps them, so parsers see them.
MARKUP_TOKENS: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HEAD_SIZE = 64
OUTPUT_GAIN = 4.0
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS) + len(MARKUP_TOKENS)

# ChatML that only ever appends: every message renders the same whatever follows it, thoughts are kept verbatim, and
# what the assistant samples (its end-of-turn token included) is marked for trainers that ask for a loss mask.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] or '' -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] if 'function' in call else call -%}
{{- '<tool_call>{"name": "' + function['name'] + '", "arguments": ' -}}
{{- function['arguments'] if function['arguments'] is string else function['arguments'] | tojson -}}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def make_tokenizer(texts: Sequence[str], *, vocab_size: int, max_length: int = 2048) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` entries, trained on `texts`; no text is out of its reach.

    Fewer entries come out when `texts` hold too few repeated pairs. Padding is `<|endoftext|>`, the end of a turn
    (and the end of generation) `<|im_end|>`. Raises ConfigError below 263 entries: 256 bytes and the markup.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"vocab_size {vocab_size} is below {MIN_VOCAB_SIZE}: 256 bytes and the markup tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKUP_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(texts), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny(
    folder: str | Path,
    texts: Sequence[str],
    *,
    vocab_size: int,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 2,
    seed: int,
    max_length: int = 2048,
) -> Path:
    """Write a Hugging Face folder with a random Llama and its tokenizer; equal arguments give equal bytes.

    Every head has the size that the vLLM engine wants on a CPU, whatever the width. The embedding has exactly as many
    rows as the tokenizer has entries. Returns the folder. Raises ConfigError when `heads` does not divide `hidden`, as
    transformers asks.
    """
    if hidden % heads:
        raise ConfigError(f"hidden size {hidden} is not divisible by {heads} heads")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(texts, vocab_size=vocab_size, max_length=max_length)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    # The last norm bounds every logit. Room is left above what imitation needs, because adapters train below a frozen
    # output layer: without it no adapter could make an act much likelier than the imitated expert did.
    torch.nn.init.constant_(model.model.norm.weight, OUTPUT_GAIN)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    return folder

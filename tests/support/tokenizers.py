"""Small tokenizers of every kind, and chat templates of several model families, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)

# SmolLM2's own: a system prompt of its own where the dialogue brings none.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Thoughts before the last user message are taken out, the last reply always has one, tool results are user turns.
QWEN3 = """\
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
{%- if ns.open and message.role == 'user' %}
{%- set ns.open = false %}{%- set ns.last = messages|length - loop.index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}{%- set reasoning = '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}
{{- '<|im_start|>assistant\\n' + content }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# No system role, alternation enforced, replies trimmed.
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] | replace('assistant', 'model') + '\n' + message['content'] | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>model\n'}}{% endif %}"
)

# The system prompt moves into the last user message: earlier text changes when the dialogue goes on.
MOVING_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<|im_start|>user\n"
    "{% if loop.last and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% elif message['role'] == 'assistant' %}"
    "<|im_start|>assistant\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# The template itself opens the thought of every reply and takes earlier thoughts out.
OPENING_THOUGHT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CORPUS = (
    "system user assistant tool model",
    "You answer in few words. Is it 12 o'clock? Yes, it is.",
    "I would like two pizzas to Long Street 12, please. The user wants pizza, ask for the address.",
    "transfer trans fer hello there alpha beta gamma be evil hi ok done keep going",
    "我要两份宫保鸡丁, 送到长安街12号。请问您的地址是什么?",
)


def _wrap(backend: Tokenizer, template: str, *, eos: str, unk: str | None = None) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, pad_token=eos, unk_token=unk, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def byte_level(template: str = CHATML, *, eos: str = "<|im_end|>", vocab_size: int = 420) -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2, Llama 3, Qwen and SmolLM have it; padding is the end of sequence."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend, template, eos=eos)


def word_level(template: str = CHATML, *, extra: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A word an id, joined by spaces; control tokens lie in the vocabulary itself, where typed text could hit them."""
    splitter = pre_tokenizers.Split(Regex(r"\S+|\n"), behavior="removed", invert=True)
    words = dict.fromkeys(w for line in (*CORPUS, *extra) for w, _ in splitter.pre_tokenize_str(line))
    vocab = {token: i for i, token in enumerate(["[UNK]", "\n", *SPECIAL, *MARKUP, *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))  # noqa: S106  the name of a token
    backend.pre_tokenizer = splitter
    return _wrap(backend, template, eos="<|im_end|>", unk="[UNK]")


def unigram(template: str = CHATML, *, prepend_scheme: str = "always") -> PreTrainedTokenizerFast:
    """A sentencepiece-like tokenizer: spaces are written into the tokens, and one is put before a text."""
    words = dict.fromkeys("▁" + word for line in CORPUS for word in line.split())
    characters = dict.fromkeys(character for line in CORPUS for character in line.replace(" ", "▁"))
    controls = ("<unk>", *SPECIAL, *MARKUP)  # in the model's own vocabulary, where typed text could hit them
    scores = [(c, 0.0) for c in controls] + [(w, -4.0) for w in words] + [(c, -8.0) for c in {"\n": 0, **characters}]
    backend = Tokenizer(models.Unigram(list(dict(scores).items()), unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return _wrap(backend, template, eos="<|im_end|>", unk="<unk>")


def byte_fallback(template: str = CHATML) -> PreTrainedTokenizerFast:
    """BPE over characters with bytes for all others, as Llama 2 and Mistral have it."""
    characters = sorted({c for line in CORPUS[:4] for c in line.replace(" ", "▁")} | {"▁"})
    vocab = {token: i for i, token in enumerate(["<unk>", *(f"<0x{n:02X}>" for n in range(256)), *characters])}
    merges = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))  # noqa: S106
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(backend, template, eos="<|im_end|>", unk="<unk>")


def word_piece(template: str = CHATML) -> PreTrainedTokenizerFast:
    """WordPiece as BERT has it: words are cut into pieces marked `##`, white space is lost."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106  the name of a token
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend, template, eos="<|im_end|>", unk="[UNK]")


@cache
def all_kinds(template: str = CHATML) -> dict[str, PreTrainedTokenizerFast]:
    """One tokenizer of every kind, by name."""
    return {
        "byte_level": byte_level(template),
        "word_level": word_level(template),
        "unigram": unigram(template),
        "unigram_first": unigram(template, prepend_scheme="first"),
        "byte_fallback": byte_fallback(template),
    }

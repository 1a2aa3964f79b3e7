"""Tiny random models for tests and for trying out placements: real architectures, seconds to run, no download.

Heads of size 32 (vLLM takes no smaller ones), 4 of them with 2 key-value heads, and a vocabulary of 264 tokens: all can
be cut over 1 and 2 tensor ranks, and over 4 where key-value heads may be copied, or are 4 ("4kv"). Weights come from a
fixed seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.models.cache import made_once, save_here
from workbench.models.quiet import no_chatter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TINY: dict[str, dict[str, Any]] = {
    "tiny-llama": {"model_type": "llama", "tie_word_embeddings": False},
    "tiny-llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "tiny-llama-tied-4kv": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "tiny-qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
}
"""Name -> what sets it apart from the shape that all of them share."""

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unk|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SEED = 1234
# Part of the cache folder's name: raise it when anything in this file changes what is written.
RECIPE = 1


def tiny_folder(name: str) -> Path:
    return made_once(f"{name}-{RECIPE}", lambda folder: _write(folder, TINY[name]))


def _write(folder: Path, differences: dict[str, Any]) -> None:
    with no_chatter():
        save_here(_model(differences), folder)
        _tokenizer().save_pretrained(folder)


def _model(differences: dict[str, Any]) -> PreTrainedModel:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        **{"num_key_value_heads": 2} | differences,
        vocab_size=len(SPECIAL_TOKENS) + 256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.1,  # wider than usual: distributions with a shape, greedy choices without near-ties
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        # The CPU generator alone: `torch.manual_seed` also seeds accelerators, which this `fork_rng` does not restore.
        torch.default_generator.manual_seed(SEED)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # zero otherwise, and then nothing would notice a bias that is lost on the way
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def _tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte, after the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos, *others, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,  # never produced; named because a family's tokenizer class would else add one of its own
        extra_special_tokens=others,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )

from __future__ import annotations

import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.expected import expect_error
from workbench.data.examples import Examples
from workbench.engines.generation.base import end_token_ids
from workbench.errors import BadInput, ModelUnavailable
from workbench.models import BUNDLED, TINY, chat_template, load_tokenizer, render_prompt
from workbench.models.chat_format import written_tokens
from workbench.models.loading import load_causal_lm
from workbench.models.resolve import gguf_path
from workbench.models.tokenizers import differing_ends, render_reply, turn_end


def changed(tmp_path: Path, **changes: Any) -> Path:
    """A folder with the tiny tokenizer, changed and saved again."""
    load_causal_lm("tiny-llama").save_pretrained(tmp_path)
    tokenizer = load_tokenizer("tiny-llama")
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TINY)
def test_tiny_tokenizers_know_every_text_and_add_no_token(name: str) -> None:
    tokenizer = load_tokenizer(name)
    text = "2 + 3 = 5, naïve 字 🙂\n"
    ids = render_prompt(tokenizer, text, chat=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert len(tokenizer) == 264


def test_padding_with_eos_is_replaced_by_a_token_that_exists(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(changed(tmp_path, pad_token="<|eos|>"))
    assert tokenizer.pad_token == "<|pad|>"
    assert len(tokenizer) == 264


def test_no_padding_token_at_all(tmp_path: Path) -> None:
    assert load_tokenizer(changed(tmp_path, pad_token=None)).pad_token == "<|pad|>"


def test_the_last_resort_is_a_special_token_outside_the_template() -> None:
    from workbench.models.tokenizers import _filler

    class Few:
        eos_token, bos_token, unk_token = "<end>", "<begin>", None
        chat_template = "<user>{{ messages }}<end>"

        def __init__(self, *special: str) -> None:
            from tokenizers import AddedToken

            self.added_tokens_decoder = {i: AddedToken(token, special=True) for i, token in enumerate(special)}

    assert _filler(Few("<end>", "<begin>", "<user>", "<file>"), "few") == "<file>"
    with expect_error(BadInput, remedy="set pad_token"):
        _filler(Few("<end>", "<begin>", "<user>"), "few")


def test_a_folder_without_tokenizer_says_what_to_save(tmp_path: Path) -> None:
    load_causal_lm("tiny-llama").save_pretrained(tmp_path)
    with expect_error(BadInput, value="tokenizer"):
        load_tokenizer(tmp_path)


def test_chat_rendering() -> None:
    tokenizer = load_tokenizer("tiny-llama")
    rendered = render_prompt(tokenizer, "Hi")
    assert all(type(token) is int for token in rendered)
    assert tokenizer.decode(rendered) == "<|bos|><|user|>Hi<|eos|><|assistant|>"
    assert (
        rendered
        == render_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
        == render_prompt(tokenizer, "Hi", chat=True)
    )
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = "<|bos|><|system|>Be brief.<|eos|><|user|>Hi<|eos|><|assistant|>"
    assert tokenizer.decode(render_prompt(tokenizer, turns)) == expected
    assert tokenizer.decode(render_prompt(tokenizer, "Hi", chat=False)) == "Hi"


def test_without_a_template_texts_stay_plain_and_messages_are_refused() -> None:
    tokenizer = load_tokenizer("tiny-llama")
    tokenizer.chat_template = None
    assert tokenizer.decode(render_prompt(tokenizer, "Hi")) == "Hi"
    with expect_error(BadInput, value="no chat template"):
        render_prompt(tokenizer, "Hi", chat=True)
    with expect_error(BadInput, value="no chat template"):
        render_prompt(tokenizer, [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("empty", ["", []])
def test_empty_prompts_are_refused(empty: Any) -> None:
    with expect_error(BadInput, rule="empty"):
        render_prompt(load_tokenizer("tiny-llama"), empty)


def has_bundled(name: str) -> bool:
    try:
        return gguf_path(name).is_file()
    except ModelUnavailable:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not all(map(has_bundled, BUNDLED)), reason="the bundled model's package is not installed")
def test_the_bundled_model_answers() -> None:
    model: Any = load_causal_lm("smollm2-135m", dtype=torch.float32, device="cpu")
    tokenizer = load_tokenizer("smollm2-135m")
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token == "<|im_end|>"
    prompt = torch.tensor([render_prompt(tokenizer, "What is 2 + 3?")])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    answer = str(tokenizer.decode(output[0, prompt.shape[1] :]))
    assert "5" in answer
    assert answer.endswith("<|im_end|>")


def test_a_reply_is_rendered_without_what_came_before() -> None:
    tokenizer = load_tokenizer("tiny-llama")
    messages = [{"role": "tool", "content": "42"}, {"role": "user", "content": "go on"}]
    eos, letter = tokenizer.encode("<|eos|>x", add_special_tokens=False)
    after_eos = tokenizer.decode(render_reply(tokenizer, messages, after=eos))
    assert after_eos == "<|tool|>42<|eos|><|user|>go on<|eos|><|assistant|>"
    assert tokenizer.decode(render_reply(tokenizer, messages, after=letter)) == "<|eos|>" + after_eos
    # turn by turn, the ids are those of the whole conversation
    prompt = [{"role": "user", "content": "6 * 7?"}]
    turn = tokenizer.encode("calculate<|eos|>", add_special_tokens=False)
    whole = render_prompt(tokenizer, [*prompt, {"role": "assistant", "content": "calculate"}, *messages])
    assert render_prompt(tokenizer, prompt) + turn + render_reply(tokenizer, messages, after=eos) == whole


def test_a_turns_end_that_is_not_the_tokenizers_eos_is_written_once() -> None:
    """As in models whose template ends turns with one token and whose tokenizer ends documents with another."""
    tokenizer = load_tokenizer("tiny-llama")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|unk|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (end,) = tokenizer.encode("<|unk|>", add_special_tokens=False)
    assert end != tokenizer.eos_token_id
    messages = [{"role": "tool", "content": "42"}]
    assert tokenizer.decode(render_reply(tokenizer, messages, after=end)) == "<|tool|>42<|unk|><|assistant|>"
    assert tokenizer.decode(render_reply(tokenizer, messages, after=int(tokenizer.eos_token_id))) == (
        "<|unk|><|tool|>42<|unk|><|assistant|>"
    )


def test_white_space_before_the_end_of_a_turn_does_not_end_it_twice() -> None:
    tokenizer = load_tokenizer("tiny-llama")  # with a template like Llama 2's
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
    )
    reply = render_reply(tokenizer, [{"role": "user", "content": "go on"}], after=int(tokenizer.eos_token_id))
    assert tokenizer.decode(reply) == "[INST] go on [/INST]"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("<|user|>{{ messages[0]['content'] }}<|assistant|>{{ messages[-1]['content'] }}<|unk|>\n", "<|unk|>"),
        ("{{ messages[-1]['content'] }} {{ eos_token }}", "<|eos|>"),
        ("{{ messages[-1]['content'] }}\nUSER:", "<|eos|>"),  # no special token: the template leaves the end to EOS
        ("{{ messages[0]['content'] }}", "<|eos|>"),
        ("{{ raise_exception('no') }}", "<|eos|>"),
        (None, "<|eos|>"),
    ],
)
def test_the_end_of_a_turn_is_the_templates(template: str | None, end: str) -> None:
    tokenizer = load_tokenizer("tiny-llama")
    tokenizer.chat_template = template
    assert tokenizer.decode([turn_end(tokenizer)]) == end
    said = differing_ends(tokenizer)
    assert ("'<|unk|>'" in said and "'<|eos|>'" in said) if end == "<|unk|>" else not said


@pytest.mark.slow
@pytest.mark.skipif(not has_bundled("smollm2-135m"), reason="the bundled model's package is not installed")
def test_the_end_of_a_turn_of_the_bundled_tokenizer() -> None:
    tokenizer = load_tokenizer("smollm2-135m")
    assert tokenizer.decode([turn_end(tokenizer)]) == tokenizer.eos_token == "<|im_end|>"
    assert not differing_ends(tokenizer)
    tokenizer.eos_token = "<|endoftext|>"
    assert tokenizer.decode([turn_end(tokenizer)]) == "<|im_end|>"
    assert "<|endoftext|>" in differing_ends(tokenizer)
    ids = end_token_ids(types.SimpleNamespace(eos_token_id=None), tokenizer)
    assert sorted(tokenizer.convert_ids_to_tokens(sorted(ids))) == ["<|endoftext|>", "<|im_end|>"]
    rows = [{"prompt": "2 + 2?", "response": "It is 4."}]
    (row,) = Examples(rows, "demonstrations", tokenizer=tokenizer).training
    assert tokenizer.decode(row.answer_ids[0]) == "It is 4.<|im_end|>"
    whole = tokenizer.decode([*row.prompt_ids, *row.answer_ids[0]])
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == f"{whole}\n"
    (plain,) = Examples(rows, "demonstrations", tokenizer=tokenizer, chat=False).training
    assert tokenizer.decode(plain.answer_ids[0]) == "It is 4.<|endoftext|>"


def test_replies_that_a_template_cannot_render(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tiny-llama")
    for template, message in (
        (None, "has no chat template"),
        ("{{ raise_exception('no tools') }}", "the chat template of .* rejects them: TemplateError: no tools"),
        ("{{ messages[-1]['content'] }}", "drops earlier turns"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(BadInput, match=message):
            render_reply(tokenizer, [{"role": "tool", "content": "42"}], after=2)


@pytest.mark.parametrize("hides", ["", "{% set ns = namespace(n=0) %}"])
def test_a_template_that_loops_is_stopped_and_the_thread_goes_on(hides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TIMEOUT_S", 0.5)
    tokenizer = load_tokenizer("tiny-llama")
    tokenizer.chat_template = hides + "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for _ in range(2):
        begun_s = time.monotonic()
        with expect_error(BadInput, value=r"chat template of .* took more than 0.5 s for \[\{'role': 'user'"):
            render_prompt(tokenizer, "Hi", chat=True)
        assert time.monotonic() - begun_s < 60
        time.sleep(0.6)  # nothing is raised later
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert tokenizer.decode(render_prompt(tokenizer, "Hi", chat=True)) == "Hi"


def test_a_template_that_raises_is_a_typed_error_without_what_a_terminal_obeys() -> None:
    tokenizer = load_tokenizer("tiny-llama")
    for template, said in (
        ("{{ raise_exception('\x1b[31mno system role') }}", "TemplateError: no system role"),
        ("{{ messages[7]['content'] }}", "UndefinedError"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ ().__class__.__bases__[0].__subclasses__() }}", "SecurityError"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(BadInput, match=rf"the chat template of .* rejects them: {said}") as caught:
            render_prompt(tokenizer, "Hi", chat=True)
        assert "\x1b" not in str(caught.value)


def test_a_text_that_begins_a_sequence_has_one_bos_and_no_end(tmp_path: Path) -> None:
    """Of tokenizers that put BOS before a text, EOS behind it, both or neither; and where the text begins with BOS."""
    from tokenizers.processors import TemplateProcessing

    tokenizer: Any = load_tokenizer("tiny-llama")
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    special = [(bos, tokenizer.bos_token_id), (eos, tokenizer.eos_token_id)]
    plain = tokenizer.encode("ab", add_special_tokens=False)
    for single, begins in ((f"{bos} $A", True), (f"$A {eos}", False), (f"{bos} $A {eos}", True), ("$A", False)):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
        expected = [tokenizer.bos_token_id] * begins + plain
        assert render_prompt(tokenizer, "ab", chat=False) == expected
        with_bos = [tokenizer.bos_token_id, *plain]
        assert render_prompt(tokenizer, f"{bos}ab", chat=False) == with_bos
        assert written_tokens(tokenizer, f"{bos}ab", with_bos, "prompt").tokens[-1].writer == "user"
        # what somebody renders himself is what the template gives
        turns = [{"role": "user", "content": "ab"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        assert render_prompt(tokenizer, text, chat=False) == ids == render_prompt(tokenizer, turns)

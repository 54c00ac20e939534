"""Tokens, chat templates and special tokens."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdec.data import Prompt, render_prompts

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|{{ m['role'] }}|> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = ["<s>", "<unk>", "<|user|>", "<|assistant|>", "hello", "world", "again"]
BOS, UNK, USER, ASSISTANT, HELLO, WORLD, AGAIN = range(len(WORDS))

GREETING = Prompt(id="chat", messages=[{"role": "user", "content": "hello"}], category="greeting")


def tokenizer(template: str | None = TEMPLATE, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=template,
    )


def ids(prompt: Prompt, target: PreTrainedTokenizerFast, chat: bool | str = "auto") -> list[int]:
    (tokenized,) = render_prompts([prompt], target, chat)
    return tokenized.token_ids


def test_a_conversation_goes_through_the_template():
    (tokenized,) = render_prompts([GREETING], tokenizer())
    assert tokenized.token_ids == [BOS, USER, HELLO, ASSISTANT]
    assert tokenized.text == "<s><|user|> hello <|assistant|>"
    assert (tokenized.id, tokenized.category) == ("chat", "greeting")


def test_plain_text_is_tokenised_as_it_is():
    prompt = Prompt(id="plain", text="hello world")
    assert ids(prompt, tokenizer()) == [BOS, HELLO, WORLD]
    assert ids(prompt, tokenizer(adds_bos=False)) == [HELLO, WORLD]
    assert ids(prompt, tokenizer(), chat=True) == [BOS, USER, HELLO, WORLD, ASSISTANT]


def test_no_prompt_starts_with_two_bos_tokens():
    assert ids(Prompt(id="plain", text="<s> hello"), tokenizer()) == [BOS, HELLO]
    assert ids(GREETING, tokenizer("{{ bos_token }}" + TEMPLATE)) == [BOS, USER, HELLO, ASSISTANT]


def test_a_target_without_a_template_gets_the_plain_message():
    assert ids(GREETING, tokenizer(template=None)) == [BOS, HELLO]
    assert ids(GREETING, tokenizer(), chat=False) == [BOS, HELLO]


def test_several_messages_need_a_template():
    messages = [{"role": role, "content": "hello"} for role in ("user", "assistant", "user")]
    with pytest.raises(ValueError, match="prompt 'long' is a conversation of 3 messages"):
        ids(Prompt(id="long", messages=messages), tokenizer(template=None))


def test_chat_without_a_template_is_refused():
    with pytest.raises(ValueError, match="no chat template; set data.chat=auto"):
        ids(GREETING, tokenizer(template=None), chat=True)


def test_a_template_that_refuses_names_the_prompt():
    messages = [{"role": "system", "content": "hello"}, {"role": "user", "content": "world"}]
    with pytest.raises(
        ValueError, match="prompt 'sys': the target's chat template refuses it: no system role"
    ):
        ids(Prompt(id="sys", messages=messages), tokenizer())


@pytest.mark.parametrize(
    "prompt", [Prompt(id="void", text=""), Prompt(id="void", messages=[{"role": "user", "content": ""}])]
)
def test_empty_prompts_are_refused(prompt):
    with pytest.raises(ValueError, match="prompt 'void' is empty"):
        ids(prompt, tokenizer())


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="prompt 'blank' has no tokens"):
        ids(Prompt(id="blank", text="  "), tokenizer(adds_bos=False))

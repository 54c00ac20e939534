"""From prompts to the token ids a target reads."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jinja2 import TemplateError

from specdec.data.prompt import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizedPrompt:
    """What the engine is given: `token_ids`, and the `text` they were made from."""

    id: str
    token_ids: list[int]
    text: str
    category: str | None = None


def render_prompts(
    prompts: list[Prompt], tokenizer: "PreTrainedTokenizerBase", chat: bool | Literal["auto"] = "auto"
) -> list[TokenizedPrompt]:
    """Tokenise prompts as the target expects them.

    With "auto" a conversation goes through the tokenizer's chat template when there is one; plain text is
    tokenised as it is. `True` treats plain text as one user message, `False` uses no template. Without a
    template a conversation of one message is tokenised as that message's text. No prompt starts with two
    beginning-of-sequence tokens.

    Raises:
        ValueError: an empty prompt; `chat=True` without a template; a conversation of several messages
            without one; a conversation that the template refuses. Each names the prompt.
    """
    if chat is True and not tokenizer.chat_template:
        raise ValueError(
            "data.chat=true, but the target's tokenizer has no chat template; set data.chat=auto"
        )
    return [_render(prompt, tokenizer, chat) for prompt in prompts]


def _render(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", chat: bool | Literal["auto"]
) -> TokenizedPrompt:
    _refuse_empty(prompt)
    templated = chat is True or (chat == "auto" and prompt.messages is not None and tokenizer.chat_template)
    text = _apply_template(prompt, tokenizer) if templated else _plain_text(prompt)
    # A template writes the special tokens itself.
    token_ids = list(tokenizer.encode(text, add_special_tokens=not templated))
    bos = tokenizer.bos_token_id
    if bos is not None and token_ids[:2] == [bos, bos]:
        token_ids = token_ids[1:]
    if not token_ids:
        raise ValueError(f"prompt {prompt.id!r} has no tokens; give it some text")
    return TokenizedPrompt(id=prompt.id, token_ids=token_ids, text=text, category=prompt.category)


def _refuse_empty(prompt: Prompt) -> None:
    contents = [prompt.text] if prompt.messages is None else [m["content"] for m in prompt.messages]
    if not any(contents):
        raise ValueError(f"prompt {prompt.id!r} is empty; give it some text or remove it")


def _plain_text(prompt: Prompt) -> str:
    if prompt.messages is None:
        assert prompt.text is not None
        return prompt.text
    if len(prompt.messages) > 1:
        raise ValueError(
            f"prompt {prompt.id!r} is a conversation of {len(prompt.messages)} messages, but no chat "
            "template is in use; set data.chat=auto with a target that has one, or give plain text"
        )
    return str(prompt.messages[0]["content"])


def _apply_template(prompt: Prompt, tokenizer: "PreTrainedTokenizerBase") -> str:
    messages: list[Message] = prompt.messages or [{"role": "user", "content": prompt.text}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise ValueError(f"prompt {prompt.id!r}: the target's chat template refuses it: {error}") from error

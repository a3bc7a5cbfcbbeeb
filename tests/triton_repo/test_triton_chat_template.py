from __future__ import annotations

from pathlib import Path

import pytest

from plansmith_errors import RequestError
from triton_repo import render_chat, render_chat_with

CHATML = """\
{% for message in messages %}
{% if loop.first and message.role != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
USER = [{"role": "user", "content": "Hi <b>"}]


def test_a_chat_becomes_a_prompt() -> None:
    assert render_chat(CHATML, USER) == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    )
    assert not render_chat(CHATML, USER, add_generation_prompt=False).endswith("assistant\n")


def test_it_renders_as_transformers_does() -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = (
        "{{ bos_token }}{%- for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}\n"
        "  {{ m | tojson }}|{{ m.content | trim }}{% endfor %}{{ eos_token }}"
    )
    messages = [*USER, {"role": "tool", "content": "x"}, {"role": "assistant", "content": " é \n"}]
    compiled = chat_template_utils._compile_jinja_template(template)
    expected = compiled.render(messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)
    assert render_chat(template, messages, bos_token="<s>", eos_token="</s>") == expected


def test_the_template_may_ask_for_the_date() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", USER).isdigit()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{% for x in", "the chat template fails"),
        ("{{ messages[0].missing.deeper }}", "the chat template fails"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template fails"),
        ("{{ messages.append(1) }}", "the chat template fails"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_foreign_templates_cannot_do_harm(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(template, USER)


def test_a_chat_needs_messages() -> None:
    with pytest.raises(RequestError, match="no messages"):
        render_chat(CHATML, [])


def test_the_template_of_a_tokenizer_directory_is_used_with_its_tokens(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has no chat template"):
        render_chat_with(tmp_path, USER)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<s>"}}'
    )
    assert render_chat_with(tmp_path, USER) == "<s>Hi <b>"
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    assert render_chat_with(tmp_path, USER) == "file: Hi <b>"

"""Chat messages to a prompt, with the checkpoint's Jinja template, rendered as transformers renders it.

Source: transformers.utils.chat_template_utils; the sandbox, its filters and the whitespace rules are the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from plansmith_errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
) -> str:
    """Render messages such as ``{"role": "user", "content": "Hi"}``.

    Raises RequestError when the template is broken, refuses the messages, or tries to leave its sandbox.
    """
    from jinja2 import TemplateError

    if not messages:
        raise RequestError("the chat has no messages; give at least one")
    try:
        return _compile(template).render(
            messages=list(messages),
            bos_token=bos_token,
            eos_token=eos_token,
            add_generation_prompt=add_generation_prompt,
        )
    except RequestError:
        raise
    except TemplateError as error:
        raise RequestError(f"the chat template fails: {error}") from None
    except Exception as error:  # the template is foreign code: whatever it raises is its own fault
        raise RequestError(f"the chat template fails: {type(error).__name__}: {error}") from None


def render_chat_with(
    directory: Path, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> str:
    """Render with the chat template and special tokens of a tokenizer directory. Raises RequestError."""
    config = _read_tokenizer_config(directory)
    template = _find_template(directory, config)
    if template is None:
        raise RequestError(f"{directory}: the model has no chat template; send a plain prompt")
    return render_chat(
        template,
        messages,
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
        add_generation_prompt=add_generation_prompt,
    )


def check_chat_template(directory: Path) -> None:
    """Compile the chat template of a tokenizer directory, if it has one. Raises RequestError when that fails."""
    from jinja2 import TemplateError

    template = _find_template(directory, _read_tokenizer_config(directory))
    try:
        if template is not None:
            _compile(template)
    except TemplateError as error:
        raise RequestError(f"the chat template does not compile: {error}") from None


def _find_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    return template if isinstance(template, str) else None


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _raise_exception(message: str) -> NoReturn:
    raise RequestError(f"the chat template refuses these messages: {message}")


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _read_tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be read as JSON: {error}") from None
    return config if isinstance(config, dict) else {}


def _token_text(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""

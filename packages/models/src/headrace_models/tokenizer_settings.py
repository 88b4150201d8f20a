"""What surrounds a tokenizer: its special tokens and chat templates, from a folder or from GGUF metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from attrs import frozen

from headrace_models.errors import SourceError
from headrace_models.folder import read_json_object

__all__ = ["TokenizerSettings"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_GGUF_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


@frozen(kw_only=True)
class TokenizerSettings:
    """Special tokens and chat templates.

    Attributes:
        special_tokens: text by name, for example `bos_token`.
        templates: Jinja text by name; empty when the model has no chat template.
    """

    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]

    @classmethod
    def from_folder(cls, folder: Path) -> "TokenizerSettings":
        """Read tokenizer_config.json and the template files; chat_template.jinja wins over the config's own.

        Raises:
            SourceError: a file is damaged or a field has the wrong type.
        """
        path = folder / "tokenizer_config.json"
        settings = read_json_object(path) if path.is_file() else {}
        special = {name: _token_text(settings[name]) for name in _SPECIAL_NAMES if name in settings}
        templates = _config_templates(settings.get("chat_template"), origin=path)
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[file.stem] = _read_text(file)
        file = folder / "chat_template.jinja"
        if file.is_file():
            templates["default"] = _read_text(file)
        present = {name: text for name, text in special.items() if text is not None}
        return cls(special_tokens=present, templates=templates)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "TokenizerSettings":
        """Read the ids and templates under `tokenizer.` of GGUF metadata."""
        tokens = metadata.get("tokenizer.ggml.tokens")
        vocabulary = cast("list[str]", tokens) if isinstance(tokens, list) else []
        special: dict[str, str] = {}
        for name, key in _GGUF_SPECIAL.items():
            token_id = metadata.get(key)
            if type(token_id) is int and 0 <= token_id < len(vocabulary):
                special[name] = vocabulary[token_id]
        prefix = "tokenizer.chat_template"
        found = {
            key.removeprefix(prefix).removeprefix("."): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        templates = {name or "default": value for name, value in found.items() if isinstance(value, str)}
        return cls(special_tokens=special, templates=templates)


def _token_text(token: object) -> str | None:
    if isinstance(token, dict):
        token = cast("dict[str, object]", token).get("content")
    return token if isinstance(token, str) else None


def _config_templates(value: object, *, origin: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named = cast("list[dict[str, object]]", value) if isinstance(value, list) else [{}]
    templates: dict[str, str] = {}
    for entry in named:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not isinstance(name, str) or not isinstance(text, str):
            raise SourceError(
                f"'chat_template' of {str(origin)!r} is {value!r:.80}; a string or a list of objects with 'name' and "
                f"'template' is expected: correct the file"
            )
        templates[name] = text
    return templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"cannot read {str(path)!r}: {error}: fetch the file again") from error

"""Writes a codec's files beside exported weights, in the form that transformers and mlx-lm read."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from headrace_models.config import ModelConfig, read_config
from headrace_models.gguf_file import GgufFile, read_gguf
from headrace_models.sources import ModelSource
from headrace_models.tokenizer import build_tokenizer
from headrace_models.tokenizer_settings import TokenizerSettings

__all__ = ["tokenizer_files"]

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def tokenizer_files(source: ModelSource, folder: Path, *, gguf: GgufFile | None = None) -> list[Path]:
    """Write tokenizer.json, tokenizer_config.json with the chat template, and generation_config.json.

    A folder's own files are copied as they are; a GGUF file's are made from its metadata.

    Args:
        source: the model whose tokenizer is written.
        folder: an existing folder; files of the same name in it are replaced.
        gguf: the GGUF file's head, when the caller has parsed it already.

    Returns:
        The files written.

    Raises:
        SourceError: the model lacks a file or field.
        UnsupportedFormat: the tokenizer is of a kind that is not read.
    """
    if source.format == "folder":
        return _copied(source.path, folder)
    gguf = gguf or read_gguf(source.path)
    config = read_config(source, gguf=gguf)
    tokenizer = build_tokenizer(gguf.metadata)
    settings = TokenizerSettings.from_gguf(gguf.metadata)
    written = [folder / "tokenizer.json"]
    tokenizer.save(str(written[0]), pretty=False)
    added = {
        str(token_id): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    tokenizer_config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
        "added_tokens_decoder": added,
        **settings.special_tokens,
        **_template_entry(settings.templates),
    }
    written.append(_write(folder / "tokenizer_config.json", tokenizer_config))
    written.append(_write(folder / "generation_config.json", _generation(config)))
    return written


def _copied(origin: Path, folder: Path) -> list[Path]:
    present = [origin / name for name in _COPIED if (origin / name).is_file()]
    written = [Path(shutil.copyfile(path, folder / path.name)) for path in present]
    extra = origin / "additional_chat_templates"
    if extra.is_dir():
        target = Path(shutil.copytree(extra, folder / extra.name, dirs_exist_ok=True))
        written.extend(sorted(target.glob("*.jinja")))
    return written


def _template_entry(templates: Mapping[str, str]) -> dict[str, object]:
    if not templates:
        return {}
    if set(templates) == {"default"}:
        return {"chat_template": templates["default"]}
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}


def _generation(config: ModelConfig) -> dict[str, object]:
    defaults = config.generation
    eos = sorted(config.eos_token_ids)
    values: dict[str, object] = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "repetition_penalty": defaults.repetition_penalty,
    }
    return {name: value for name, value in values.items() if value is not None}


def _write(path: Path, value: Mapping[str, object]) -> Path:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return path

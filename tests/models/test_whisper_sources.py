"""Where Whisper models come from: index packages, a hub, folders; and the vocabularies that the package has."""

import hashlib
import json
from pathlib import Path

import pytest

from headrace_models import ChecksumMismatch, SourceError
from headrace_models.index_models import IndexModel
from headrace_models.whisper import WHISPER_INDEX_MODELS, load_whisper, resolve_whisper, sources
from headrace_models.whisper.sources import WhisperIndexModel
from headrace_models.whisper.special import SpecialTokens
from headrace_models.whisper.tokenizer import load_tokenizer


def test_index_models_are_pinned():
    """Every part and file beside it has a sha256, and the licence lets anybody use it."""
    for model in WHISPER_INDEX_MODELS.values():
        assert set(model.sidecars) == {"config.json", "tokenizer.json"}
        digests = [*(part.sha256 for part in model.parts), *model.sidecars.values()]
        assert all(len(digest) == 64 for digest in digests)
        assert {part.licence for part in model.parts} == {"MIT"}


def test_parts_are_read_as_one_file_and_files_beside_them_are_verified(tmp_path, monkeypatch):
    """A model in two packages is found in the cache; a changed tokenizer is refused."""
    parts, contents = [], [b"one", b"two"]
    for number, content in enumerate(contents, 1):
        home = tmp_path / f"toy-part{number}-1.0"
        (home / "data").mkdir(parents=True)
        (home / "data" / f"model.bin.part{number}").write_bytes(content)
        parts.append(
            IndexModel(
                package=f"toy-part{number}",
                version="1.0",
                file=f"data/model.bin.part{number}",
                sha256=hashlib.sha256(content).hexdigest(),
                size_bytes=len(content),
                licence="MIT",
            )
        )
    beside = tmp_path / "toy-part1-1.0" / "data"
    digests = {}
    for name in ("config.json", "tokenizer.json"):
        (beside / name).write_text("{}")
        digests[name] = hashlib.sha256(b"{}").hexdigest()
    model = WhisperIndexModel(parts=tuple(parts), sidecars=digests)
    monkeypatch.setattr(sources, "WHISPER_INDEX_MODELS", {"toy": model})
    found = resolve_whisper("toy", cache_dir=tmp_path, download=False)
    assert b"".join(path.read_bytes() for path in found.weights) == b"onetwo"
    assert (found.format, found.tokenizer) == ("ctranslate2", beside / "tokenizer.json")
    (beside / "tokenizer.json").write_text("[]")
    with pytest.raises(ChecksumMismatch, match=r"tokenizer\.json"):
        resolve_whisper("toy", cache_dir=tmp_path, download=False)
    with pytest.raises(SourceError, match="downloads are off"):
        resolve_whisper("toy", cache_dir=tmp_path / "empty", download=False)


def test_a_snapshot_in_the_hub_cache_needs_no_network(tiny_whisper_folder, tmp_path):
    """A hub id leads to the cached snapshot; without one, and with downloads off, the error says so."""
    commit = "0" * 40
    repo = tmp_path / "models--org--toy-whisper"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    for path in Path(tiny_whisper_folder).iterdir():
        (snapshot / path.name).write_bytes(path.read_bytes())
    found = resolve_whisper("org/toy-whisper", hub_cache_dir=tmp_path, download=False)
    assert (found.name, found.format) == ("org/toy-whisper", "transformers")
    assert load_whisper(found, dtype="float32").config.num_mels == 16
    with pytest.raises(SourceError, match="downloads are off"):
        resolve_whisper("org/other", hub_cache_dir=tmp_path, download=False)


@pytest.mark.parametrize(
    ("vocab_size", "is_multilingual", "facts"),
    [
        (51_864, False, (50_256, 50_257, 50_361, 50_363)),
        (51_865, True, (50_257, 50_258, 50_362, 50_364)),
        (51_866, True, (50_257, 50_258, 50_363, 50_365)),
    ],
)
def test_special_tokens_are_where_openai_puts_them(vocab_size, is_multilingual, facts):
    """English-only, multilingual and large-v3 vocabularies: end, start, no speech, first of 1,501 timestamps."""
    tokenizer = load_tokenizer(None, vocab_size, is_multilingual=is_multilingual)
    special = tokenizer.special
    assert (special.eot, special.sot, special.no_speech, special.timestamp_begin) == facts
    assert special.num_timestamps == 1_501
    assert ("yue" in special.languages) == (vocab_size == 51_866)
    start = special.start(language="de", task="translate", with_timestamps=False) if is_multilingual else (special.sot,)
    assert start[0] == special.sot
    assert len(start) == (4 if is_multilingual else 1)


@pytest.mark.parametrize(
    ("is_multilingual", "ids"),
    [(True, [2425, 11, 1002, 0]), (False, [18435, 11, 995, 0])],
)
def test_vocabularies_are_openais(is_multilingual, ids):
    """Ids of a well-known sentence, and any bytes come back as they were; special tokens in text are text."""
    tokenizer = load_tokenizer(None, 51_865 if is_multilingual else 51_864, is_multilingual=is_multilingual)
    assert tokenizer.encode(" Hello, world!") == ids
    for text in ("naïve 中文 🎉\n\tx", "<|endoftext|> <|en|>", ""):
        found = tokenizer.encode(text)
        assert tokenizer.decode(found) == text
        assert all(token < tokenizer.special.eot for token in found)


def test_foreign_tokenizers_are_refused(tiny_whisper_folder, tmp_path):
    """A tokenizer without Whisper's tokens, or in which timestamps have no room, is named."""
    path = tmp_path / "tokenizer.json"
    values = json.loads((tiny_whisper_folder / "tokenizer.json").read_text())
    with pytest.raises(ValueError, match="timestamps must follow"):
        load_tokenizer(tiny_whisper_folder / "tokenizer.json", 267, is_multilingual=True)
    values["added_tokens"] = values["added_tokens"][:3]
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="translate"):
        load_tokenizer(path, 318, is_multilingual=True)
    with pytest.raises(ValueError, match="51864"):
        SpecialTokens.standard(50_257, 1_000, is_multilingual=True)

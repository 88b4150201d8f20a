"""Tokenizers: read from a folder's tokenizer.json, or built from the vocabulary in GGUF metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from headrace_models.errors import SourceError, UnsupportedFormat

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

__all__ = ["build_tokenizer", "read_tokenizer"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_WORD_BOUNDARY = "\u2581"

# Splitting patterns by `tokenizer.ggml.pre`, as the models' authors publish them in their tokenizer.json.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    (
        r"[^\r\n\p{L}\p{N}]?UPPER*LOWER+ENDING|[^\r\n\p{L}\p{N}]?UPPER+LOWER*ENDING|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    .replace("UPPER", _UPPER)
    .replace("LOWER", _LOWER)
)
_GPT4O = _CASED.replace("ENDING", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", r"\p{N}{1,3}")
_TEKKEN = _CASED.replace("ENDING", "").replace("DIGITS", r"\p{N}")
_PATTERNS = {
    "chatglm-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "deepseek-r1-qwen": _QWEN2,
    "glm4": _LLAMA3,
    "gpt-2": _GPT2,
    "gpt-4o": _GPT4O,
    "gpt2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "smaug-bpe": _LLAMA3,
    "tekken": _TEKKEN,
}
# Their vocabularies hold whole words that no merges lead to.
_WITH_WHOLE_WORDS = frozenset({"llama-bpe", "llama-v3", "llama3", "tekken"})
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r"})


def read_tokenizer(path: Path) -> "Tokenizer":
    """Read a tokenizer.json; truncation and padding that it may ask for are switched off.

    Raises:
        SourceError: the file cannot be read or is no tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise SourceError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except Exception as error:
        # The tokenizers library raises plain Exception for whatever it cannot parse.
        raise SourceError(f"{str(path)!r} is no tokenizer.json that is read here ({error}): fetch it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def build_tokenizer(metadata: Mapping[str, object]) -> "Tokenizer":
    """Build the tokenizer that GGUF metadata describes.

    `tokenizer.ggml.model = gpt2` is byte-level BPE with the split that `tokenizer.ggml.pre` names; `llama` is BPE
    over scored pieces with byte fallback, as SentencePiece does it.

    Raises:
        SourceError: vocabulary, types, scores or merges are missing or contradict each other.
        UnsupportedFormat: the model or its split is not known here.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(metadata)
    elif model == "llama":
        tokenizer = _scored(metadata)
    else:
        raise UnsupportedFormat(
            f"'tokenizer.ggml.model' is {model!r}; 'gpt2' and 'llama' are read: use a folder with a tokenizer.json"
        )
    special, visible = _added_tokens(metadata)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(visible)
    _add_bos(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: Mapping[str, object]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in _DIGITS_APART)
    if name in _DIGITS_APART:
        split = pre_tokenizers.Digits(individual_digits=True)
    elif name in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[cast("str", name)]), behavior="isolated")
    else:
        known = ", ".join(sorted({*_PATTERNS, *_DIGITS_APART}))
        raise UnsupportedFormat(
            f"'tokenizer.ggml.pre' is {name!r}; known are {known}: use a folder with a tokenizer.json, or convert the "
            f"model again with a recent llama.cpp"
        )
    merges = _pairs(_strings(metadata, "merges"))
    bpe = models.BPE(vocab=_vocabulary(metadata), merges=merges, ignore_merges=name in _WITH_WHOLE_WORDS)
    tokenizer = Tokenizer(bpe)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if set(map(len, pairs)) - {2}:
        raise SourceError("'tokenizer.ggml.merges' holds entries that are not two pieces and a space between them")
    return cast("list[tuple[str, str]]", pairs)


def _scored(metadata: Mapping[str, object]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = _strings(metadata, "tokens")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    bpe = models.BPE(
        vocab=_vocabulary(metadata),
        merges=_scored_merges(metadata),
        unk_token=tokens[unknown] if type(unknown) is int and unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", _WORD_BOUNDARY)
    back = [decoders.Replace(_WORD_BOUNDARY, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_WORD_BOUNDARY), spaces])
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _scored_merges(metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    """Derive merges from scores: every split of a piece into two known pieces, best-scored piece first."""
    tokens = _strings(metadata, "tokens")
    types = _integers(metadata, "token_type", len(tokens))
    scores = _list(metadata, "scores")
    if len(scores) != len(tokens):
        raise SourceError(f"'tokenizer.ggml.scores' has {len(scores)} entries for {len(tokens)} tokens")
    # A merge may neither use nor make a token that text cannot reach.
    pieces = {
        token: (-cast("float", score), token_id)
        for token_id, (token, kind, score) in enumerate(zip(tokens, types, scores, strict=True))
        if kind in {_NORMAL, _USER_DEFINED}
    }
    ordered: list[tuple[tuple[float, int], tuple[str, str]]] = []
    for token, rank in pieces.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                ordered.append((rank, (left, right)))
    ordered.sort(key=lambda entry: entry[0])
    return [pair for _, pair in ordered]


def _added_tokens(metadata: Mapping[str, object]) -> "tuple[list[AddedToken], list[AddedToken]]":
    """Collect control tokens, which are never shown, and user-defined ones, which are text."""
    from tokenizers import AddedToken

    tokens = _strings(metadata, "tokens")
    types = _integers(metadata, "token_type", len(tokens))
    special: list[AddedToken] = []
    visible: list[AddedToken] = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in {_UNKNOWN, _CONTROL}:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            visible.append(AddedToken(token, special=False, normalized=False))
    return special, visible


def _add_bos(tokenizer: "Tokenizer", metadata: Mapping[str, object]) -> None:
    from tokenizers import processors

    # llama.cpp adds the start token for SentencePiece vocabularies unless the file says otherwise.
    wanted = metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    token = tokenizer.id_to_token(bos) if type(bos) is int else None
    if not wanted or token is None:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, cast("int", bos))]
    )


def _vocabulary(metadata: Mapping[str, object]) -> dict[str, int]:
    tokens = _strings(metadata, "tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise SourceError(
            f"'tokenizer.ggml.tokens' names {len(tokens) - len(vocabulary)} tokens twice: convert the model again"
        )
    return vocabulary


def _strings(metadata: Mapping[str, object], name: str) -> list[str]:
    values = _list(metadata, name)
    if set(map(type, values)) - {str}:
        raise SourceError(f"'tokenizer.ggml.{name}' holds other values than strings: convert the model again")
    return cast("list[str]", values)


def _integers(metadata: Mapping[str, object], name: str, count: int) -> list[int]:
    values = _list(metadata, name)
    if len(values) != count or set(map(type, values)) - {int}:
        raise SourceError(f"'tokenizer.ggml.{name}' has {len(values)} entries; {count} integers are expected")
    return cast("list[int]", values)


def _list(metadata: Mapping[str, object], name: str) -> list[object]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise SourceError(
            f"'tokenizer.ggml.{name}' is {'missing' if values is None else repr(values)}; a list is expected: "
            f"convert the model again with a recent llama.cpp"
        )
    return cast("list[object]", values)

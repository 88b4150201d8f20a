"""What a window is told before it is decoded: prompt, vocabulary, the text before it, and a prefix."""

from collections.abc import Sequence

from attrs import frozen

from headrace_models.whisper.errors import InvalidTranscribeOption
from headrace_models.whisper.results import VocabularyUse
from headrace_models.whisper.tokenizer import WhisperTokenizer

__all__ = ["Opening", "fit_vocabulary", "open_window"]

_SEPARATOR = ", "


@frozen(kw_only=True)
class Opening:
    """The tokens that a window is decoded after."""

    tokens: tuple[int, ...]
    sot_index: int


def fit_vocabulary(
    tokenizer: WhisperTokenizer, prompt: str | None, terms: Sequence[str], text_context: int
) -> tuple[str, VocabularyUse]:
    """Put as many terms behind a prompt as it may hold: whole ones, in order; one too long makes room for the next.

    Args:
        text_context: of the model; a prompt may have half of it less one.

    Returns:
        The prompt with terms, and which they are.
    """
    budget = text_context // 2 - 1
    text = (prompt or "").strip()
    count = len(tokenizer.encode_context(text))
    included: list[str] = []
    omitted: list[str] = []
    for term in map(str.strip, terms):
        joined = f"{text}{_SEPARATOR if included else ' ' if text else ''}{term}"
        # Joining may merge tokens, so the whole is counted, but only for terms that can fit at all.
        joined_count = len(tokenizer.encode_context(joined)) if count < budget else budget + 1
        if joined_count <= budget:
            text, count = joined, joined_count
            included.append(term)
        else:
            omitted.append(term)
    use = VocabularyUse(included=tuple(included), omitted=tuple(omitted), token_count=count, token_budget=budget)
    return text, use


def open_window(
    start: Sequence[int], *, sot_prev: int, prompt: Sequence[int], prefix: Sequence[int], text_context: int
) -> Opening:
    """Put a window's opening together; of a long prompt, the end is kept.

    Args:
        start: tokens that start a transcript, with language and task.
        prompt: tokens before it; may be empty.
        prefix: tokens that the transcript begins with.

    Raises:
        InvalidTranscribeOption: the prefix leaves no room for a transcript.
    """
    half = text_context // 2
    if len(prefix) >= half:
        raise InvalidTranscribeOption(
            f"prefix has {len(prefix)} tokens; at most {half - 1} leave room for a transcript: shorten it."
        )
    kept = list(prompt)[-(half - 1) :] if prompt else []
    before = [sot_prev, *kept] if kept else []
    return Opening(tokens=(*before, *start, *prefix), sot_index=len(before))

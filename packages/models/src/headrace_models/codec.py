"""The codec of a model: text to token ids and back, and conversations to prompts. Free of arrays; thread-safe."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from headrace_models.boundary import BoundaryProbe
from headrace_models.config import read_config
from headrace_models.decoder import ByteDecoder, TokenDecoder, WindowDecoder, make_piece_table
from headrace_models.errors import TemplateError
from headrace_models.gguf_file import GgufFile, read_gguf
from headrace_models.history import TokenHistory
from headrace_models.reasoning import reasoning_kwargs
from headrace_models.sources import ModelSource
from headrace_models.template import ChatTemplate
from headrace_models.tokenizer import build_tokenizer, read_tokenizer
from headrace_models.tokenizer_settings import TokenizerSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Codec", "PreparedPrompt", "load_codec"]


@frozen(kw_only=True)
class PreparedPrompt:
    """A conversation as the model reads it.

    Attributes:
        ids: the prompt's token ids.
        stable_boundary: how many leading ids the next turn's prompt will share; all of them where that is not known.
        starts_in_reasoning: the template has opened a `<think>` block that the reply goes on in.
    """

    ids: list[int]
    stable_boundary: int
    starts_in_reasoning: bool


class Codec:
    """Text and token ids of one model.

    Attributes:
        eos_token_ids: ids that end a reply.
        vocab_size: number of tokens, added ones included; a model's head may be padded beyond it.
        identity: sha256 over vocabulary, special tokens and templates.
        special_tokens: their names in templates, such as `bos_token`, and their texts.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        settings: TokenizerSettings,
        *,
        eos_token_ids: frozenset[int],
        identity: str,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.identity = identity
        self.special_tokens = dict(settings.special_tokens)
        self._tokenizer = tokenizer
        self._template = ChatTemplate(settings.templates, settings.special_tokens) if settings.templates else None
        bos = settings.special_tokens.get("bos_token")
        self._bos_id = None if bos is None else tokenizer.token_to_id(bos)
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = eos_token_ids | {token_id for token_id, token in added.items() if token.special}
        self._probe = BoundaryProbe()
        self._history = TokenHistory(self._encode_prompt, self._decode_raw)
        self._pieces = make_piece_table(tokenizer, self._hidden)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def template_source(self, *, with_tools: bool) -> str:
        """Return the text of the template that renders conversations with or without tools; empty without one."""
        return "" if self._template is None else self._template.source_for(with_tools=with_tools)

    def show_tokens(self, texts: Iterable[str]) -> None:
        """Let special tokens with these texts appear in decoded text, for what reads reasoning or calls from it.

        Call it before the first decoder is made. End tokens stay hidden, and texts that are no token are ignored.
        """
        shown = {self._tokenizer.token_to_id(text) for text in texts}
        self._hidden = self._hidden - (shown - self.eos_token_ids)
        self._pieces = make_piece_table(self._tokenizer, self._hidden)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode text; special tokens written in it are read as such.

        Args:
            text: any.
            add_special_tokens: add a start token where it is due; text from a chat template has its own.
        """
        return self._encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids at once; bytes that are no character become U+FFFD.

        Args:
            token_ids: those that the tokenizer does not know stand for nothing.
            skip_special_tokens: leave out special tokens; else they appear by their names.
        """
        if not skip_special_tokens:
            return self._decode_raw(token_ids)
        shown = [token_id for token_id in token_ids if token_id not in self._hidden]
        return self._tokenizer.decode(shown, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, for a special token those of its name; none for an unknown id."""
        if self._pieces is not None and token_id not in self._hidden:
            return self._pieces.bytes_of(token_id)
        if token_id in self._hidden:
            return (self._tokenizer.id_to_token(token_id) or "").encode()
        return self._decode_raw([token_id]).encode()

    def tokenizer_json(self) -> str:
        """Return the tokenizer in the format of the tokenizers library, for what builds its own from it."""
        return self._tokenizer.to_str()

    def new_decoder(self) -> TokenDecoder:
        """Make a decoder for one row. Its texts joined equal `decode`, less bytes that are no character."""
        if self._pieces is not None:
            return ByteDecoder(self._pieces)
        return WindowDecoder(self._tokenizer, self._hidden)

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> PreparedPrompt:
        """Render a conversation with the model's template and encode it. May take long: templates are programs.

        Arguments and errors are those of `render_chat`.
        """
        template, given = self._template_variables(tools, reasoning_effort, template_kwargs)
        text = template.render(messages, template_kwargs=given)
        canonical = self._encode_prompt(text)
        ids = self._history.resolve(text, canonical)
        return PreparedPrompt(
            ids=ids,
            stable_boundary=self._probe.stable_length(
                num_ids=len(ids),
                canonical=canonical,
                messages=messages,
                template_kwargs=given,
                encode=lambda turns: self._encode_prompt(template.render(turns, template_kwargs=given)),
            ),
            starts_in_reasoning=text.rfind("<think>") > text.rfind("</think>"),
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Render a conversation with the model's template. May take long: templates are programs.

        Args:
            messages: as the API takes them.
            tools: descriptions of the tools that the model may call; also taken from `template_kwargs`.
            reasoning_effort: none, minimal, low, medium, high or xhigh; brought to what the template knows.
            template_kwargs: further variables of the template, for example enable_thinking.

        Raises:
            TemplateError: the model has no chat template, or its template refuses the messages.
        """
        template, given = self._template_variables(tools, reasoning_effort, template_kwargs)
        return template.render(messages, template_kwargs=given)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Remember a prompt with the ids generated after it, so that the next turn's prompt repeats these very ids.

        A reply that is resent as text is encoded anew otherwise, perhaps to other ids than a prefix cache holds.
        """
        self._history.remember(token_ids)

    def _template_variables(
        self,
        tools: Sequence[Mapping[str, object]] | None,
        reasoning_effort: str | None,
        template_kwargs: Mapping[str, object] | None,
    ) -> tuple[ChatTemplate, dict[str, object]]:
        template = self._template
        if template is None:
            raise TemplateError("this model has no chat template: use raw completions, or a chat-tuned model")
        given = dict(template_kwargs or {})
        if tools is not None:
            given["tools"] = tools
        source = template.source_for(with_tools=bool(given.get("tools")))
        return template, reasoning_kwargs(source, reasoning_effort=reasoning_effort, template_kwargs=given)

    def _encode_prompt(self, text: str) -> list[int]:
        # The template writes the special tokens itself.
        return self._encode(text, add_special_tokens=False)

    def _decode_raw(self, token_ids: Sequence[int]) -> str:
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)
        return text

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Of the tokenizer's calls only the batched ones release the GIL: another one would stop all threads.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
        doubled = self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]
        return ids[1:] if doubled else ids


def load_codec(
    source: ModelSource,
    *,
    gguf: GgufFile | None = None,
    eos_token_ids: frozenset[int] | None = None,
    chat_template: str | None = None,
) -> Codec:
    """Load the codec of a model.

    Args:
        source: the model's files.
        gguf: the GGUF file's head, when the caller has parsed it already.
        eos_token_ids: ids that end a reply, when the caller has read the configuration already.
        chat_template: Jinja text to use instead of the model's own templates.

    Raises:
        SourceError: a file or field is missing or damaged.
        UnsupportedFormat: the tokenizer is of a kind that is not read.
    """
    if source.format == "gguf":
        gguf = gguf or read_gguf(source.path)
        tokenizer = build_tokenizer(gguf.metadata)
        settings = TokenizerSettings.from_gguf(gguf.metadata)
        content = _gguf_content(gguf.metadata)
    else:
        path = source.path / "tokenizer.json"
        tokenizer = read_tokenizer(path)
        settings = TokenizerSettings.from_folder(source.path)
        content = path.read_bytes()
    if chat_template is not None:
        settings = evolve(settings, templates={"default": chat_template})
    if eos_token_ids is None:
        eos_token_ids = read_config(source, gguf=gguf).eos_token_ids
    return Codec(tokenizer, settings, eos_token_ids=eos_token_ids, identity=_identity(content, settings))


def _identity(content: bytes, settings: TokenizerSettings) -> str:
    rest = json.dumps([dict(settings.special_tokens), dict(settings.templates)], sort_keys=True)
    return hashlib.sha256(content + b"\0" + rest.encode()).hexdigest()


def _gguf_content(metadata: Mapping[str, object]) -> bytes:
    described = sorted((key, value) for key, value in metadata.items() if key.startswith("tokenizer.ggml."))
    return "\n".join(f"{key}={value!r}" for key, value in described).encode()

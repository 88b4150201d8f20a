"""What was said last, as the prompt of what follows."""

from attrs import define, evolve, field

from headrace_http_api.audio_ports import TranscriptionOptions

__all__ = ["SpokenContext"]

# A vocabulary needs the prompt's room too.
CONTEXT_CHARS = 800
CONTEXT_CHARS_BESIDE_VOCABULARY = 200
# As OpenAI's: text that came of a higher temperature conditions nothing.
MAX_CONTEXT_TEMPERATURE = 0.5


@define
class SpokenContext:
    """The end of the text so far. Nothing if the options do not condition windows on it."""

    options: TranscriptionOptions
    _text: str = field(default="", repr=False)

    def add(self, text: str, temperature: float) -> None:
        """Take text that is final, and the temperature that it took."""
        if temperature > MAX_CONTEXT_TEMPERATURE:
            self._text = ""
            return
        num_chars = CONTEXT_CHARS_BESIDE_VOCABULARY if self.options.vocabulary else CONTEXT_CHARS
        self._text = (self._text + text)[-num_chars:].strip()

    def applied(self, options: TranscriptionOptions) -> TranscriptionOptions:
        """Return options whose prompt ends with what was said."""
        if not self._text or not self.options.condition_on_previous_text:
            return options
        return evolve(options, prompt=" ".join(part for part in (options.prompt, self._text) if part))

"""The languages that Whisper was trained on, in the order of their tokens, with the names people ask for them by."""

from collections.abc import Mapping
from types import MappingProxyType

from headrace_models.whisper.errors import UnknownLanguage

__all__ = ["LANGUAGES", "language_code"]

# Codes and names in the order of the vocabulary; `jw` is the model's own code of Javanese.
_NAMED = """
en english, zh chinese, de german, es spanish, ru russian, ko korean, fr french, ja japanese, pt portuguese,
tr turkish, pl polish, ca catalan, nl dutch, ar arabic, sv swedish, it italian, id indonesian, hi hindi,
fi finnish, vi vietnamese, he hebrew, uk ukrainian, el greek, ms malay, cs czech, ro romanian, da danish,
hu hungarian, ta tamil, no norwegian, th thai, ur urdu, hr croatian, bg bulgarian, lt lithuanian, la latin,
mi maori, ml malayalam, cy welsh, sk slovak, te telugu, fa persian, lv latvian, bn bengali, sr serbian,
az azerbaijani, sl slovenian, kn kannada, et estonian, mk macedonian, br breton, eu basque, is icelandic,
hy armenian, ne nepali, mn mongolian, bs bosnian, kk kazakh, sq albanian, sw swahili, gl galician, mr marathi,
pa punjabi, si sinhala, km khmer, sn shona, yo yoruba, so somali, af afrikaans, oc occitan, ka georgian,
be belarusian, tg tajik, sd sindhi, gu gujarati, am amharic, yi yiddish, lo lao, uz uzbek, fo faroese,
ht haitian_creole, ps pashto, tk turkmen, nn nynorsk, mt maltese, sa sanskrit, lb luxembourgish, my myanmar,
bo tibetan, tl tagalog, mg malagasy, as assamese, tt tatar, haw hawaiian, ln lingala, ha hausa, ba bashkir,
jw javanese, su sundanese, yue cantonese
"""

LANGUAGES: Mapping[str, str] = MappingProxyType(
    {code: name.replace("_", " ") for code, name in (pair.split() for pair in _NAMED.split(","))}
)
"""Names by code, such as `{"en": "english"}`; a model of the first generations knows all but the last, `yue`."""

_ALIASES: Mapping[str, str] = MappingProxyType(
    {name: code for code, name in LANGUAGES.items()}
    | {
        "burmese": "my",
        "castilian": "es",
        "flemish": "nl",
        "haitian": "ht",
        "jv": "jw",
        "letzeburgesch": "lb",
        "mandarin": "zh",
        "moldavian": "ro",
        "moldovan": "ro",
        "panjabi": "pa",
        "pushto": "ps",
        "sinhalese": "si",
        "valencian": "ca",
    }
)


def language_code(text: str) -> str:
    """Return the code of a language that is named by code, by name, or as a locale such as `pt-BR`.

    Raises:
        UnknownLanguage: Whisper does not know it.
    """
    name = text.strip().lower()
    for candidate in (name, name.replace("_", "-").partition("-")[0]):
        if candidate in LANGUAGES:
            return candidate
        if candidate in _ALIASES:
            return _ALIASES[candidate]
    raise UnknownLanguage(
        f"language is {text!r}; Whisper knows {len(LANGUAGES)} languages by code or name, such as 'en' or 'german': "
        "give one of them, or none to have it detected."
    )

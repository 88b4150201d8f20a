"""Texts as words that can be compared, and how many of them are wrong.

Lower case, no punctuation, hyphens part words, numbers are spelt, "Mr." is "mister".
"""

import re

UNITS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SPELLINGS = {"mr": "mister", "mrs": "missus", "dr": "doctor", "st": "saint", "gray": "grey", "harbor": "harbour"}


def spelt(number: int) -> str:
    """Return a number up to 9999 in words."""
    if number < 20:
        return UNITS[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f" {UNITS[number % 10]}" if number % 10 else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    return f"{spelt(number // unit)} {name}" + (f" {spelt(number % unit)}" if number % unit else "")


def words_of(text: str) -> list[str]:
    """Return what is compared."""
    text = re.sub(r"['\u2019]", "", text.lower())
    text = re.sub(r"\d{1,4}", lambda found: f" {spelt(int(found[0]))} ", text)
    return [SPELLINGS.get(word, word) for word in re.findall(r"[a-z0-9]+", text)]


def wrong_words(said: list[str], heard: list[str]) -> int:
    """Return the least number of words to replace, leave out and add."""
    row = list(range(len(heard) + 1))
    for place, word in enumerate(said, start=1):
        previous, row[0] = row[0], place
        for column, other in enumerate(heard, start=1):
            previous, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, previous + (word != other)),
            )
    return row[-1]

"""Makes the built-in model's task: row i of a split is a short customer message and the fields it states.

Knows nothing of tokens or models. `make_row(split, seed, i)` depends on its arguments alone, so any row can be made
again at any time and in any order. Training and held-out rows share no name, city, order id,
product phrase or phrasing.

The answer is one `key: value` line a field, always in this order; what the message does not state is `none`:
intent, priority (low, normal, high), order, item (one line an item: quantity and product in the singular),
date (MM-DD), city, name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random
from typing import Final

import phrases
from vocabulary import MONTHS, NUMBER_WORDS, Split, city, in_split, name, order_id, product

_CHOICE: Final = re.compile(r"\{([^{}]*)\}")
_VALUE: Final = re.compile(r"<(\w+)>")
# Values travel between these marks until typos are made, so that a value is never misspelt.
_OPEN: Final = "\x01"
_CLOSE: Final = "\x02"
_WORD: Final = re.compile(r"\x01[^\x02]*\x02|[a-z]{4,}")

INTENTS: Final = tuple(phrases.INTENTS)


@dataclass(frozen=True, slots=True)
class Row:
    message: str
    expected: str


@dataclass(slots=True)
class _Fields:
    intent: str
    priority: str = "normal"
    order: str | None = None
    items: list[tuple[int, str]] = field(default_factory=list)
    date: str | None = None
    city: str | None = None
    name: str | None = None

    def render(self, lower: bool) -> str:
        """The answer's text; values are copied as the message writes them."""
        items = [f"{quantity} {what}" for quantity, what in self.items] or [None]
        copied = [("order", self.order), *(("item", item) for item in items)]
        copied += [("date", self.date), ("city", self.city), ("name", self.name)]
        lines = [f"intent: {self.intent}", f"priority: {self.priority}"]
        for key, value in copied:
            text = "none" if value is None else value
            lines.append(f"{key}: {text.lower() if lower else text}")
        return "\n".join(lines)


def make_row(split: Split, seed: int, index: int) -> Row:
    """Row `index` of a split: the same for the same arguments on every machine."""
    return _Writer(Random(f"{split}/{seed}/{index}"), split).write()


class _Writer:
    """One message in the making."""

    def __init__(self, rng: Random, split: Split) -> None:
        self.rng = rng
        self.split = split
        self.values: dict[str, str] = {}

    def write(self) -> Row:
        rng = self.rng
        fields = _Fields(intent=rng.choice(INTENTS))
        sentences = [self._intent(fields)]
        details = [self._date(fields), self._city(fields), self._priority(fields), self._distractor()]
        details = [text for text in details if text]
        rng.shuffle(details)
        # Now and then a detail comes before the request.
        if details and rng.random() < 0.2:
            sentences.insert(0, details.pop())
        sentences += details
        text = self._with_name(fields, sentences)
        lower = rng.random() < 0.15
        text = self._misspell(text).replace(_OPEN, "").replace(_CLOSE, "")
        return Row(text.lower() if lower else text, fields.render(lower))

    def _say(self, options: list[str]) -> str:
        return self._fill(self._word(options))

    def _word(self, options: list[str]) -> str:
        """A sentence of the split, its choices made, its values still open."""
        while True:
            text = self.rng.choice(options)
            while (found := _CHOICE.search(text)) is not None:
                text = text[: found.start()] + self.rng.choice(found.group(1).split("|")) + text[found.end() :]
            if in_split(text, self.split, one_in=4):
                return re.sub(r"  +", " ", text)

    def _fill(self, text: str) -> str:
        return _VALUE.sub(lambda m: f"{_OPEN}{self._value(m.group(1))}{_CLOSE}", text)

    def _value(self, key: str) -> str:
        rng, split = self.rng, self.split
        if key == "other_name":
            return name(rng, split).split()[0]
        if key == "other_city":
            return city(rng, split)
        if key == "other_id":
            return order_id(rng, split)
        if key == "n":
            return str(rng.randrange(2, 40))
        return self.values[key]

    def _intent(self, fields: _Fields) -> str:
        rng = self.rng
        fields.order = None if fields.intent == "order" else order_id(rng, self.split)
        options = phrases.INTENTS[fields.intent]
        with_items = [text for text in options if "<items>" in text]
        sentence = self._word(with_items if with_items and rng.random() < 0.5 else options)
        if "<items>" in sentence:
            most = 6 if fields.intent == "order" else 3
            texts = []
            for _ in range(rng.randint(1, most)):
                singular, plural = product(rng, self.split)
                quantity, text = self._quantity(singular, plural)
                fields.items.append((quantity, singular))
                texts.append(text)
            self.values["items"] = self._join(texts)
        if fields.order is not None:
            self.values["id"] = rng.choice(["", "", "", "#"]) + fields.order
        return self._fill(sentence)

    def _quantity(self, singular: str, plural: str) -> tuple[int, str]:
        rng = self.rng
        kind = rng.random()
        if kind < 0.3:
            return 1, f"{rng.choice(['a', 'one', '1'])} {singular}"
        if kind < 0.55:
            quantity = rng.randrange(2, 100) if rng.random() < 0.4 else rng.randrange(2, 13)
            return quantity, f"{quantity} {plural}"
        if kind < 0.8:
            quantity = rng.randrange(2, 11)
            return quantity, f"{NUMBER_WORDS[quantity - 1]} {plural}"
        if kind < 0.9:
            quantity = rng.randrange(1, 31)
            return quantity, f"{quantity}{rng.choice([' x', 'x'])} {singular}"
        if kind < 0.95:
            return 2, f"a pair of {plural}"
        return 12, f"a dozen {plural}"

    def _join(self, texts: list[str]) -> str:
        if len(texts) == 1:
            return texts[0]
        word = self.rng.choice([" and ", " and ", ", ", " plus "])
        return ", ".join(texts[:-1]) + word + texts[-1]

    def _date(self, fields: _Fields) -> str | None:
        rng = self.rng
        if rng.random() < 0.4:
            return None
        month, day = rng.randrange(12), rng.randrange(1, 29)
        long = MONTHS[month] if rng.random() < 0.6 else MONTHS[month][:3]
        ordinal = "st" if day in (1, 21) else "nd" if day in (2, 22) else "rd" if day in (3, 23) else "th"
        self.values["date"] = rng.choice(
            [f"{day} {long}", f"{long} {day}", f"{long} {day}{ordinal}", f"the {day}{ordinal} of {long}"]
        )
        fields.date = f"{month + 1:02d}-{day:02d}"
        return self._say(phrases.DATES_AHEAD if fields.intent in ("order", "address") else phrases.DATES_PAST)

    def _city(self, fields: _Fields) -> str | None:
        if self.rng.random() < (0.15 if fields.intent == "address" else 0.4):
            return None
        fields.city = self.values["city"] = city(self.rng, self.split)
        return self._say(phrases.NEW_CITY_LINES if fields.intent == "address" else phrases.CITY_LINES)

    def _priority(self, fields: _Fields) -> str | None:
        kind = self.rng.random()
        if kind < 0.55:
            return None
        fields.priority = "high" if kind < 0.8 else "low"
        return self._say(phrases.HIGH if fields.priority == "high" else phrases.LOW)

    def _distractor(self) -> str | None:
        return self._say(phrases.DISTRACTORS) if self.rng.random() < 0.3 else None

    def _with_name(self, fields: _Fields, sentences: list[str]) -> str:
        """Greeting, who writes (at the start, at the end or nowhere), closing."""
        rng = self.rng
        head = self._say(phrases.GREETINGS) if rng.random() < 0.6 else ""
        kind = rng.random()
        if kind < 0.85:
            fields.name = self.values["name"] = name(rng, self.split)
        if kind < 0.3:
            introduction = self._say(phrases.INTRODUCTIONS)
            if not head:
                introduction = introduction[0].upper() + introduction[1:]
            sentences = [introduction, *sentences]
        body = " ".join([head, *sentences] if head else sentences)
        if 0.3 <= kind < 0.85:
            return body + rng.choice([" ", "\n"]) + self._say(phrases.SIGNATURES)
        return f"{body} {self._say(phrases.CLOSERS)}" if rng.random() < 0.4 else body

    def _misspell(self, text: str) -> str:
        """In a quarter of the messages, one word in twelve loses, doubles or swaps a letter (values never do)."""
        rng = self.rng
        if rng.random() >= 0.25:
            return text

        def change(found: re.Match[str]) -> str:
            word = found.group(0)
            if word[0] == _OPEN or rng.random() >= 0.08:
                return word
            i = rng.randrange(1, len(word) - 1)
            return rng.choice([word[:i] + word[i + 1 :], word[:i] + word[i] + word[i:],
                               word[:i] + word[i + 1] + word[i] + word[i + 2 :]])  # fmt: skip

        return _WORD.sub(change, text)

"""The words the built-in model's messages are made of, each list cut into a training and a held-out part.

Knows nothing of sentences or fields. Every list here was written for specbatch; made-up names come from syllables,
so that copying a name has to be learnt rather than remembered.
"""

from __future__ import annotations

from random import Random
from typing import Final, Literal
from zlib import crc32

Split = Literal["train", "held_out"]


def _words(text: str) -> list[str]:
    return text.split()


FIRST_NAMES: Final = _words("""
Maria Thomas Aisha Peter Linda Omar Julia Kevin Nadia Victor Elena Samuel Ingrid Hugo Fatima Daniel Priya Marco Sofia
Liam Hannah Diego Yuki Paul Grace Ahmed Clara Felix Noor Simon Alice Bruno Carmen Dennis Erika Frank Greta Henry Irene
Jonas Karin Leon Monica Nils Olga Pablo Quinn Rosa Stefan Teresa Urban Vera Walter Xenia Yusuf Zara Adam Bella Chloe
David Emma George Helen Ivan Jane Kumar Laura Mike Nina Oscar Paula Rachel Steve Tina Uma Wendy Mei Jack Anna Robert
Sarah Tom Ella Max Lucy Ben Kate Leo Ruth Carl Sara Ravi Amir Lena Iris Eric Joan Luis Amy Tim Eva Ian Zoe Sam Kim
""")
LAST_NAMES: Final = _words("""
Lopez Miller Khan Novak Schmidt Rossi Tanaka Silva Brown Jensen Dubois Kowalski Petrov Singh Moreau Weber Garcia Evans
Hansen Ibrahim Jones Keller Larsen Meyer Nguyen Okafor Patel Quist Romano Suzuki Turner Ueda Vargas Walker Young Ziegler
Adams Baker Costa Duarte Eriksson Fischer Gomez Hughes Ito Jansen Klein Lewis Martin Nielsen Olsen Parker Reed Santos
Taylor Vogel Wright Yilmaz Zimmer Bauer Clark Diaz Fox Green Hall Hill King Lee Moore Park Price Ross Scott Smith Stone
Ward Wood Wong Bell Cole Cruz Dean Ford Gray Hart Kelly Lane Long Mason Nash Page Rice Shaw Webb West Wolf Berg Lind
""")
CITIES: Final = _words("""
Lyon Oslo Porto Hamburg Leeds Turin Krakow Valencia Ghent Malmo Bergen Zurich Graz Dublin Bristol Utrecht Seville Nantes
Aarhus Tampere Riga Vilnius Brno Zagreb Split Naples Bologna Geneva Basel Bern Linz Cork Galway Cardiff Glasgow Dundee
Boston Denver Austin Portland Seattle Tucson Memphis Omaha Dallas Fresno Tulsa Toledo Dayton Buffalo Albany Raleigh
Toronto Ottawa Calgary Halifax Sydney Perth Hobart Auckland Nairobi Accra Lagos Tunis Cairo Amman Izmir Bursa Pune
Delhi Mumbai Osaka Kyoto Nagoya Busan Taipei Manila Hanoi Jakarta Lima Quito Bogota Santiago Cordoba Rosario Recife
""")
COLOURS: Final = _words("""
red blue green black white grey yellow orange purple brown pink silver golden navy beige turquoise
""")
MATERIALS: Final = _words("""
steel glass wooden ceramic cotton leather plastic copper bamboo wool linen paper rubber metal
""")
QUALITIES: Final = _words("""
small large tiny big folding round square wireless electric portable heavy light mini double tall
""")
NOUNS: Final = {
    "mug": "mugs", "kettle": "kettles", "lamp": "lamps", "chair": "chairs", "table": "tables", "towel": "towels",
    "blanket": "blankets", "pillow": "pillows", "backpack": "backpacks", "notebook": "notebooks", "bottle": "bottles",
    "basket": "baskets", "candle": "candles", "clock": "clocks", "mirror": "mirrors", "umbrella": "umbrellas",
    "wallet": "wallets", "belt": "belts", "jacket": "jackets", "scarf": "scarves", "shelf": "shelves",
    "knife": "knives", "brush": "brushes", "box": "boxes", "bench": "benches", "pan": "pans", "plate": "plates",
    "bowl": "bowls", "tray": "trays", "rug": "rugs", "curtain": "curtains", "charger": "chargers", "cable": "cables",
    "keyboard": "keyboards", "speaker": "speakers", "headset": "headsets", "camera": "cameras", "tent": "tents",
    "helmet": "helmets", "ladder": "ladders", "hammer": "hammers", "drill": "drills", "rope": "ropes",
    "bucket": "buckets", "vase": "vases", "teapot": "teapots", "apron": "aprons", "desk": "desks",
}  # fmt: skip
MONTHS: Final = _words("""
January February March April May June July August September October November December
""")
NUMBER_WORDS: Final = _words("one two three four five six seven eight nine ten")

_ONSETS: Final = _words("b br c ch d dr f g gr h j k kl l m n p pr r s st t tr v w z")
_VOWELS: Final = _words("a e i o u ai ea ie ou")
_ENDINGS: Final = _words("n r s l m t nd rt lan sen ton rik va mi no ra bury ford stad")
_ID_LETTERS: Final = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def cut(values: list[str], split: Split) -> list[str]:
    """Every fifth entry is held out, the rest is for training."""
    return [value for i, value in enumerate(values) if (i % 5 == 4) == (split == "held_out")]


def in_split(text: str, split: Split, one_in: int = 8) -> bool:
    """Membership by value: one in eight strings is held out, whatever list, sentence or formula made it."""
    return (crc32(text.lower().encode()) % one_in == 0) == (split == "held_out")


def _made_up(rng: Random) -> str:
    middle = rng.choice(_ONSETS) + rng.choice(_VOWELS) if rng.random() < 0.5 else ""
    return (rng.choice(_ONSETS) + rng.choice(_VOWELS) + middle + rng.choice(_ENDINGS)).capitalize()


def _word(rng: Random, values: list[str], split: Split) -> str:
    """A listed word of the split, or (half of the time) a made-up one that belongs to it by value."""
    if rng.random() < 0.5:
        return rng.choice(cut(values, split))
    listed = {value.lower() for value in FIRST_NAMES + LAST_NAMES + CITIES}
    while True:
        word = _made_up(rng)
        if in_split(word, split) and word.lower() not in listed:
            return word


def name(rng: Random, split: Split) -> str:
    """First name alone, or first and last name."""
    first = _word(rng, FIRST_NAMES, split)
    return first if rng.random() < 0.3 else f"{first} {_word(rng, LAST_NAMES, split)}"


def city(rng: Random, split: Split) -> str:
    return _word(rng, CITIES, split)


def order_id(rng: Random, split: Split) -> str:
    """Four shapes of letters and digits; the value decides the split."""
    while True:
        letters = "".join(rng.choice(_ID_LETTERS) for _ in range(3))
        number = rng.randrange(1000, 1000000)
        value = rng.choice([f"{letters[:2]}-{number}", f"{number}", f"{letters}{number % 10000:04d}",
                            f"{letters[0]}{number % 1000:03d}-{letters[1]}{rng.randrange(10)}"])  # fmt: skip
        if in_split(value, split):
            return value


def product(rng: Random, split: Split) -> tuple[str, str]:
    """(singular, plural) of one to three words; the whole phrase belongs to the split."""
    while True:
        noun = rng.choice(sorted(NOUNS))
        groups = [values for values in (QUALITIES, COLOURS, MATERIALS) if rng.random() < 0.45]
        words = [rng.choice(values) for values in groups]
        if not words:
            words = [rng.choice(rng.choice([QUALITIES, COLOURS, MATERIALS]))]
        if in_split(" ".join([*words, noun]), split):
            return " ".join([*words, noun]), " ".join([*words, NOUNS[noun]])

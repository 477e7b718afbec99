"""Write sentences with a label, as SST-2 has them, into reviews.csv: python reviews.py [ROWS]"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

WORDS = {
    "positive": ["charming", "moving", "funny", "tender", "gripping", "honest"],
    "negative": ["dull", "shallow", "noisy", "tired", "clumsy", "bland"],
}
THINGS = ["film", "plot", "cast", "ending", "score", "script", "camera", "dialogue"]
FRAMES = [
    "a {word} {thing}",
    "the {thing} is {word}, and the {other} as well",
    'they call the {thing} "{word}",\nand so it is',  # quotes, a comma and a newline: a row may span lines
    "{word} from the {thing} to the {other}",
]


def main(rows: int) -> None:
    draw = random.Random(0)
    with Path("reviews.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentence", "label"])
        for _ in range(rows):
            label = draw.choice(list(WORDS))
            thing, other = draw.sample(THINGS, 2)
            sentence = draw.choice(FRAMES).format(word=draw.choice(WORDS[label]), thing=thing, other=other)
            writer.writerow([sentence, label])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)

"""What benchmarks ask: a dozen prompts of our own, or question sets from a folder of JSONL files.

Set files hold one object a line with ``turns``, a list of user turns; the first turn is asked. Sets are read, never
shipped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from slipstream.base.errors import ConfigError

CODE = '''def total(prices, quantities):
    """Return the sum of price times quantity."""
    result = 0
    for price, quantity in zip(prices, quantities):
        result += price * quantity
    return result
'''

CHAT = (
    "List 3 countries and their capitals.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a river in autumn.",
    "What should I pack for a weekend in the mountains?",
    "Write a Python function that reverses a string.",
    "Give me three tips for learning a new language.",
)
COPY = (
    f"Repeat this code exactly:\n{CODE}",
    f"Rename the variable result to amount in this code and print all of it:\n{CODE}",
    f"Add a comment to each line of this code:\n{CODE}",
    "Count from 1 to 30, one number a line, with the word apple before each number.",
    "Copy this text twice: The train to the coast leaves at nine and arrives at noon. The train back leaves at five.",
    "Write a table with the columns day, breakfast, lunch and dinner for one week, with the same meals each day.",
)


@dataclass(frozen=True, slots=True)
class Question:
    set: str
    text: str


def own() -> list[Question]:
    """Six chat questions and six in which the answer repeats the prompt or itself."""
    return [*(Question("chat", text) for text in CHAT), *(Question("copy", text) for text in COPY)]


def read(folder: str | Path, name: str, count: int) -> list[Question]:
    """``count`` questions of ``folder/name.jsonl``, evenly over it, as sets are sorted by kind. Raises ConfigError
    naming the file and line.
    """
    path = Path(folder) / f"{name}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}; PROMPTS=folder names a folder of JSONL sets") from error
    questions = []
    chosen = [place * len(lines) // count for place in range(count)] if count < len(lines) else range(len(lines))
    for number, line in ((place + 1, lines[place]) for place in chosen):
        try:
            questions.append(Question(name, str(json.loads(line)["turns"][0])))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: expected an object with a list 'turns'") from error
    return questions

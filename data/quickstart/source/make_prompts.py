"""Write train.jsonl, validation.jsonl and test.jsonl, the single-turn prompts that train and test small drafters.

The material lies in families/chat.txt, families/code.txt and families/math.txt. A family is one
template and the contents of its slots. Prompts that stand alone, each a family of its own, lie one a
paragraph under the heading `# domain`: those for training in families/alone.txt, those for testing in
families/single_prompts.txt. The format of the others, line by line:

    % text               a comment
    # name               starts a family; lists before the first family serve every family of the file
    slot: a | b | c      a list of contents (lines that start with a space continue it)
    s+t: a ~ b | c ~ d   tied slots: each entry fills all of them at once
    s+t<<                the same with contents of several lines, up to a line `>>`. Entries are parted
                         by `--`; all slots but the last are on the entry's first line, parted by ` ~ `
    n = 2..9 step 1      a random whole number (the step may be left out)
    n = a * b            a number computed from the numbers above it
    when a > b           a condition on the numbers; drawings that miss it are thrown away
    > text               one line of the template; {slot} is replaced, other braces stay as they are

Everything is drawn from generators seeded by the family's name, so the output never changes while the
material stays the same, and a change to one family leaves the others alone.

Usage: python3 make_prompts.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOMAINS = ("chat", "code", "math")

# Families whose prompts are for validation. families/single_prompts.txt is the test split; all others are for training.
VALIDATION: dict[str, tuple[str, ...]] = {
    "chat": ("museum-label", "first-day", "tone-swap", "invention-why"),
    "code": ("type-hints", "bash-backup", "explain-exception-text", "js-date-helper"),
    "math": ("two-step-equation", "clock-shift", "marble-bag", "map-scale"),
}

TRAIN_LIMIT = 2  # prompts a family, at most: another task teaches more than the same in other words
VALIDATION_LIMIT = 10
FAMILY_MINIMUM = 8
DOMAIN_MINIMUM = 750
OPENING_LIMIT = 20  # prompts that may share their first five words
WORDS = (5, 90)  # the shortest and the longest prompt, in words
SIMILARITY_LIMIT = 0.7  # between prompts of different families
SAMPLED_PAIRS = 100_000

SLOT = re.compile(r"\{(\w+)\}")
RANGE = re.compile(r"^(\d+)\.\.(\d+)(?: step (\d+))?$")
LIST_LINE = re.compile(r"^([a-z]\w*(?:\+\w+)*): (.+)$")
NUMBER_LINE = re.compile(r"^([a-z]\w*) = (.+)$")
ALLOWED_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Name, ast.Constant, ast.Load,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


@dataclass
class Family:
    """One template with the contents of its slots."""

    name: str
    template: list[str] = field(default_factory=list)
    lists: dict[tuple[str, ...], list[tuple[str, ...]]] = field(default_factory=dict)
    numbers: list[tuple[str, str]] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Prompt:
    """One finished prompt."""

    domain: str
    family: str
    number: int
    split: str
    text: str

    def to_json(self) -> str:
        """Return the prompt's line."""
        record = {
            "id": f"{self.domain}/{self.family}/{self.number:04d}",
            "messages": [{"role": "user", "content": self.text}],
            "source": self.domain,
        }
        return json.dumps(record, ensure_ascii=False)


def evaluate(expression: str, values: dict[str, int]) -> int:
    """Evaluate plain arithmetic or a comparison over the numbers drawn so far."""
    tree = ast.parse(expression, mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED_NODES):
            raise ValueError(f"not allowed in an expression: {expression!r}")
    return eval(compile(tree, "<family>", "eval"), {"__builtins__": {}}, dict(values))


def split_entry(names: tuple[str, ...], parts: list[str], where: str) -> tuple[str, ...]:
    """Check that an entry fills all the slots its list names."""
    if len(parts) != len(names):
        raise ValueError(f"{where}: {len(names)} slots but {len(parts)} parts: {parts}")
    return tuple(parts)


def read_block(lines: list[str], start: int, names: tuple[str, ...], where: str) -> tuple[list, int]:
    """Read a `names<<` block from line `start` on; return its entries and the line behind it."""
    end = lines.index(">>", start)
    entries = []
    for separator, group in itertools.groupby(lines[start:end], key=lambda line: line == "--"):
        if separator:
            continue
        body = list(group)
        head = body.pop(0).split(" ~ ") if len(names) > 1 else []
        entries.append(split_entry(names, head + ["\n".join(body)], where))
    return entries, end + 1


def read_families(path: Path) -> list[Family]:
    """Parse one material file."""
    shared = Family("shared")
    families: list[Family] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        where = f"{path.name}:{at + 1}"
        family = families[-1] if families else shared
        at += 1
        if not line.strip() or line.startswith("% "):
            continue
        if line.startswith("# "):
            families.append(Family(line[2:].strip()))
        elif line.startswith(">"):
            family.template.append(line[2:])
        elif line.endswith("<<"):
            names = tuple(line[:-2].split("+"))
            family.lists[names], at = read_block(lines, at, names, where)
        elif line.startswith("when "):
            family.conditions.append(line[5:])
        elif match := LIST_LINE.match(line):
            names, text = tuple(match[1].split("+")), match[2]
            while at < len(lines) and lines[at].startswith(" "):
                text += " " + lines[at].strip()
                at += 1
            entries = [entry.strip() for entry in text.split(" | ")]
            family.lists[names] = [split_entry(names, entry.split(" ~ "), where) for entry in entries]
        elif match := NUMBER_LINE.match(line):
            family.numbers.append((match[1], match[2]))
        else:
            raise ValueError(f"{where}: cannot read {line!r}")
    for family in families:
        complete(family, shared, path)
    return families


def complete(family: Family, shared: Family, path: Path) -> None:
    """Give the family the shared lists it uses and check that no slot of its own goes unused."""
    own = {name for names in family.lists for name in names}
    material = "\n".join(family.template) + "\n"
    material += "\n".join(part for entries in family.lists.values() for entry in entries for part in entry)
    for names, entries in shared.lists.items():
        if not own.intersection(names) and any(f"{{{name}}}" in material for name in names):
            family.lists[names] = entries
    unused = [name for name in own if f"{{{name}}}" not in material]
    if unused:
        raise ValueError(f"{path.name}: family {family.name}: unused slots {unused}")


def draw_numbers(family: Family, rng: random.Random) -> dict[str, int] | None:
    """Draw the family's numbers once; None when a condition is missed."""
    values: dict[str, int] = {}
    for name, rule in family.numbers:
        if match := RANGE.match(rule):
            values[name] = rng.randrange(int(match[1]), int(match[2]) + 1, int(match[3] or 1))
        else:
            values[name] = evaluate(rule, values)
    return values if all(evaluate(rule, values) for rule in family.conditions) else None


def fill(template: str, values: dict[str, str]) -> str:
    """Replace the slots; twice, because the contents of a slot may hold slots themselves."""
    for _ in range(2):
        template = SLOT.sub(lambda match: values.get(match[1], match[0]), template)
    return template


def expand(family: Family, limit: int) -> list[str]:
    """Return up to `limit` different texts. Each list is dealt like a deck, so contents are used evenly."""
    rng = random.Random(f"prompts/{family.name}")
    decks: dict[tuple[str, ...], list[tuple[str, ...]]] = {names: [] for names in family.lists}
    texts: dict[str, None] = {}
    for _ in range(limit * 20):
        values: dict[str, str] = {}
        for names, deck in decks.items():
            if not deck:
                deck.extend(rng.sample(family.lists[names], len(family.lists[names])))
            values.update(zip(names, deck.pop(), strict=True))
        numbers = None
        while numbers is None:
            numbers = draw_numbers(family, rng)
        values.update({name: str(number) for name, number in numbers.items()})
        text = fill("\n".join(family.template), values)
        texts[text[0].upper() + text[1:]] = None
        if len(texts) == limit:
            break
    if len(texts) < min(limit, FAMILY_MINIMUM):
        raise ValueError(f"family {family.name}: only {len(texts)} different prompts")
    return list(texts)


def read_single_prompts(path: Path, split: str, name: str, digits: int) -> list[Prompt]:
    """Read prompts that stand alone; their families are `name` and a number of so many digits."""
    prompts: list[Prompt] = []
    domain = ""
    text = re.sub(r"^% .*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for paragraph in re.split(r"\n{2,}", text.strip()):
        if paragraph.startswith("# "):
            domain = paragraph[2:]
            continue
        number = sum(prompt.domain == domain for prompt in prompts)
        prompts.append(Prompt(domain, f"{name}-{number:0{digits}d}", 0, split, paragraph))
    return prompts


def build() -> list[Prompt]:
    """Build all prompts of all domains."""
    prompts = []
    for domain in DOMAINS:
        families = read_families(HERE / "families" / f"{domain}.txt")
        names = [family.name for family in families]
        if len(set(names)) != len(names):
            raise ValueError(f"{domain}: two families share a name")
        if missing := set(VALIDATION[domain]).difference(names):
            raise ValueError(f"{domain}: VALIDATION names unknown families {sorted(missing)}")
        for family in families:
            split = "validation" if family.name in VALIDATION[domain] else "train"
            limit = TRAIN_LIMIT if split == "train" else VALIDATION_LIMIT
            for number, text in enumerate(expand(family, limit)):
                prompts.append(Prompt(domain, family.name, number, split, text))
    prompts += read_single_prompts(HERE / "families" / "alone.txt", "train", "alone", 4)
    return prompts + read_single_prompts(HERE / "families" / "single_prompts.txt", "test", "single", 2)


def opening(text: str) -> str:
    """Return the first five words, lower-cased."""
    return " ".join(text.lower().split()[:5])


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Return the word 3-shingles of a text."""
    words = text.lower().split()
    return frozenset(zip(words, words[1:], words[2:], strict=False))


def jaccard(a: frozenset, b: frozenset) -> float:
    """Return the Jaccard similarity of two sets."""
    common = len(a & b)
    return common / (len(a) + len(b) - common) if common else 0.0


def check_form(prompts: list[Prompt]) -> tuple[str, int]:
    """Check sizes, lengths, duplicates and openings; return the most frequent opening and its count."""
    seen: set[str] = set()
    for prompt in prompts:
        where = f"{prompt.domain}/{prompt.family}/{prompt.number}"
        key = " ".join(prompt.text.lower().split())
        if key in seen:
            raise ValueError(f"{where}: duplicate prompt")
        seen.add(key)
        if not WORDS[0] <= len(prompt.text.split()) <= WORDS[1]:
            raise ValueError(f"{where}: {len(prompt.text.split())} words: {prompt.text!r}")
        if prompt.domain != "code" and re.search(r"[{}~|]|  ", prompt.text):
            raise ValueError(f"{where}: left-over markup: {prompt.text!r}")
    for domain, count in Counter(prompt.domain for prompt in prompts).items():
        if count < DOMAIN_MINIMUM:
            raise ValueError(f"{domain}: only {count} prompts")
    openings = Counter(opening(prompt.text) for prompt in prompts)
    too_many = {text: count for text, count in openings.items() if count > OPENING_LIMIT}
    if too_many:
        raise ValueError(f"openings shared by more than {OPENING_LIMIT} prompts: {too_many}")
    return openings.most_common(1)[0]


def check_similarity(prompts: list[Prompt]) -> dict[str, tuple[float, str]]:
    """Check that prompts of different families differ.

    Compared are all held-out prompts with all training prompts, all pairs that share an opening, and a
    random sample of the other pairs. Returns the highest similarity of each comparison with its pair.
    """
    sets = [shingles(prompt.text) for prompt in prompts]
    rng = random.Random("pairs")
    by_opening = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_opening[opening(prompt.text)].append(index)
    of_split = {
        split: [i for i, prompt in enumerate(prompts) if prompt.split == split]
        for split in ("train", "validation", "test")
    }
    comparisons = {
        "test-train": itertools.product(of_split["test"], of_split["train"]),
        "validation-train": itertools.product(of_split["validation"], of_split["train"]),
        "test-validation": itertools.product(of_split["test"], of_split["validation"]),
        "equal openings": itertools.chain.from_iterable(
            itertools.combinations(group, 2) for group in by_opening.values()
        ),
        "random pairs": (tuple(rng.sample(range(len(prompts)), 2)) for _ in range(SAMPLED_PAIRS)),
    }
    highest = {}
    for title, pairs in comparisons.items():
        best, names = 0.0, "none"
        for a, b in pairs:
            first, second = prompts[a], prompts[b]
            if (first.domain, first.family) == (second.domain, second.family):
                continue
            similarity = jaccard(sets[a], sets[b])
            if similarity > best:
                best, names = similarity, f"{first.domain}/{first.family} and {second.domain}/{second.family}"
        if best > SIMILARITY_LIMIT:
            raise ValueError(f"{title}: {names} have similarity {best:.2f}")
        highest[title] = (best, names)
    return highest


def report(prompts: list[Prompt]) -> None:
    """Print the counts."""
    for domain in DOMAINS:
        chosen = [prompt for prompt in prompts if prompt.domain == domain]
        families = len({prompt.family for prompt in chosen})
        words = sorted(len(prompt.text.split()) for prompt in chosen)
        spread = f"{words[0]} to {words[-1]} words, median {words[len(words) // 2]}"
        print(f"{domain}: {len(chosen)} prompts, {families} families, {spread}")
        for split in ("train", "validation", "test"):
            of_split = [prompt for prompt in chosen if prompt.split == split]
            count = len({prompt.family for prompt in of_split})
            print(f"  {split}: {len(of_split)} prompts, {count} families")
    print(f"all: {len(prompts)} prompts")


def main() -> None:
    """Build, check and write the prompts."""
    parser = argparse.ArgumentParser(description="Write the prompt set.")
    parser.add_argument("--out", type=Path, default=HERE / "prompts")
    out = parser.parse_args().out
    prompts = build()
    text, count = check_form(prompts)
    highest = check_similarity(prompts)
    random.Random("order").shuffle(prompts)
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        lines = (prompt.to_json() + "\n" for prompt in prompts if prompt.split == split)
        (out / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    report(prompts)
    print(f"most frequent five-word opening: {text!r}, {count} prompts")
    for title, (similarity, names) in highest.items():
        print(f"highest similarity, {title}: {similarity:.2f} ({names})")


if __name__ == "__main__":
    main()

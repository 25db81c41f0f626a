"""Writes the table of docs/compile-and-export.md from test results.

python -m pytest tests/test_compile.py tests/test_export.py --junitxml cpu.xml   # gpu.xml where there is one
python docs/compile_table.py cpu.xml gpu.xml
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

PAGE = Path(__file__).with_name("compile-and-export.md")
BEGIN, END = "<!-- table: written by docs/compile_table.py -->\n", "<!-- end of table -->\n"
PLACES = {"cuda": "GPU", "cpu": "CPU"}


def cells(files: list[str]) -> dict[tuple[str, str], str]:
    """By model and recipe: where every test of it passes, or what is the matter. One failure is the whole place's."""
    passed: dict[tuple[str, str], dict[str, None]] = {}
    other: dict[tuple[str, str], dict[str, str]] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            facts = {p.get("name"): p.get("value") for p in case.iter("property")}
            if "recipe" not in facts:
                continue
            cell, place = (facts["model"], facts["recipe"]), PLACES[facts["device"]]
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                other.setdefault(cell, {})[place] = "fails"
            elif skipped is None:
                passed.setdefault(cell, {})[place] = None
            elif "needs a CUDA GPU" not in skipped.get("message", ""):
                # After a second colon comes an error's own text.
                other.setdefault(cell, {}).setdefault(place, skipped.get("message", "skipped").partition(": ")[0])
    found = {}
    for cell in passed | other:
        bad = other.get(cell, {})
        good = sorted(place for place in passed.get(cell, ()) if place not in bad)
        texts = ["passes: " + ", ".join(good)] if good else []
        found[cell] = "; ".join(texts + [f"{place}: {text}" for place, text in bad.items()])
    return found


def table(files: list[str]) -> str:
    found = cells(files)
    models, recipes = (list(dict.fromkeys(key[axis] for key in found)) for axis in (0, 1))
    lines = [["model", *recipes], ["---"] * (1 + len(recipes))]
    lines += [[model, *(found.get((model, recipe), "–") for recipe in recipes)] for model in models]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(before + BEGIN + table(sys.argv[1:]) + END + after, encoding="utf-8")

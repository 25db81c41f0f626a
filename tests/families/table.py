"""The README's table of families, from the rows of `patches/` and the detectors that the tests run.

python tests/families/table.py             # writes it into README.md
python tests/families/table.py --versions  # prints the versions of transformers that it claims, oldest first
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from models import DETECTORS  # noqa: E402

from deformops_models import patching  # noqa: E402

README = Path(__file__).parents[2] / "README.md"
START, END = "<!-- families: written by tests/families/table.py -->\n", "<!-- end of families -->\n"

#: What the tests of each library ran on, oldest first.
VERSIONS = {
    "transformers": ("5.17.0", "5.24.0"),
    "mmcv": ("mmcv-lite 2.1.0 with mmdet 3.3.0",),
    "detrex": ("its contract; not on PyPI",),
    "rfdetr": ("1.11.2",),
    "ultralytics": ("8.4.190",),
    None: ("its contract",),
}
#: Families that came with a later version than the oldest one.
SINCE = {"pp_doclayout_v4": "5.24.0"}


def table() -> str:
    """One line for each family: library and versions, what is patched, and the whole detectors that are tested."""
    rows = {}
    for family in patching.families():
        rows.setdefault((family.framework, family.name), []).append(family)
    lines = ["| library | versions tested | family | attention | also patched | whole detectors tested |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for (framework, name), parts in rows.items():
        (attention,) = (f for f in parts if f.part == "attention")
        versions = [v for v in VERSIONS[framework] if v >= SINCE.get(name, "")]
        others = ", ".join(sorted(f.part.replace("_", " ") for f in parts if f is not attention))
        cells = (
            framework or "copied into a project",
            ", ".join(versions),
            name,
            f"`{attention.class_name}`",
            others or "–",
            ", ".join(_detectors(attention)) or "–",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _detectors(family: patching.Family) -> list[str]:
    # mmcv's class is in mmdet's detectors.
    framework = {"mmcv": "mmdet", None: "torch"}.get(family.framework, family.framework)
    found = [d for d in DETECTORS.values() if (d.framework, d.attention) == (framework, family.class_name)]
    return [d.name.removeprefix("hf-").removeprefix("mmdet-") for d in found]


def write(text: str) -> str:
    """`text`, a README, with the table of now between its marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"README.md lacks the marks {START.strip()} and {END.strip()}: put them back")
    return before + START + table() + END + after


if __name__ == "__main__":
    if "--versions" in sys.argv[1:]:
        print(*VERSIONS["transformers"])
    else:
        README.write_text(write(README.read_text(encoding="utf-8")), encoding="utf-8")
